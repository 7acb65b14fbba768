"""What "auto" and attention are on the devices that people have, described as JAX describes them."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.loading.dtypes import automatic_dtype, parse_dtype
from pallas_kernels.backends import Device
from pallas_kernels.tree_attention.backends import choose

# Platform, kind and compute capability as JAX reports them; dtype; attention in that dtype, in float32.
DEVICES = [
    ("cpu", "cpu", None, "float32", "xla_blocked", "xla_blocked"),
    ("cuda", "Tesla P100-PCIE-16GB", "6.0", "float16", "xla_blocked", "xla_blocked"),
    ("cuda", "Tesla V100-SXM2-16GB", "7.0", "float16", "xla_blocked", "xla_blocked"),
    ("cuda", "Tesla T4", "7.5", "float16", "xla_blocked", "xla_blocked"),
    ("cuda", "NVIDIA A100-SXM4-40GB", "8.0", "bfloat16", "xla_blocked", "xla_blocked"),
    ("cuda", "NVIDIA L4", "8.9", "bfloat16", "xla_blocked", "xla_blocked"),
    ("cuda", "NVIDIA H100 80GB HBM3", "9.0", "bfloat16", "mosaic_gpu", "xla_blocked"),
    ("cuda", "NVIDIA H200", "9.0", "bfloat16", "mosaic_gpu", "xla_blocked"),
    ("cuda", "NVIDIA B200", "10.0", "bfloat16", "xla_blocked", "xla_blocked"),
    ("cuda", "NVIDIA GeForce RTX 5090", "12.0", "bfloat16", "xla_blocked", "xla_blocked"),
    ("rocm", "AMD Instinct MI300X", "gfx942", "bfloat16", "xla_blocked", "xla_blocked"),
    ("tpu", "TPU v5 lite", None, "bfloat16", "mosaic_tpu", "mosaic_tpu"),
    ("tpu", "TPU v5p", None, "bfloat16", "mosaic_tpu", "mosaic_tpu"),
    ("tpu", "TPU v6 lite", None, "bfloat16", "mosaic_tpu", "mosaic_tpu"),
    ("tpu", "TPU7x", None, "bfloat16", "mosaic_tpu", "mosaic_tpu"),
]
each_device = pytest.mark.parametrize("row", DEVICES, ids=lambda row: row[1])


def mocked(platform: str, kind: str, capability: str | None) -> types.SimpleNamespace:
    device = types.SimpleNamespace(platform="gpu" if platform in ("cuda", "rocm") else platform, device_kind=kind)
    if capability is not None:
        device.compute_capability = capability
    return device


@each_device
def test_auto_is_what_the_device_is_good_at(row, monkeypatch):
    device = mocked(*row[:3])
    assert automatic_dtype(device) == row[3]
    monkeypatch.setattr("jax.devices", lambda *platform: [device])
    assert parse_dtype("auto").name == row[3]


def test_auto_goes_by_the_device_that_arrays_go_to(monkeypatch):
    """A machine with a TPU, told to compute on its CPU."""
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(
        "jax.devices", lambda platform=None: [cpu if platform == "cpu" else mocked("tpu", "TPU v5p", None)]
    )
    assert parse_dtype("auto").name == "bfloat16"
    for chosen in (cpu, "cpu"):
        with jax.default_device(chosen):
            assert parse_dtype("auto").name == "float32"


@each_device
def test_attention_is_a_kernel_where_there_is_one_for_the_dtype(row):
    platform, kind, capability, dtype, automatic, in_float32 = row
    # A tree of 60 nodes of Llama 3.1 8B.
    shape = functools.partial(jax.ShapeDtypeStruct)

    def backend(dtype) -> str:
        arrays = [
            shape((1, 60, 32, 128), dtype),
            *[shape((1, 8, 1024, 128), dtype)] * 2,
            shape((1,), jnp.int32),
            *[shape((1, 8, 60, 128), dtype)] * 2,
            shape((1, 60, 60), jnp.bool_),
            None,
        ]
        return choose(Device(platform, kind, capability), arrays, {"scale": 128**-0.5, "soft_cap": None}).name

    assert backend(dtype) == automatic
    assert backend("float32") == in_float32
    if platform == "tpu":
        assert backend("float16") == "xla_blocked"
