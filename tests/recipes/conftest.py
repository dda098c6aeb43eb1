"""The recipes are scripts, no package: the tests load them by path."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart"


def _load(name: str):
    qualified = f"quickstart_{name}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, QUICKSTART / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module  # dataclasses look their module up there
        spec.loader.exec_module(module)
    return sys.modules[qualified]


@pytest.fixture(scope="session")
def prepare():
    return _load("prepare")


@pytest.fixture(scope="session")
def report():
    return _load("report")


@pytest.fixture(scope="session")
def run_module():
    """run.py; it imports its neighbours by their bare names."""
    sys.path.insert(0, str(QUICKSTART))
    try:
        return _load("run")
    finally:
        sys.path.remove(str(QUICKSTART))


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a script of recipes/benchmarks, and the neighbours that it imports, without the silence that it wants for itself."""
    folder = ROOT / "recipes" / "benchmarks"
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("logging.disable", lambda level: None)
    yield importlib.import_module
    for name in {path.stem for path in folder.glob("*.py")} & (set(sys.modules) - before):
        del sys.modules[name]
