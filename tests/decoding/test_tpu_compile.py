"""Whole rounds compile for real TPU generations, without a TPU: libtpu compiles for a topology that is only named."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (pip install 'eagle-jax[tpu]')"
)

KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
MEMORY = {"v5e": 16e9, "v5p": 95e9, "v6e": 32e9, "tpu7x": 96e9}
"""Bytes of one device."""

COPIED = {"v5e": 0.25, "v5p": 0.25, "v6e": 0.25, "tpu7x": 1.2}
"""Most temporaries, as a share of the weights. For tpu7x, libtpu 0.0.52 copies every matrix for the time of a dispatch."""


def compile_for(
    generation: str, shape: str, layers: int, slots: int, *trees: str, timeout: int
) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "support.compile_for_tpu", generation, shape, str(layers), str(slots), *trees],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [r["tree"] for r in results] == list(trees)
    for result in results:
        print(result)
        assert result["kind"].startswith(KINDS[generation])
        # Weights and state come in as arguments, nothing is baked into the program, and both caches are updated in place.
        assert result["arguments"] >= result["weights"] + result["cache"]
        assert result["aliased"] >= result["cache"]
        assert result["arguments"] + result["temporaries"] < MEMORY[generation]
        # Every attention is the kernel: of each layer in the verification, and of the head in its extend and draft steps.
        assert result["kernels"] >= layers + 2
        assert result["temporaries"] < COPIED[generation] * result["weights"]
    return results


@pytest.mark.parametrize("generation", KINDS)
def test_rounds_of_a_dynamic_tree(generation: str) -> None:
    compile_for(generation, "1B", 4, 2, "tree", timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("generation", KINDS)
def test_rounds_of_a_chain(generation: str) -> None:
    compile_for(generation, "1B", 4, 2, "chain", timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v5p", "v6e", "tpu7x"])
def test_full_depth_of_an_8b_model(generation: str) -> None:
    compile_for(generation, "8B", 32, 8, "tree", timeout=3600)


@pytest.mark.slow
def test_full_depth_of_a_1b_model_on_the_smallest_device() -> None:
    compile_for("v5e", "1B", 16, 8, "chain", "tree", timeout=3600)
