"""fairseq's ``eval``, for data only: strings of a configuration are values, never code.

fairseq passes strings such as ``--adam-betas`` and a convolutional model's ``encoder_layers`` to ``eval``. Such a string may come from
a checkpoint, so loading a checkpoint could run code although torch's ``weights_only`` refuses foreign pickles. :func:`install` gives
every module of fairseq a name ``eval`` of its own, bound to :func:`evaluate`: a module's name comes before Python's builtin.
"""

import argparse
import ast
import functools
import importlib.abc
import operator
import sys
from collections.abc import Iterator, Mapping

from ls_plugin.errors import CheckpointError, UsageError

PACKAGES = ("fairseq", "fairseq_cli")
MAX_CHARACTERS = 10_000
MAX_ELEMENTS = 10_000  # of a repeated list; the longest in fairseq's recipes has some 50

_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_}
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

# Where the strings of the last checkpoint that was loaded come from: text -> (file, key).
_origins: dict[str, tuple[str, str]] = {}


class NotDataError(UsageError):
    """A string that should describe a value and is something else, such as a call.

    A ValueError too, so argparse names the flag that the string was given for.
    """


def install() -> None:
    """Binds ``eval`` to :func:`evaluate` in fairseq's modules, now and when they are imported.  Calling it again changes nothing."""
    for name, module in list(sys.modules.items()):
        spec = getattr(
            module, "__spec__", None
        )  # of __main__ under python -m, whose name in sys.modules is not its own
        if module is not None and _is_fairseq(spec.name if spec else name):
            module.eval = evaluate
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def evaluate(text: str, *_scopes):
    """The value that ``text`` describes: what ``ast.literal_eval`` takes, and arithmetic as in ``[(64, 3)] * 4 + [(128, 3)]``.

    Args:
        text: an expression of numbers, strings, True, False, None, lists, tuples, dicts and sets, with ``+``, ``-``, ``*`` and ``/``.
        _scopes: ``eval``'s globals and locals. Names are not allowed, so they have no use.
    Raises:
        CheckpointError: anything else, or a value that is too large, from a checkpoint. The message names the file and the key.
        NotDataError: the same from elsewhere.
        TypeError: ``text`` is no string.
    """
    if not isinstance(text, str):
        raise TypeError(f"eval: the expression must be a string, got {type(text).__name__}")
    try:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"longer than {MAX_CHARACTERS:,} characters")
        return _value(ast.parse(text.strip(), mode="eval").body)
    # A deep nesting may exhaust the parser's stack or memory.
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        path, key = _origins.get(text, (None, "configuration"))
        reason = "" if isinstance(error, (SyntaxError, MemoryError, RecursionError)) else f" ({error})"
        message = (
            f"{key}: must be numbers, strings, lists, tuples or dicts, as in [(64, 3)] * 4, got {shown!r}{reason}; "
            "fairseq would run it as code, so it is refused"
        )
        raise CheckpointError(f"checkpoint {path}: {message}") if path else NotDataError(message) from None


def remember_origin(path, cfg) -> None:
    """Notes the strings in a checkpoint's configuration, so that an error can name the file and the key."""
    _origins.clear()
    for key, text in _strings(cfg, ""):
        _origins.setdefault(text, (str(path), key))


def _strings(node, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, argparse.Namespace):
        yield from _strings(vars(node), key)
    elif isinstance(node, Mapping):
        items = node.items_ex(resolve=False) if hasattr(node, "items_ex") else node.items()  # omegaconf's
        for name, value in items:
            yield from _strings(value, f"{key}.{name}" if key else str(name))


def _value(node: ast.expr):
    match node:
        case ast.Constant():
            return node.value
        case ast.List() | ast.Tuple() | ast.Set():
            make = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
            return make(_value(element) for element in node.elts)
        case ast.Dict() if None not in node.keys:
            return {_value(k): _value(v) for k, v in zip(node.keys, node.values, strict=True)}
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _UNARY[type(node.op)](_value(node.operand))
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            left, right = _value(node.left), _value(node.right)
            _check_operands(node.op, left, right)
            return _ARITHMETIC[type(node.op)](left, right)
    raise ValueError(f"{type(node).__name__.lower()} is not allowed")


def _check_operands(op: ast.operator, left, right) -> None:
    """Raises ValueError unless both are numbers, or lists or tuples to be joined or repeated within the limit."""
    sequences = [x for x in (left, right) if isinstance(x, (list, tuple))]
    numbers = [x for x in (left, right) if isinstance(x, (int, float, complex))]
    if len(sequences) + len(numbers) < 2:
        raise ValueError("only numbers, lists and tuples can be combined")
    if len(sequences) == 1 and isinstance(op, ast.Mult):
        n_elements = sum(map(_n_elements, sequences[0])) * max(numbers[0], 0)
        if not isinstance(numbers[0], int) or n_elements > MAX_ELEMENTS:
            raise ValueError(f"a list can be repeated up to {MAX_ELEMENTS:,} elements")


def _n_elements(value) -> int:
    """The elements at every depth, each list or tuple among them: a list of empty lists takes memory too."""
    return 1 + sum(map(_n_elements, value)) if isinstance(value, (list, tuple)) else 1


def _is_fairseq(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES


class _Finder(importlib.abc.MetaPathFinder):
    """Finds fairseq's modules as Python does, and gives them ``eval`` before their code runs."""

    def find_spec(self, fullname, path, target=None):
        if not _is_fairseq(fullname):
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader.exec_module = functools.partial(_exec_module, spec.loader.exec_module)
                return spec
        return None


def _exec_module(stock, module) -> None:
    module.eval = evaluate
    stock(module)
