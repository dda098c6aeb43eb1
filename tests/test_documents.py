"""What the documents list is what the code has."""

import ast
import re
from pathlib import Path

import pytest

from ls_plugin.deepspeed import config as deepspeed_config
from ls_plugin.models import unsupported
from ls_plugin.optim import trainer
from tests.test_style import tracked

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "ls_plugin" / "README.md").read_text()


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def read_variables() -> set[str]:
    """LS_ variables that code reads from the environment."""
    patterns = {
        ".py": r"environ(?:\.get\(|\.setdefault\(|\[)\s*\"(LS_\w+)\"",
        ".cpp": r"getenv\(\"(LS_\w+)\"",
        ".h": r"getenv\(\"(LS_\w+)\"",
        ".sh": r"\$\{?(LS_\w+)|\$?\{(LS_\w+)|: \"\$\{(LS_\w+)",
    }
    found: set[str] = set()
    for name in tracked("*.py", "*.cpp", "*.h", "*.sh", ".ci/run"):
        pattern = patterns[Path(name).suffix or ".sh"]
        for groups in re.findall(pattern, (ROOT / name).read_text()):
            found |= {groups} if isinstance(groups, str) else set(filter(None, groups))
    return found


def test_every_environment_variable_is_in_the_table_and_no_other():
    listed = set(re.findall(r"`(LS_\w+)`", section("Environment variables")))
    read = read_variables()
    assert len(read) > 10
    assert read == listed, f"not in the table: {sorted(read - listed)}; read nowhere: {sorted(listed - read)}"


def flags_of_refusals() -> set[str]:
    """The flag that each ``raise UnsupportedError("--flag ...")`` of training is about, after the names that it begins with."""
    names = {"--arch", "--criterion", "--optimizer", "--deepspeed"}
    found = set()
    for path in sorted((ROOT / "ls_plugin").rglob("*.py")):
        if {"report", "deepspeed"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UnsupportedError":
                text = "".join(
                    part.value
                    for part in ast.walk(node)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )
                flags = [flag for flag in re.findall(r"--[a-z][a-z0-9-]*[a-z0-9]", text) if flag not in names]
                found |= set(flags[:1])
    return found


REFUSED = {
    *(f"--{name.replace('_', '-')}" for name in unsupported._REFUSED),
    *(flag for _, flag, _ in trainer._REFUSED),
    *("--use-old-adam", "--fp16-adam-stats", "--tpu"),
    *flags_of_refusals(),
}


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_every_refused_flag_is_in_the_table(flag):
    refused = [
        line.rpartition(" | ")[2]
        for line in section("Supported and not supported").splitlines()
        if line.startswith("| ")
    ]
    assert any(f"`{flag}" in cell for cell in refused), (
        f"{flag}: add it to ls_plugin/README.md, Supported and not supported"
    )


def test_every_flag_that_deepspeed_refuses_is_listed():
    listed = (
        (ROOT / "recipes" / "multi_gpu" / "README.md")
        .read_text()
        .partition("- Refused beside `--deepspeed`")[2]
        .partition("\n- ")[0]
    )
    for _, name, *_ in deepspeed_config._FLAGS_REFUSED:
        assert f"`--{name.replace('_', '-')}`" in listed, name


def test_links_lead_somewhere():
    """Files, and headings of them."""
    for name in tracked("*.md"):
        text = (ROOT / name).read_text()
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            path, _, anchor = target.partition("#")
            if "://" in path:
                continue
            file = (ROOT / name).parent / path if path else ROOT / name
            assert file.exists(), f"{name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in anchors, f"{name}: {target}"
