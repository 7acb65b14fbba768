"""Tree attention against float64 numpy, and every way in which a call can be wrong."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import tree_attention

Arrays = dict[str, Any]

Run = Callable[..., jax.Array]


@pytest.fixture(params=["xla", "xla_blocked"])
def run(request: pytest.FixtureRequest) -> Run:
    """The operation with each backend of this platform, compiled."""
    forced = functools.partial(tree_attention, implementation=request.param)
    return jax.jit(forced, static_argnames=("scale", "soft_cap"))


def make(
    *, lengths: tuple[int, ...], queries: int, tail: int, heads: int = 4, kv_heads: int = 2, dim: int = 16,
    capacity: int = 32, seed: int = 0,
) -> Arrays:  # fmt: skip
    rng = np.random.default_rng(seed)
    batch = len(lengths)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "queries": normal(batch, queries, heads, dim),
        "cache_keys": normal(batch, kv_heads, capacity, dim),
        "cache_values": normal(batch, kv_heads, capacity, dim),
        "lengths": np.array(lengths, np.int32),
        "tail_keys": normal(batch, kv_heads, tail, dim),
        "tail_values": normal(batch, kv_heads, tail, dim),
    }


def random_tree_mask(batch: int, nodes: int, seed: int = 0) -> np.ndarray:
    """Ancestor masks of random trees."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((batch, nodes, nodes), bool)
    for b in range(batch):
        for node in range(nodes):
            if node:
                mask[b, node] = mask[b, rng.integers(node)]
            mask[b, node, node] = True
    return mask


