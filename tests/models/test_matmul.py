"""Products of a few rows, on the CPU and as they are lowered for GPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.models.matmul import CPU_COMPILER_OPTIONS, REDUCED_SIZE, SKINNY_ROWS, _single_row_matmul, matmul


def layer(x: jax.Array, scale: jax.Array, gate: jax.Array, weight: jax.Array) -> jax.Array:
    """A product of what cheap operations give, as those of a norm and of a gate."""
    norm = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)
    return matmul(x * norm * scale * gate, weight)


def arrays(rows: int, inputs: int = 96, outputs: int = 64) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(rows)
    shapes = ((rows, inputs), (inputs,), (rows, inputs), (outputs, inputs))
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


@pytest.mark.parametrize("rows", [1, 2, 3, SKINNY_ROWS, SKINNY_ROWS + 1])
@pytest.mark.parametrize("outputs", [1, 5, 64])
def test_is_the_product(rows, outputs):
    x, scale, gate, weight = arrays(rows, outputs=outputs)
    wide = np.asarray(x, np.float64)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(scale) * np.asarray(gate)
    np.testing.assert_allclose(layer(x, scale, gate, weight), wide @ np.asarray(weight, np.float64).T, atol=2e-4)


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_what_comes_before_a_product_is_computed_once(rows):
    """Not once for every output: XLA fuses what it takes for cheap into the reduction, where it would be done `outputs` times.

    In a loop, as in decoding: there the compiler knows of the weight that it does not change.
    """
    x, scale, gate, weight = arrays(rows)

    def loop(x, scale, gate, weight, count):
        def body(_, x):
            y = layer(x, scale, gate, weight)
            return jnp.concatenate([y, y], axis=-1)[:, : x.shape[1]]

        return jax.lax.fori_loop(0, count, body, x)

    compiled = jax.jit(loop).lower(x, scale, gate, weight, 3).compile(CPU_COMPILER_OPTIONS)
    computations = re.split(r"\n\n", compiled.as_text())
    (fused,) = [text for text in computations if "f32[64,96]{1,0} parameter" in text and " reduce(" in text]
    streams = 2
    assert len(re.findall(r" multiply\(", fused)) == rows * streams


def rows_of_products(x: jax.ShapeDtypeStruct, weight: jax.ShapeDtypeStruct, platform: str) -> list[int]:
    """Rows of the products of one call, as lowered for a platform."""
    text = jax.jit(matmul).trace(x, weight).lower(lowering_platforms=(platform,)).as_text()
    return [int(rows) for rows in re.findall(rf"dot_general .*?: \(tensor<(\d+)x{x.shape[-1]}x", text)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_single_row_fills_a_tensor_core_product(dtype):
    outputs = REDUCED_SIZE // 4096 + 1

    def given(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    assert rows_of_products(given(1, 4096), given(outputs, 4096), "cuda") == [8]
    assert rows_of_products(given(1, 4096), given(outputs, 4096), "tpu") == [1]
    assert rows_of_products(given(2, 4096), given(outputs, 4096), "cuda") == [2]
    assert rows_of_products(given(1, 4096), given(outputs - 1, 4096), "cuda") == [1]


def test_rows_that_fill_a_product_change_nothing():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((1, 64), (48, 64)))
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    got = _single_row_matmul(x, weight)
    assert got.shape == (1, 48)
    np.testing.assert_allclose(got, want, atol=1e-4)
