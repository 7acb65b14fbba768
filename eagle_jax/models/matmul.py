"""Products of a few activation rows with a large weight, the bulk of decoding, per platform."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

SKINNY_ROWS = 8
"""Most rows for which the CPU formulation below is used."""

TENSOR_CORE_ROWS = 8
"""Rows that a tensor core product of NVIDIA GPUs has at least."""

REDUCED_SIZE = 10_000_000
"""Up to so many values of a weight XLA:GPU makes a reduction of a product of one row, which is faster than a tensor core product:
`xla/service/gpu`, strength reduction of dots."""

CPU_COMPILER_OPTIONS: dict[str, str | bool] = {
    "xla_cpu_enable_fast_math": True,
    "xla_cpu_fast_math_honor_nans": True,
    "xla_cpu_fast_math_honor_infs": True,
    "xla_cpu_fast_math_honor_division": True,
    "xla_cpu_fast_math_honor_functions": True,
}
"""Options for programs compiled for the CPU: sums may be reassociated, so that LLVM vectorises the reductions of
`_skinny_matmul`; NaN, infinities, division and functions keep their meaning."""


@runtime_checkable
class PackedWeight(Protocol):
    """A weight `[out, in]` in another form than an array: a pytree of its own that knows how to multiply."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`[out, in]`, of one shard."""

    def matmul(self, x: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
        """`x [..., in]` times the transpose of the weight: `[..., out]`."""

    def axes(self, axes: tuple[str, ...]) -> Any:
        """Logical axes of each of its arrays, where `axes` are those of the weight: a pytree like it, with tuples for arrays."""


def multiply(x: jax.Array, weight: jax.Array | PackedWeight, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """`x [..., in]` times the transpose of a weight `[out, in]`, packed or not; `out_dtype` defaults to x's."""
    if isinstance(weight, PackedWeight):
        return weight.matmul(x, out_dtype or x.dtype)
    return matmul(x, weight, out_dtype)


def matmul(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """`x [..., in]` times the transpose of `weight [out, in]`, accumulated in float32; `out_dtype` defaults to x's."""
    rows = x.size // x.shape[-1]
    if rows <= min(SKINNY_ROWS, weight.shape[0]) and x.dtype == weight.dtype == jnp.float32:
        flat = x.reshape(rows, x.shape[-1])
        y = jax.lax.platform_dependent(flat, weight, cpu=_skinny_matmul, default=_matmul)
        y = y.reshape(*x.shape[:-1], weight.shape[0])
    elif rows == 1 and x.dtype == weight.dtype and x.dtype.itemsize == 2 and weight.size > REDUCED_SIZE:
        flat = x.reshape(1, x.shape[-1])
        y = jax.lax.platform_dependent(flat, weight, cuda=_single_row_matmul, default=_matmul)
        y = y.reshape(*x.shape[:-1], weight.shape[0])
    else:
        y = _matmul(x, weight)
    return y.astype(out_dtype or x.dtype)


@jax.custom_vjp
def _matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _matmul_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul(x, weight), (x, weight)


def _matmul_backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Products in the inputs' dtype: left to itself, the float32 gradient would make both of them float32."""
    x, weight = saved
    gradient = gradient.astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    to_x = jax.lax.dot_general(gradient, weight, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    to_weight = jax.lax.dot_general(gradient, x, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
    return to_x.astype(x.dtype), to_weight.astype(weight.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _single_row_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x [1, in]` times the transpose of a large `weight [out, in]` on an NVIDIA GPU, as a tensor core product of 8 rows.

    For a single row XLA:GPU makes a product in float32 without tensor cores, which reads the weight more slowly: on an H200, the
    products of a layer of Llama 3.1 8B took 16.5, 11.8, 58.4 and 31.3 us, and 14.3, 10.2, 57.0 and 30.6 with seven rows of zeros.
    """
    padded = jnp.pad(x, ((0, TENSOR_CORE_ROWS - 1), (0, 0)))
    return _matmul(padded, weight)[:1]


def _skinny_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x [T, in]` times the transpose of `weight [out, in]` for T <= 8 on XLA:CPU, reading the weight once.

    XLA:CPU's dot repacks the weight for T >= 2, which doubles the memory traffic that bounds decoding. One variadic reduction
    with T accumulators keeps a weight vector in a register for all T rows instead: SmolLM2-135M at T = 4 took 32 ms a step in
    place of 65 on two AVX2 cores.
    """
    rows, outputs = x.shape[0], weight.shape[0]
    # Without this, XLA fuses the producers of x into the reduction and recomputes them for every output. It does not duplicate a
    # division, and cannot turn one into a product unless it is by a scalar.
    x = x / jnp.where(jnp.isinf(weight[:rows]), 2.0, 1.0)
    # Two streams of weight rows give the few accumulators of a small T enough independent chains.
    streams = 2 if outputs % 2 == 0 and rows <= 6 else 1
    size = outputs // streams
    products = tuple(
        x[row][None] * weight[stream * size : (stream + 1) * size] for row in range(rows) for stream in range(streams)
    )
    sums = jax.lax.reduce(
        products,
        (np.float32(0),) * len(products),
        lambda a, b: tuple(p + q for p, q in zip(a, b, strict=True)),
        (1,),
    )
    return jnp.stack([jnp.concatenate(sums[row * streams : (row + 1) * streams]) for row in range(rows)])
