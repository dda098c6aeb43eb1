import pytest

from ..conftest import _load_simt_library, build_simt_library
from .control import Simt


@pytest.fixture(scope="module")
def simt() -> Simt:
    """The harness's own controls of the library that the backend ``simt`` runs."""
    _load_simt_library()
    return Simt(build_simt_library())
