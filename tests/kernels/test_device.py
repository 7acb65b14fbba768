"""The backends of the device that is there, in sizes of real models: `pytest tests/kernels -k gpu` on a machine with a GPU."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from matrix import Case, assert_true, extreme_cases, large_cases, lengths_of, make_arrays, small_cases

from pallas_kernels.tree_attention import chosen_backend, tree_attention

KINDS = (("edges", np.nan), ("none", 1e30), ("any", -np.inf))


@functools.cache
def gpu() -> jax.Device:
    """The first GPU, or the test is skipped."""
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("there is no GPU")


def run(case: Case, arrays: dict[str, Any], device: jax.Device, implementation: Any = None) -> jax.Array:
    """The compiled operation on a device."""
    call = jax.jit(lambda x: tree_attention(**x, **case.options, implementation=implementation))
    return call(jax.device_put(arrays, device))


LARGE = [*large_cases(), *extreme_cases()]


@pytest.mark.parametrize("index", range(len(LARGE)), ids=[str(case) for case in LARGE])
def test_gpu_against_float64(index: int) -> None:
    """Whatever is chosen; on a Hopper GPU the kernel, wherever it need not refuse."""
    case, device = LARGE[index], gpu()
    kind, poison = KINDS[index % 3]
    arrays = make_arrays(case, lengths_of(case, kind, edge=64), seed=index, poison=poison)
    choice = chosen_backend(device, **arrays, **case.options)
    print(choice)
    assert_true(case, arrays, run(case, arrays, device))
    if device.compute_capability == "9.0":
        assert choice.name == ("mosaic_gpu" if case.dtype == "bfloat16" else "xla_blocked"), choice.refusals


@pytest.mark.parametrize("queries", [1, 15, 16, 17, 31, 32, 33])
def test_gpu_lengths_around_the_edges_of_blocks(queries: int) -> None:
    device = gpu()
    lengths = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 512]
    case = Case(
        dtype="bfloat16", batch=16, queries=queries, heads=(32, 8), head_dim=128, capacity=512, tail="tree",
        windowed=False, soft_cap=None,
    )  # fmt: skip
    for windowed, poison in ((False, np.nan), (True, 1e30)):
        case = dataclasses.replace(case, windowed=windowed)
        arrays = make_arrays(case, lengths, poison=poison)
        assert_true(case, arrays, run(case, arrays, device))


@pytest.mark.parametrize("queries", [6, 60, 256])
def test_gpu_runs_agree_bit_for_bit(queries: int) -> None:
    """What threads of a kernel do to each other's memory shows in few runs, and may be too little to fail a comparison."""
    device = gpu()
    case = Case(
        dtype="bfloat16", batch=1, queries=queries, heads=(32, 8), head_dim=128, capacity=1536, tail="tree",
        windowed=False, soft_cap=None,
    )  # fmt: skip
    arrays = jax.device_put(make_arrays(case, [768], poison=np.nan), device)
    call = jax.jit(lambda x: tree_attention(**x, **case.options))
    first = call(arrays)
    differ = jax.jit(lambda a, b: (a != b).any())
    assert not any(bool(differ(first, call(arrays))) for _ in range(1000))


@pytest.mark.parametrize("implementation", ["xla", "xla_blocked"])
@pytest.mark.parametrize("case", large_cases()[:12], ids=str)
def test_gpu_without_a_kernel(case: Case, implementation: str) -> None:
    device = gpu()
    arrays = make_arrays(case, lengths_of(case, "edges"), poison=np.nan)
    assert_true(case, arrays, run(case, arrays, device, implementation))


@pytest.mark.parametrize("index", [0, 8, 16])
@pytest.mark.parametrize("implementation", ["xla", "xla_blocked"])
def test_cpu_against_float64(index: int, implementation: str) -> None:
    case = small_cases()[index]
    kind, poison = KINDS[index % 3]
    arrays = make_arrays(case, lengths_of(case, kind), poison=poison)
    assert_true(case, arrays, run(case, arrays, jax.devices("cpu")[0], implementation))
