"""Errors that speak to the user: their message alone says what is wrong and what to do, so the commands print no traceback."""


class LightSeqError(Exception):
    """Base of the plugin's own errors. Messages read ``where: what, expected, received, remedy``."""


class UsageError(LightSeqError, ValueError):
    """A command line that lacks a flag, or whose flags contradict each other."""


class UnsupportedError(UsageError):
    """A flag or model that the plugin does not honour; refused by name, never ignored."""


class DataError(LightSeqError):
    """Missing data, or data that does not fit the model."""


class TokenIdError(DataError, IndexError):
    """A token id outside the dictionary."""


class CheckpointError(LightSeqError, RuntimeError):
    """A checkpoint that cannot be read, or could not be written."""


class RankError(LightSeqError, RuntimeError):
    """Another process of a distributed run has ended, so this one cannot go on."""
