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
    generations: str, shape: str, layers: int, slots: int, *trees: str, timeout: int, max_length: int = 2000
) -> dict[tuple[str, str], dict[str, Any]]:
    """Figures of compiled rounds by generation and tree; all generations in one process, which traces once."""
    numbers = map(str, (layers, slots, max_length))
    done = subprocess.run(
        [sys.executable, "-m", "support.compile_for_tpu", generations, shape, *numbers, *trees],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    results = {(line["generation"], line["tree"]): line for line in lines}
    assert set(results) == {(generation, tree) for generation in generations.split(",") for tree in trees}
    return results


def check(result: dict[str, Any]) -> None:
    print(result)
    generation = result["generation"]
    assert result["kind"].startswith(KINDS[generation])
    # Weights and state come in as arguments, nothing is baked into the program, and both caches are updated in place.
    assert result["arguments"] >= result["weights"] + result["cache"]
    assert result["aliased"] >= result["cache"]
    assert result["arguments"] + result["temporaries"] < MEMORY[generation]
    assert result["temporaries"] < COPIED[generation] * result["weights"]
    # Every attention is the kernel: in the verification, and in the head's extend and draft steps.
    assert result["kernels"] >= 3
    assert result["fallbacks"] == 0


@pytest.fixture(scope="module")
def rounds_of_a_tree() -> dict[tuple[str, str], dict[str, Any]]:
    return compile_for(",".join(KINDS), "1B", 4, 2, "tree", timeout=1800)


@pytest.mark.parametrize("generation", KINDS)
def test_rounds_of_a_dynamic_tree(rounds_of_a_tree: dict[tuple[str, str], dict[str, Any]], generation: str) -> None:
    check(rounds_of_a_tree[generation, "tree"])


@pytest.mark.slow
def test_rounds_of_a_chain() -> None:
    for result in compile_for(",".join(KINDS), "1B", 4, 2, "chain", timeout=1800).values():
        check(result)


@pytest.mark.slow
def test_rounds_of_adaptive_speculation() -> None:
    """Several shapes of rounds in one program: the caches are still updated in place."""
    for result in compile_for(",".join(KINDS), "1B", 4, 2, "adaptive", timeout=1800).values():
        check(result)


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v5e", "tpu7x"])
def test_temporaries_do_not_grow_with_the_context(generation: str) -> None:
    """Neither masks nor scores nor copies: 60 nodes by 30,000 rows more would be megabytes of any of them."""
    short, long = (
        compile_for(generation, "1B", 4, 2, "tree", timeout=1800, max_length=length)[generation, "tree"]
        for length in (2000, 32000)
    )
    assert long["cache"] > 12 * short["cache"]
    assert long["temporaries"] < short["temporaries"] + 1e6


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v5p", "v6e", "tpu7x"])
def test_full_depth_of_an_8b_model(generation: str) -> None:
    check(compile_for(generation, "8B", 32, 8, "tree", timeout=3600)[generation, "tree"])


@pytest.mark.slow
def test_full_depth_of_a_1b_model_on_the_smallest_device() -> None:
    for result in compile_for("v5e", "1B", 16, 8, "chain", "tree", timeout=3600).values():
        check(result)
