"""Replacing a function by another: once, by name, and with a way back."""

import functools
from types import ModuleType

import pytest

from ls_plugin.rebinding import wrap


def twice(stock, x):
    return 2 * stock(x)


def plus_one(stock, x):
    return stock(x) + 1


@pytest.fixture
def module():
    module = ModuleType("elsewhere")

    def identity(x):
        """Says what it is."""
        return x

    module.identity = identity
    return module


def test_once_only_and_the_stock_function_stays_reachable(module):
    stock = module.identity
    wrap(module, "identity", twice)
    wrapped = module.identity
    wrap(module, "identity", twice)
    assert module.identity is wrapped
    assert wrapped(3) == 6
    assert wrapped.__wrapped__ is stock
    assert (wrapped.__name__, wrapped.__doc__) == ("identity", "Says what it is.")


@pytest.mark.parametrize("marks_it", [True, False])
def test_once_only_below_what_others_wrap_around_it(module, marks_it):
    wrap(module, "identity", twice)
    inner = module.identity

    def other(x):
        return inner(x)

    module.identity = functools.wraps(inner)(other) if marks_it else other
    if not marks_it:
        other.__wrapped__ = inner
    before = module.identity
    wrap(module, "identity", twice)
    assert module.identity is before


def test_two_wrappers_of_one_name(module):
    for _ in range(2):
        wrap(module, "identity", twice)
        wrap(module, "identity", plus_one)
    assert module.identity(3) == 7


def test_a_method_gets_its_instance():
    class Counter:
        def __init__(self, start):
            self.value = start

    wrap(Counter, "__init__", lambda stock, self, start: stock(self, start + 1))
    assert Counter(1).value == 2


def test_a_missing_name_is_an_error_that_says_so(module):
    with pytest.raises(RuntimeError, match="elsewhere must have gone, which ls_plugin wraps, but has none"):
        wrap(module, "gone", twice)
    with pytest.raises(RuntimeError, match=r"Nothing must have gone"):
        wrap(type("Nothing", (), {}), "gone", twice)
