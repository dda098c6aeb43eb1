"""lightseq-doctor on environments that lack something."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ls_plugin.cli import doctor
from tests.recipes.conftest import ROOT

TORCH = {"version": "2.13.0+cpu", "cuda_build": None, "gpus": [], "capabilities": [], "threads": 2}
GPU = {"version": "2.13.0", "cuda_build": "13.0", "gpus": ["NVIDIA H200"], "capabilities": ["90"], "threads": 16}
PLUGIN = {
    "version": "0.1.0", "at": "/x/ls_plugin", "fairseq": "/x/fairseq", "loaded": True, "path": "/x/libls_kernels.so",
    "reason": "", "cuda": True, "isa": "avx2", "archs": "75;80;90",
}  # fmt: skip


@pytest.fixture
def versions(monkeypatch):
    """Installed distributions, as the test says."""
    installed = {}
    monkeypatch.setattr(doctor, "version_of", installed.get)
    return installed


@pytest.mark.parametrize(
    "version, state",
    [((3, 9, 1), doctor.BAD), ((3, 10, 0), doctor.OK), ((3, 12, 9), doctor.OK), ((3, 13, 0), doctor.BAD)],
)
def test_python(version, state):
    check = doctor.check_python(version)
    assert check.state == state
    assert bool(check.remedy) == (state == doctor.BAD)


def test_torch(versions):
    assert doctor.check_torch(TORCH).state == doctor.OK
    assert doctor.check_torch({**TORCH, "version": "2.9.1"}).found == "2.9.1 is older than 2.10"
    assert doctor.check_torch({"error": "boom"}).found == "not installed"
    versions["torch"] = "2.13.0"
    assert doctor.check_torch({"error": "boom"}).found == "does not import: boom"


def test_gpu():
    assert doctor.check_gpu(GPU, []).state == doctor.OK
    assert doctor.check_gpu(TORCH, []).found == "none; training runs on the CPU"
    assert "CPU build" in doctor.check_gpu(TORCH, ["GPU 0: H200"]).found
    no_driver = doctor.check_gpu({**GPU, "gpus": []}, ["GPU 0: H200"])
    assert no_driver.state == doctor.WARN and "driver" in no_driver.remedy


def test_fairseq(versions):
    check = doctor.check_fairseq({}, (3, 11))
    assert check.state == doctor.BAD and "fairseq-fixed==0.12.3.1" in check.remedy
    versions["fairseq"] = "0.12.2"
    assert "does not work on this Python" in doctor.check_fairseq({}, (3, 11)).found
    assert doctor.check_fairseq({}, (3, 10)).state == doctor.OK
    versions["fairseq-fixed"] = "0.12.3.1"
    assert "overwrite each other" in doctor.check_fairseq({}, (3, 11)).found
    del versions["fairseq"]
    assert doctor.check_fairseq(PLUGIN, (3, 12)).state == doctor.OK


def test_no_compiled_library_is_a_warning_with_its_price(versions):
    missing = {**PLUGIN, "loaded": False, "path": None, "reason": "libls_kernels.so was not built; install g++"}
    library = doctor.check_plugin(missing)[-1]
    assert library.state == doctor.WARN and library.remedy == "install g++"
    assert "was not built" in library.found and "stock fairseq's speed" in library.found
    assert doctor.can_train(doctor.check_plugin(missing))


def test_a_plugin_that_does_not_import_is_told(versions):
    (check,) = doctor.check_plugin({"error": "ImportError: ls_plugin cannot run here: fairseq is not installed"})
    assert check.state == doctor.BAD and check.found == "not installed"
    versions["ls_plugin"] = "0.1.0"
    (check,) = doctor.check_plugin({"error": "ImportError: x"})
    assert check.found == "does not import: ImportError: x"


def test_kernels_for_this_gpu():
    (check,) = doctor.check_library_on_gpu(GPU, PLUGIN)
    assert check.state == doctor.OK
    (check,) = doctor.check_library_on_gpu(GPU, {**PLUGIN, "cuda": False})
    assert check.state == doctor.WARN and "not built" in check.found
    (check,) = doctor.check_library_on_gpu({**GPU, "capabilities": ["70"]}, PLUGIN)
    assert check.state == doctor.WARN and "not for sm_70" in check.found
    assert doctor.check_library_on_gpu(TORCH, PLUGIN) == []


def test_apex_is_told_apart_by_its_files_and_never_imported(tmp_path, versions):
    assert doctor.check_apex([str(tmp_path)]).found == "not installed, and not needed"
    package = tmp_path / "apex"
    (package / "optimizers").mkdir(parents=True)  # so far a folder that happens to bear the name
    assert doctor.check_apex([str(tmp_path)]).found == "not installed, and not needed"
    (package / "__init__.py").write_text("raise SystemExit('an apex was imported')")
    (package / "optimizers" / "__init__.py").write_text("from .fleet import Optimizer\n")
    check = doctor.check_apex([str(tmp_path)])
    assert check.state == doctor.WARN and "unrelated" in check.found and check.remedy == "pip uninstall apex"
    (package / "optimizers" / "__init__.py").write_text("from .fused_adam import FusedAdam\n")
    assert "without its CUDA extensions" in doctor.check_apex([str(tmp_path)]).found
    (tmp_path / f"amp_C{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    assert doctor.check_apex([str(tmp_path)]).state == doctor.OK


def test_an_apex_that_is_one_file_is_not_nvidias(tmp_path, versions):
    (tmp_path / "apex.py").write_text("raise SystemExit('an apex was imported')")
    assert "unrelated" in doctor.check_apex([str(tmp_path)]).found


def test_optional_packages(versions):
    lines = {check.name: check for check in doctor.check_optional()}
    assert all(check.state == doctor.OK for check in lines.values())
    assert lines["sacremoses"].found.endswith("--tokenizer moses): pip install sacremoses")
    versions.update(tensorboard="2.20.0", wandb="0.22.0")
    lines = {check.name: check.found for check in doctor.check_optional()}
    assert lines["tensorboardX"].startswith("tensorboard 2.20.0, for curves")  # fairseq takes either
    assert lines["wandb"].startswith("wandb 0.22.0") and lines["sacrebleu"].startswith("not installed; optional")


def test_importing_the_plugin_says_nothing_of_optional_packages(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import ls_plugin"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0 and "tensorboard" not in done.stdout + done.stderr


def test_probes_survive_what_they_try():
    assert doctor.probe("print('noise'); print('{\"a\": 1}')") == {"a": 1}
    assert doctor.probe("raise ImportError('no such thing')") == {"error": "ImportError: no such thing"}
    assert doctor.probe("import os; os.abort()") == {"error": "killed by signal 6"}


def test_every_line_that_is_not_ok_has_a_remedy_and_the_report_ends_with_the_answer(versions):
    checks = [
        doctor.check_python((3, 9, 0)), doctor.check_torch({"error": "x"}), doctor.check_fairseq({}, (3, 11)),
        *doctor.check_plugin({"error": "x"}), doctor.check_gpu(TORCH, ["GPU 0"]), doctor.check_apex([]),
    ]  # fmt: skip
    assert all(check.remedy for check in checks if check.state != doctor.OK)
    assert doctor.render(checks).splitlines()[-1] == "training cannot run: fix Python, torch, fairseq, ls_plugin"


def test_the_command_here(tmp_path):
    """In the environment of the tests training can run; and as a file it needs no importable plugin."""
    script = ROOT / "ls_plugin" / "cli" / "doctor.py"
    done = subprocess.run(
        [sys.executable, str(script), "--json"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["can_train"]
    names = {check["name"] for check in told["checks"]}
    assert names >= {
        "Python",
        "torch",
        "GPU",
        "CUDA toolkit",
        "fairseq",
        "ls_plugin",
        "compiled library",
        "apex",
        "DeepSpeed",
        "tensorboardX",
        "wandb",
        "sacrebleu",
        "sacremoses",
    }


def test_a_bare_python_is_told_what_is_missing(tmp_path):
    """-S -I hides every installed package: nothing but the standard library is there."""
    script = ROOT / "ls_plugin" / "cli" / "doctor.py"
    code = f"""
import runpy, sys
sys.argv = ["doctor"]
import importlib.util
spec = importlib.util.spec_from_file_location("doctor", {str(script)!r})
doctor = importlib.util.module_from_spec(spec)
sys.modules["doctor"] = doctor
spec.loader.exec_module(doctor)
probe = doctor.probe
doctor.probe = lambda code: probe("import sys; sys.path[:] = [p for p in sys.path if 'packages' not in p]\\n" + code)
doctor.main([])
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "bad   torch" in done.stdout and "training cannot run: fix" in done.stdout


@pytest.mark.parametrize("missing, line", [("fairseq", "ls_plugin"), ("torch", "torch")])
def test_the_console_script_runs_where_a_requirement_does_not_import(missing, line, tmp_path):
    """It must not import what it judges, although it lies in the package that does."""
    (tmp_path / "sitecustomize.py").write_text(f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == {missing!r}:
            raise ImportError("{missing} is shut off")
sys.meta_path.insert(0, Blocker())
""")
    script = Path(sys.executable).with_name("lightseq-doctor")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([script], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    (told,) = (found for found in done.stdout.splitlines() if found.startswith(f"bad   {line} "))
    assert f"{missing} is shut off" in told
    assert "training cannot run: fix" in done.stdout
