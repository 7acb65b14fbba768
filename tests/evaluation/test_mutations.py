"""Faults of a head that leave the text right: `--test` must fail for each, on the released head and its real target."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_jax.loading import CheckpointError
from eagle_jax.loading.demo_target import packaged_target

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_released_head_passes_and_every_fault_is_noticed(tmp_path):
    try:
        packaged_target()
    except CheckpointError as error:
        pytest.skip(f"SmolLM2 is out of reach: {error}")
    # In a process of its own: the settings of the tests compile quickly and run slowly.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    out = tmp_path / "mutations.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "head_mutations.py"), "--out", str(out)]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert len(found) == 4
    for fault, checks in found.items():
        assert "log-probabilities" in checks[-1]["what"]
        assert all(check["passed"] for check in checks) == (fault == "none"), fault
        # These must notice a fault by themselves: the acceptance may not.
        assert checks[-1]["passed"] == (fault == "none"), fault