def expected(
    arrays: Arrays, tail_mask: np.ndarray | None = None, *, scale: float, prefix_start: np.ndarray | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:  # fmt: skip
    """One query at a time, over exactly the rows it sees."""
    wide = {k: v.astype(np.float64) for k, v in arrays.items() if k != "lengths"}
    out = np.empty(wide["queries"].shape)
    batch, queries, heads, _ = out.shape
    group = heads // wide["cache_keys"].shape[1]
    for b, t, h in np.ndindex(batch, queries, heads):
        prefix = slice(0 if prefix_start is None else prefix_start[b, t], arrays["lengths"][b])
        tail = np.arange(t + 1) if tail_mask is None else np.flatnonzero(tail_mask[b, t])

        def rows(name: str, b: int = b, h: int = h, prefix: slice = prefix, tail: np.ndarray = tail) -> np.ndarray:
            committed = wide["cache_" + name][b, h // group, prefix]
            return np.concatenate([committed, wide["tail_" + name][b, h // group, tail]])

        scores = scale * rows("keys") @ wide["queries"][b, t, h]
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ rows("values") / weights.sum()
    return out


def check(run: Run, arrays: Arrays, tail_mask: np.ndarray | None = None, **options: Any) -> None:
    options.setdefault("scale", 0.25)
    out = run(**arrays, tail_mask=tail_mask, **options)
    assert out.dtype == arrays["queries"].dtype
    np.testing.assert_allclose(out, expected(arrays, tail_mask, **options), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("queries", [1, 7])
def test_causal_tail(run: Run, queries: int) -> None:
    check(run, make(lengths=(0, 1, 17, 31, 32), queries=queries, tail=queries))


@pytest.mark.parametrize("nodes", [1, 9, 26])
def test_tree_tail(run: Run, nodes: int) -> None:
    check(run, make(lengths=(0, 13, 32), queries=nodes, tail=nodes), random_tree_mask(3, nodes))


@pytest.mark.parametrize(("queries", "tail"), [(3, 11), (11, 3), (1, 30)])
def test_tail_of_another_length_than_the_queries(run: Run, queries: int, tail: int) -> None:
    mask = np.random.default_rng(1).random((2, queries, tail)) < 0.5
    mask[:, :, 1] = True
    check(run, make(lengths=(9, 0), queries=queries, tail=tail), mask)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 10), (4, 1, 64), (9, 3, 8), (1, 1, 8)])
def test_head_layouts(run: Run, heads: int, kv_heads: int, dim: int) -> None:
    arrays = make(lengths=(6, 21), queries=5, tail=5, heads=heads, kv_heads=kv_heads, dim=dim)
    check(run, arrays, random_tree_mask(2, 5), scale=dim**-0.5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30, -1e30])
@pytest.mark.parametrize("start", [False, True])
def test_rows_beyond_the_length_do_not_matter(run: Run, poison: float, start: bool) -> None:
    arrays = make(lengths=(0, 5, 31), queries=4, tail=4)
    options: Arrays = {"scale": 0.25}
    if start:
        options["prefix_start"] = np.array([[0] * 4, [0, 1, 2, 5], [30, 3, 0, 17]], np.int32)
    clean = run(**arrays, **options)
    for b, length in enumerate(arrays["lengths"]):
        arrays["cache_keys"][b, :, length:] = poison
        arrays["cache_values"][b, :, length:] = poison
    np.testing.assert_array_equal(run(**arrays, **options), clean)


@pytest.mark.parametrize("poison", [1e30, -1e30])
def test_tail_rows_that_nobody_sees_do_not_matter(run: Run, poison: float) -> None:
    """The expansion of a tree runs over buffers whose later rows are not written yet."""
    arrays = make(lengths=(3, 0), queries=2, tail=8)
    mask = np.zeros((2, 2, 8), bool)
    mask[:, 0, :1] = mask[:, 1, :3] = True
    arrays["tail_values"][:, :, 3:] = 0
    clean = run(**arrays, tail_mask=mask, scale=0.25)
    arrays["tail_keys"][:, :, 3:] = poison
    np.testing.assert_array_equal(run(**arrays, tail_mask=mask, scale=0.25), clean)


def test_prefix_start_is_a_window_for_each_query(run: Run) -> None:
    arrays = make(lengths=(0, 12, 32), queries=5, tail=5)
    starts = np.array([[0] * 5, [0, 3, 11, 12, 5], [31, 32, 16, 0, 30]], np.int32)
    check(run, arrays, prefix_start=starts)
    check(run, arrays, random_tree_mask(3, 5), prefix_start=starts)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(run: Run, soft_cap: float) -> None:
    arrays = make(lengths=(4, 19), queries=6, tail=6)
    arrays["queries"] *= 8
    check(run, arrays, random_tree_mask(2, 6), soft_cap=soft_cap)


def test_large_scores_do_not_overflow(run: Run) -> None:
    arrays = make(lengths=(0, 20), queries=3, tail=3)
    arrays["queries"] *= 1e3
    out = run(**arrays, scale=1.0)
    np.testing.assert_allclose(out, expected(arrays, scale=1.0), atol=1e-3)


def test_bfloat16_accumulates_in_float32(run: Run) -> None:
    arrays = make(lengths=(0, 200), queries=8, tail=8, capacity=256)
    narrow = {k: v if k == "lengths" else jnp.asarray(v, jnp.bfloat16) for k, v in arrays.items()}
    mask = random_tree_mask(2, 8)
    out = run(**narrow, tail_mask=mask, scale=0.25)
    assert out.dtype == jnp.bfloat16
    rounded = {k: np.asarray(v, v.dtype if k == "lengths" else np.float32) for k, v in narrow.items()}
    error = np.abs(np.asarray(out, np.float64) - expected(rounded, mask, scale=0.25))
    # Two roundings to 8 bits: of the weights and of the result. Sums of 200 terms in bfloat16 would be ten times off.
    assert error.max() < 0.02


@pytest.mark.parametrize("start", [False, True])
def test_lengths_around_the_blocks_of_a_long_cache(run: Run, start: bool) -> None:
    arrays = make(lengths=(0, 1, 255, 256, 257, 700, 768), queries=3, tail=3, capacity=768, kv_heads=1, dim=8)
    starts = np.random.default_rng(5).integers(0, 768, (7, 3)).astype(np.int32)
    check(run, arrays, prefix_start=starts if start else None)
    odd = make(lengths=(0, 255, 256, 257, 298, 299, 300), queries=3, tail=3, capacity=300, kv_heads=1, dim=8)
    check(run, odd, prefix_start=np.minimum(starts, 300) if start else None)


WRONG = {
    "cache_keys batch": ({"cache_keys": (3, 2, 32, 16)}, r"cache_keys \(3, 2, 32, 16\)"),
    "cache_keys head_dim": ({"cache_keys": (2, 2, 32, 8)}, r"cache_keys \(2, 2, 32, 8\)"),
    "cache_values capacity": ({"cache_values": (2, 2, 31, 16)}, r"cache_values \(2, 2, 31, 16\)"),
    "tail_keys heads": ({"tail_keys": (2, 1, 5, 16)}, r"tail_keys \(2, 1, 5, 16\)"),
    "tail_values rows": ({"tail_values": (2, 2, 4, 16)}, r"tail_values \(2, 2, 4, 16\)"),
    "heads": ({"queries": (2, 5, 3, 16)}, "3 heads, which is no multiple of the 2"),
    "lengths": ({"lengths": (2, 1)}, r"lengths \(2, 1\) must be"),
    "causal": ({"tail_keys": (2, 2, 4, 16), "tail_values": (2, 2, 4, 16)}, "got 4 rows, 5 queries"),
    "tail_mask": ({"tail_mask": (1, 5, 5)}, r"tail_mask \(1, 5, 5\) must be"),
    "prefix_start": ({"prefix_start": (2,)}, r"prefix_start \(2,\) must be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_shapes_are_named(case: str) -> None:
    shapes, message = WRONG[case]
    arrays = make(lengths=(1, 2), queries=5, tail=5)
    for name, shape in shapes.items():
        arrays[name] = np.ones(
            shape, {"tail_mask": bool, "lengths": np.int32, "prefix_start": np.int32}.get(name, np.float32)
        )
    with pytest.raises(ValueError, match=message):
        tree_attention(**arrays, scale=1.0)


def test_unknown_implementation_is_refused() -> None:
    arrays = make(lengths=(1,), queries=1, tail=1)
    with pytest.raises(ValueError, match=re.escape("implementation='cuda' is unknown")):
        tree_attention(**arrays, scale=1.0, implementation="cuda")  # type: ignore[arg-type]
