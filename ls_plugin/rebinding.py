"""The one way in which the plugin replaces a function of fairseq by its own. Nothing installed is edited."""

import functools
from collections.abc import Callable

_WRAPPER = "_ls_wrapper"  # attribute of a rebound function: what it was rebound to


def wrap(owner, name: str, wrapper: Callable) -> None:
    """Rebinds ``owner.name`` to ``wrapper``, which is called with the function that was there as its first argument.

    That function stays reachable as ``__wrapped__``. Doing it again changes nothing, also when others have wrapped the result since.

    Args:
        owner: a module, or a class (``wrapper`` then gets the function, and the instance after it).
    Raises:
        RuntimeError: there is nothing of that name, so this fairseq is not one that the plugin knows.
    """
    stock = _find(owner, name)
    function = stock
    while function is not None:
        if getattr(function, _WRAPPER, None) is wrapper:
            return
        function = getattr(function, "__wrapped__", None)

    @functools.wraps(stock)
    def wrapped(*args, **kwargs):
        return wrapper(stock, *args, **kwargs)

    setattr(wrapped, _WRAPPER, wrapper)
    setattr(owner, name, wrapped)


def beneath_wraps(function: Callable | None) -> Callable | None:
    """``function`` without the plugin's own wrappers around it; wrappers of others stay."""
    while getattr(function, _WRAPPER, None) is not None:
        function = function.__wrapped__
    return function


def replace(owner, name: str, function: Callable) -> None:
    """Rebinds ``owner.name`` to ``function`` itself, for what TorchScript compiles: it reads the source of a function, not of a wrapper.

    Raises:
        RuntimeError: as for :func:`wrap`.
    """
    _find(owner, name)
    setattr(owner, name, function)


def _find(owner, name: str) -> Callable:
    stock = getattr(owner, name, None)
    if stock is None:
        where = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
        raise RuntimeError(
            f"{where} must have {name}, which ls_plugin wraps, but has none; install the fairseq that ls_plugin requires"
        )
    return stock
