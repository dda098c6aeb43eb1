"""Names of the plugin's architectures, criterions and optimizers: those of fairseq that they stand for, with a prefix."""

PREFIX = "ls_"


def stock_name(name: str) -> str:
    """fairseq's own architecture, criterion or optimizer that ``name`` is the twin of: ls_transformer -> transformer."""
    return name.removeprefix(PREFIX)
