"""The Hopper kernel without a GPU: it lowers to its intermediate language, refuses what it cannot do, and cuts calls well.

Its results are compared in the shared matrix, which runs it where there is such a GPU. JAX's GPU interpreter has no warpgroup
products so far, so there is nothing in between.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention.mosaic_gpu import (
    _join,
    check_supported,
    mosaic_gpu_tree_attention,
    shared_shapes,
)
from pallas_kernels.tree_attention.mosaic_gpu_tiles import choose_tiles, device_figures


def lower(batch: int, tokens: int, heads: tuple[int, int, int], capacity: int, tail: int, **options: bool) -> str:
    query_heads, kv_heads, head_dim = heads

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    cache, rows = array(batch, kv_heads, capacity, head_dim), array(batch, kv_heads, tail, head_dim)
    mask = jax.ShapeDtypeStruct((batch, tokens, tail), jnp.bool_) if options.get("tree") else None
    starts = integers(batch, tokens) if options.get("window") else None

    def call(*arrays: jax.Array) -> jax.Array:
        *first, starts = arrays
        soft_cap = 30.0 if options.get("soft_cap") else None
        return mosaic_gpu_tree_attention(*first, scale=head_dim**-0.5, prefix_start=starts, soft_cap=soft_cap)

    arguments = (array(batch, tokens, query_heads, head_dim), cache, cache, integers(batch), rows, rows, mask, starts)
    return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_one_token_lowers() -> None:
    assert "mosaic_gpu" in lower(2, 1, (8, 2, 64), 512, 1)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(
    ("tokens", "tail", "options"),
    [
        (1, 1, {}),
        (10, 70, {"tree": True}),
        (64, 64, {"tree": True}),
        (256, 256, {}),
        (7, 7, {"window": True, "soft_cap": True}),
    ],
)
def test_calls_lower(head_dim: int, tokens: int, tail: int, options: dict[str, bool]) -> None:
    assert "mosaic_gpu" in lower(2, tokens, (8, 2, head_dim), 1024, tail, **options)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capacity", "message"),
    [
        (jnp.float32, 128, 1024, "bfloat16 and float16, not float32: its float32 products would be TF32"),
        (jnp.bfloat16, 72, 1024, "multiples of 16 up to 256, not 72"),
        (jnp.bfloat16, 272, 1024, "multiples of 16 up to 256, not 272"),
        (jnp.bfloat16, 128, 1000, "whole blocks of 64 rows, and it has 1000"),
    ],
)
def test_what_it_cannot_do_is_said(dtype: jnp.dtype, head_dim: int, capacity: int, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        check_supported(dtype, dtype, dtype, head_dim, capacity)


def test_one_dtype_is_needed() -> None:
    with pytest.raises(NotImplementedError, match=r"one dtype for queries \(bfloat16\), cache \(float32\)"):
        check_supported(jnp.dtype("bfloat16"), jnp.dtype("float32"), jnp.dtype("bfloat16"), 128, 1024)


def test_the_prefix_is_split_where_heads_do_not_fill_the_device() -> None:
    alone = choose_tiles(1, 8, 32, 128, 32768)
    assert 100 <= 8 * alone.splits <= device_figures()["multiprocessors"]
    assert choose_tiles(32, 8, 32, 128, 2048).splits == 1
    assert choose_tiles(1, 8, 32, 128, 256).splits <= 2


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("rows", [1, 64, 65, 2048])
@pytest.mark.parametrize("capacity", [64, 256, 131072])
def test_tiles_fit_into_shared_memory(head_dim: int, rows: int, capacity: int) -> None:
    for batch in (1, 64):
        tiles = choose_tiles(batch, 8, rows, head_dim, capacity)
        ring = tiles.stages * 2 * tiles.block * head_dim * 2
        output = tiles.rows * head_dim * (2 if tiles.splits == 1 else 4)
        assert tiles.stages >= 2  # otherwise copies and products could not overlap
        assert ring + output <= device_figures()["shared_memory_bytes"] - 2048
        assert tiles.splits <= max(1, capacity // tiles.block)


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("groups", [1, 2])
def test_no_output_lies_on_the_queries_of_another_consumer(groups: int, out_dtype: jnp.dtype) -> None:
    """Queries and outputs share memory, and a consumer may write its output while another still reads its queries."""
    queries, outputs = shared_shapes(groups, 128, jnp.bfloat16, out_dtype)
    of_queries = [2 * np.prod(queries[1:]) * g for g in range(groups)]
    of_outputs = [np.dtype(out_dtype).itemsize * np.prod(outputs[1:]) * g for g in range(groups + 1)]
    for g, first in enumerate(of_queries):
        assert of_outputs[g] <= first
        assert first + 2 * 64 * 128 <= of_outputs[g + 1]
    assert queries[-2:] == outputs[-2:] == (64, 128)


@pytest.mark.parametrize("splits", [2, 5, 40])
def test_shares_are_joined_by_log_sum_exp(splits: int) -> None:
    rng = np.random.default_rng(splits)
    outs = rng.standard_normal((2, 3, splits, 4, 16)).astype(np.float32)
    sums = (20 * rng.standard_normal((2, 3, splits, 4))).astype(np.float32)
    sums[:, :, 0] = -1e30  # a share without a visible row
    weights = np.exp2(sums.astype(np.float64) - sums.max(2, keepdims=True))
    wanted = (weights[..., None] * outs).sum(2) / weights.sum(2)[..., None]
    np.testing.assert_allclose(jax.jit(_join)(outs, sums), wanted, rtol=2e-5, atol=1e-6)
