"""Backends of the op tests: the compiled CPU kernels, the CUDA kernels on the CPU (SIMT harness), the CUDA kernels on a GPU."""

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.limits import LIMIT_S

# Without it torch refuses cuBLAS products under use_deterministic_algorithms.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# The same products in every run, in the commands that tests start as well, and nothing kept in the user's home.
os.environ.setdefault("LS_PRODUCTS", "ls")
# A launch on the SIMT harness is stopped after a minute by default.
os.environ.setdefault("LS_SIMT_TIMEOUT", str(LIMIT_S))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ls_plugin import _library, ops

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Backend:
    """Where an op test runs: the device of its tensors, and which build of the kernels serves them."""

    name: str
    device: torch.device
    namespace: str


@functools.cache
def build_simt_library() -> Path:
    """The bindings and the CUDA sources, compiled by g++ against the SIMT runtime; cached under build/."""
    from tests.simt.build import build_library

    kernels = ROOT / "kernels"
    names = [path.stem for path in sorted((kernels / "cuda").glob("*.cu"))]
    torch_dir = Path(torch.__file__).parent
    return build_library(
        ROOT / "build" / "simt",
        cu_sources=[kernels / "cuda" / f"{name}.cu" for name in names],
        cpp_sources=[kernels / "ops" / f"{name}.cpp" for name in names] + [kernels / "schemas.cpp"],
        include_dirs=[kernels, ROOT / "tests" / "simt", torch_dir / "include"],
        extra_flags=["-DTORCH_TARGET_VERSION=0x020a000000000000"],
        link_flags=[f"-L{torch_dir / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"],
    )


@functools.cache
def _load_simt_library() -> None:
    torch.ops.load_library(str(build_simt_library()))
    ops.register("ls_simt")


@contextlib.contextmanager
def _use(backend: Backend) -> Iterator[Backend]:
    _library.use_namespace(backend.namespace)
    try:
        yield backend
    finally:
        _library.use_namespace("ls")


@pytest.fixture(params=["cpu", "simt", "cuda"])
def backend(request) -> Iterator[Backend]:
    """Runs the test on every backend; ops called from ls_plugin.ops then use that backend's kernels."""
    name = request.param
    if not _library.status().loaded:
        pytest.skip(f"no compiled library: {_library.status().reason}")
    if name == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU is visible")
        if not _library.status().cuda:
            pytest.skip("the compiled library was built without CUDA")
    if name == "simt":
        _load_simt_library()
    device = torch.device("cuda" if name == "cuda" else "cpu")
    with _use(Backend(name, device, "ls_simt" if name == "simt" else "ls")) as chosen:
        yield chosen
