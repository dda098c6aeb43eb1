"""What the recipes raise."""


class RecipeError(Exception):
    """A part of a recipe failed; the message says what, and how to go on."""
