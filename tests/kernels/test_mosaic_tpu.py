"""The TPU kernel in Pallas' interpreter of TPUs: memory that is not written holds NaN, and races are looked for."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from matrix import Case, assert_true, lengths_of, make_arrays, small_cases

from pallas_kernels.tree_attention.mosaic_tpu_tiles import Tiles

CASES = small_cases()


def tiles_of(case: Case, *, heads: int | None = None, queries: int = 16, block: int = 128) -> Tiles:
    """The shortest blocks, and few enough queries that there are steps of several."""
    heads_all, kv_heads = case.heads
    queries = min(case.queries, queries)
    rows = -(-queries * (heads_all // kv_heads) // 16) * 16
    return Tiles(heads=heads or kv_heads, rows=rows, queries=queries, block=block, vmem_bytes=16 * 2**20)


def check(case: Case, tiles: Tiles, *data: tuple[str | list[int], float], cores: int = 1) -> None:
    """Compares with the truth for several lengths, or kinds of them, each with what the memory behind them holds."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental.pallas import tpu as pltpu

    from pallas_kernels.tree_attention.mosaic_tpu import mosaic_tpu_tree_attention

    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores)

    @jax.jit
    def run(arrays: dict[str, Any]) -> jax.Array:
        return mosaic_tpu_tree_attention(**arrays, **case.options, tiles=tiles, interpret=params)

    for seed, (lengths, poison) in enumerate(data):
        lengths = lengths_of(case, lengths) if isinstance(lengths, str) else lengths
        arrays = make_arrays(case, lengths, seed=seed, poison=poison)
        try:
            assert_true(case, arrays, run(arrays))
            assert interpret_pallas_call.races is not None
            assert not interpret_pallas_call.races.races_found
        finally:
            pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_every_pair_of_settings(index: int) -> None:
    kinds = [("edges", np.nan), ("none", 1e30), ("any", -np.inf)]
    check(CASES[index], tiles_of(CASES[index]), kinds[index % 3])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_cores_share_the_heads(case: Case) -> None:
    check(case, tiles_of(case, heads=1), ("edges", np.nan), ("none", 1e30), cores=2)


SMALL = Case(
    dtype="float32", batch=2, queries=3, heads=(2, 1), head_dim=128, capacity=512, tail="tree", windowed=False, soft_cap=None
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("queries", [5, 7, 8, 9, 15, 16, 17, 23, 24, 25])
def test_queries_around_the_edges_of_tiles(queries: int) -> None:
    case = dataclasses.replace(SMALL, queries=queries)
    check(case, tiles_of(case, queries=8), ("edges", np.nan), ("edges", 1e30))


@pytest.mark.slow
@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize("windowed", [False, True])
def test_lengths_around_the_edges_of_blocks(block: int, windowed: bool) -> None:
    case = dataclasses.replace(SMALL, batch=12, windowed=windowed)
    check(case, tiles_of(case, block=block), ([0, 1, 127, 128, 129, 255, 256, 257, 383, 384, 511, 512], np.nan))
