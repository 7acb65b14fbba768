"""The TPU kernel compiles for real TPU generations, within the VMEM that its tiles are said to take."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
GENERATIONS = ("v5e", "v5p", "v6e", "tpu7x")
VMEM = 16 * 2**20

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (pip install 'eagle-jax[tpu]')"
)


def compile_kernels(*lists: str, timeout: int = 900) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "support.compile_kernels_for_tpu", *lists],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


Results = dict[tuple[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def compiled() -> Results:
    """Everything that the default run compiles, in one process, by list and generation."""
    lists = "usual v5e two v5p two v6e two tpu7x tight v5e tight v5p shards tpu7x too_little_vmem v5e"
    found: Results = {}
    for result in compile_kernels(*lists.split()):
        found.setdefault((result["list"], result["generation"]), []).append(result)
    return found


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        print(result)
        assert result["backend"] == "mosaic_tpu"
        assert result["kernels"] == 1
        # The compiler is given this number as its limit.
        assert result["tiles"]["vmem_bytes"] <= VMEM
        # The cache is read as it lies: no head_dim makes XLA copy it into another layout first. A copy of the keys alone is half
        # of it (0.48 was seen for a forced one); the lists of blocks, which grow with the capacity too, are next to nothing.
        assert result["temporaries_due_to_cache"] < 0.25 * result["cache"]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_kernels_of_usual_models(compiled: Results, generation: str) -> None:
    results = compiled["usual" if generation == "v5e" else "two", generation]
    assert len(results) == (4 if generation == "v5e" else 2)
    check(results)


@pytest.mark.parametrize("generation", ["v5e", "v5p"])
def test_tiles_that_nearly_fill_their_vmem(compiled: Results, generation: str) -> None:
    results = compiled["tight", generation]
    assert len(results) == 2
    check(results)


def test_shards_of_slots_and_heads_need_no_collective(compiled: Results) -> None:
    (result,) = compiled["shards", "tpu7x"]
    assert (result["kernels"], result["collectives"]) == (1, 0)


def test_the_limit_on_vmem_is_enforced(compiled: Results) -> None:
    """So the compilations above prove that the kernels keep within theirs."""
    (result,) = compiled["too_little_vmem", "v5e"]
    message = result["error"]
    assert message is not None, "an eighth of the VMEM was enough"
    used = re.search(r"size (\d+\.\d+)M and limit (\d+\.\d+)M", message)
    assert used, message
    print(f"{result['case']} takes {used[1]} MiB")
    assert float(used[1]) <= 8 * float(used[2])


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_dtype_head_dim_and_number_of_queries_and_slots(generation: str) -> None:
    results = compile_kernels("long", generation, timeout=7200)
    assert len(results) == 1 + 2 * 6 * 5 * 3
    check(results)
