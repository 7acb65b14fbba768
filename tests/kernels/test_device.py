"""The backends of the device that is there, in sizes of real models: `pytest tests/kernels -k gpu` on a machine with a GPU."""

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


@pytest.mark.parametrize("case", [*large_cases(), *extreme_cases()], ids=str)
def test_gpu_against_float64(case: Case) -> None:
    """Whatever is chosen; on a Hopper GPU the kernel, wherever it does not refuse."""
    device = gpu()
    for seed, (kind, poison) in enumerate(KINDS):
        arrays = make_arrays(case, lengths_of(case, kind, edge=64), seed=seed, poison=poison)
        choice = chosen_backend(device, **arrays, **case.options)
        print(choice)
        assert_true(case, arrays, run(case, arrays, device))
    if device.compute_capability == "9.0" and case.dtype == "bfloat16" and case.head_dim % 64 == 0:
        assert choice.name == "mosaic_gpu", choice.refusals


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
