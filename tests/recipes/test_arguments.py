"""Lists on our own command lines: separated by blanks, commas, or both, everywhere."""

import argparse
import ast

import pytest

from ls_plugin.arguments import Listed
from ls_plugin.report import estimate, kernels, run
from tests.recipes.conftest import ROOT


def parse(words, **kwargs):
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--given", action=Listed, **kwargs)
    parser.add_argument("rest", nargs="*")
    return parser.parse_args(["--given", *words, "--", "rest"]).given


@pytest.mark.parametrize("words", [["1", "2", "3"], ["1,2,3"], ["1,2", "3"], ["1,", "2", ",3"], ["1, 2 ,3"]])
def test_separators(words):
    assert parse(words, type=int) == [1, 2, 3]
    assert parse(words, type=int, choices=range(4)) == [1, 2, 3]
    assert parse(words) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("words", "told", "kwargs"),
    [
        (["1,x"], "invalid int value: 'x'", {"type": int}),
        (["a,z"], "invalid choice: 'z' (choose from a, b)", {"choices": "ab"}),
        ([","], "must name one or more", {}),
    ],
)
def test_what_is_refused(words, told, kwargs):
    with pytest.raises(argparse.ArgumentError) as caught:
        parse(words, **kwargs)
    assert told in str(caught.value) and "--given" in str(caught.value)


def test_none_where_none_is_allowed():
    assert parse([], nargs="*", choices="ab") == [] == parse([""], nargs="*")


@pytest.mark.parametrize(
    ("module", "flag", "values", "more"),
    [
        (run, "--contenders", ["stock", "ls", "stock+fused_adam"], ["--out", "x"]),
        (kernels, "--ops", ["layer_norm", "embedding"], ["--out", "x"]),
        (kernels, "--dtypes", ["fp32", "bf16"], ["--out", "x"]),
        (estimate, "--arch", ["transformer", "transformer_lm"], ["--vocab", "9"]),
        (estimate, "--max-tokens", ["512", "4096"], ["--vocab", "9"]),
        (estimate, "--gpu", ["A100", "H100"], ["--vocab", "9"]),
    ],
)
def test_the_report_takes_both(module, flag, values, more):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    for words in (values, [",".join(values)]):
        args = parser.parse_args([flag, *words, *more])
        assert getattr(args, flag[2:].replace("-", "_")) == values


def test_no_list_is_read_in_another_way():
    """Every option with several values, of the report and the recipes."""
    for path in [*ROOT.glob("ls_plugin/report/*.py"), *ROOT.glob("recipes/*/*.py")]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"):
                continue
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            of_fairseq = keywords.get("metavar", "").startswith("'-- ")  # flags that are passed on
            assert keywords.get("nargs", "'?'") == "'?'" or keywords.get("action") == "Listed" or of_fairseq, (
                f"{path}:{call.lineno}"
            )
            assert "separated by commas" not in keywords.get("help", ""), f"{path}:{call.lineno}"
