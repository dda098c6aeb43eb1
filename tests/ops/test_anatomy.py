"""Every op has each of its places under one stem (style.md, "Anatomy of one op")."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILED = sorted(path.stem for path in (ROOT / "kernels" / "ops").glob("*.cpp"))
COMPOSITES = {
    "linear_cross_entropy": "torch's products around the kernel of label_smoothed_cross_entropy, on any device",
}
CPU_ONLY = {
    "product": "on a GPU it is torch's",
    "fused_attention": "on a GPU products around the kernel of attention_softmax, or torch's attention",
}
STEMS = sorted([*COMPILED, *COMPOSITES])
CPU_PLACES, CUDA_PLACES = ["kernels/cpu/{stem}.cpp"], ["kernels/cuda/{stem}.cu"]
PLACES = [
    "ls_plugin/ops/{stem}.py",
    "ls_plugin/reference/{stem}.py",
    "tests/ops/test_{stem}.py",
    "ls_plugin/report/op_cases/{stem}.py",
]


@pytest.mark.parametrize("stem", STEMS)
def test_op_has_all_its_places(stem):
    places = list(PLACES)
    if stem in COMPILED:
        places += CPU_PLACES if stem in CPU_ONLY else CPU_PLACES + CUDA_PLACES
    missing = [place for place in places if not (ROOT / place.format(stem=stem)).exists()]
    assert not missing, f"{stem} lacks {', '.join(place.format(stem=stem) for place in missing)}"
    assert f'"{stem}' in (ROOT / "kernels" / "schemas.cpp").read_text(), f"{stem} has no schema in the index"


def test_no_op_outside_the_index():
    assert {path.stem for path in (ROOT / "kernels/cuda").glob("*.cu")} == set(COMPILED) - set(CPU_ONLY)
    for folder, pattern in (("ls_plugin/reference", "*.py"), ("ls_plugin/ops", "*.py")):
        stems = {path.stem for path in (ROOT / folder).glob(pattern)} - {
            "__init__",
            "autograd",
            "checks",
            "rng",
            "dropout",
        }
        assert stems == set(STEMS), f"{folder} and kernels/ops disagree"
