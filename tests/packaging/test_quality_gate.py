"""The gate itself: that it would notice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_pytest(folder: Path, body: str, *, module: str = "eagle_jax") -> subprocess.CompletedProcess[str]:
    """Runs one test, under this project's configuration, that calls `shout` of a module of that name."""
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(
        "import warnings\n\ndef shout():\n    warnings.warn('deprecated', DeprecationWarning, stacklevel=1)\n"
    )
    (folder / "test_it.py").write_text(f"import {module}\n\ndef test_it():\n    {body}\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(folder),
        str(folder),
    ]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTEST_ADDOPTS": "-p no:cacheprovider -p no:xdist"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)


@pytest.mark.parametrize("module", ["eagle_jax", "pallas_kernels"])
def test_a_warning_of_our_own_code_fails_a_test(tmp_path, module):
    done = run_pytest(tmp_path, f"{module}.shout()", module=module)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout


def test_a_warning_of_other_code_does_not(tmp_path):
    done = run_pytest(tmp_path, "somebody_else.shout()", module="somebody_else")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def gate(tmp_path):
    """Runs `.ci/run` with programs that only note their call; those whose call contains `failing` fail with 3."""
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir()

    def run(failing: str) -> tuple[int, list[str]]:
        note = f'#!/bin/sh\necho "${{0##*/}} $*" >>{log}\ncase "${{0##*/}} $*" in *"{failing}"*) exit 3 ;; esac\n'
        # The interpreter fills the environment that it is asked for with programs of the same kind.
        fill = f'if [ "$1 $2" = "-m venv" ]; then for last; do :; done; mkdir -p "$last/bin"; cp {programs}/* "$last/bin/"; fi\n'
        for name, text in {"python": note + fill, "ruff": note, "mypy": note, "lint-imports": note}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(programs / "python"), "TMPDIR": str(tmp_path)}
        done = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)
        calls = [call.strip() for call in log.read_text().splitlines()]
        return done.returncode, [call for call in calls if not call.startswith("python -c")]

    return run


STEPS = [
    "ruff check .",
    "ruff format --check .",
    "mypy",
    "lint-imports",
    "python -m pytest -n 2 --dist loadfile --no-loadscope-reorder",
]


def test_the_gate_installs_and_then_takes_every_step(gate):
    code, calls = gate("none fails")
    assert code == 0
    assert calls[-5:] == STEPS
    installed = [call.split()[-1] for call in calls if "pip install" in call]
    # PyTorch first and by its version: asked for by a range it would come with CUDA.
    assert installed == ["torch==2.13.0", f"{ROOT}[test]"]


@pytest.mark.parametrize("step", STEPS)
def test_the_gate_fails_when_a_step_does_and_stops_there(gate, step):
    code, calls = gate(step)
    assert code == 3
    assert calls[-1] == step


def test_the_gate_fails_when_the_installation_does(gate):
    code, calls = gate("pip install")
    assert code == 3
    assert not set(calls) & set(STEPS)
