"""Rounds compile for an NVIDIA H200 without one: JAX's CUDA plugin needs no driver. A dispatch is a single CUDA graph."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

TESTS = Path(__file__).parents[1]
TREES = ("plain", "chain", "tree", "adaptive")
LOOPS = {"plain": 1, "chain": 2, "tree": 2}
"""Of a dispatch: rounds, and the steps of a draft."""
LAUNCHES = 26
"""The most of two layers of a plain step: 25 with jax 0.10.2, and four more if keys and values are kernels of their own."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the CUDA plugin of this JAX, and with the assembler that it calls."""
    folder = tmp_path_factory.mktemp("cuda")
    wheels = [f"jax-cuda12-{part}=={jax.__version__}" for part in ("plugin", "pjrt")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", folder, *wheels, "nvidia-cuda-nvcc-cu12"], check=True, timeout=900)
    return folder


def compiled(plugin: Path, folder: Path, layers: int, *trees: str) -> dict[str, dict[str, Any]]:
    """What `support.compile_for_gpu` says of each tree."""
    done = subprocess.run(
        [sys.executable, "-m", "support.compile_for_gpu", str(folder), str(layers), *trees],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (plugin, TESTS.parent, TESTS)))},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = {line["tree"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert set(results) == set(trees)
    return results


def test_keys_and_values_are_no_kernels_of_their_own(plugin: Path, tmp_path: Path) -> None:
    """A layer's new rows are written from the array that attention is given, which XLA must find to be the same."""
    few, many = (compiled(plugin, tmp_path, layers, "plain")["plain"]["launches"] for layers in (4, 6))
    assert 16 < many - few <= LAUNCHES


def test_a_dispatch_is_one_graph(plugin: Path, tmp_path: Path) -> None:
    """Whatever stands outside of it would be launched by the host, round by round."""
    results = compiled(plugin, tmp_path, 4, *TREES)
    for tree, result in results.items():
        print(result)
        assert result["outermost"] == ["kCommandBuffer"], result
        assert result["loops"] >= LOOPS.get(tree, 4)
        assert result["fallbacks"] == 0
        assert result["kernels"] >= 2  # attention, and the write of rows
