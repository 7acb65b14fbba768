"""The test matrix of tree attention, shared by its backends: cases that cover every pair of settings, their inputs, and the truth
in float64 numpy with what a dtype may differ from it.
"""

import dataclasses
import functools
import itertools
import zlib
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of a call."""

    dtype: str
    batch: int
    queries: int
    heads: tuple[int, int]
    """Query heads and key/value heads."""
    head_dim: int
    capacity: int
    tail: str
    """Shape of the tail: "causal"; "tree", of another kind in each slot; or "level": the queries are the last nodes of a tree of
    several hundred rows, as when a draft tree grows."""
    windowed: bool
    soft_cap: float | None

    def __str__(self) -> str:
        heads = "x".join(map(str, self.heads))
        marks = "-window" * self.windowed + (f"-cap{self.soft_cap:g}" if self.soft_cap else "")
        return (
            f"{self.dtype}-b{self.batch}-t{self.queries}-h{heads}-d{self.head_dim}-s{self.capacity}-{self.tail}{marks}"
        )

    @property
    def tail_rows(self) -> int:
        """M."""
        return self.queries + 190 if self.tail == "level" else self.queries

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the call that are no arrays."""
        return {"scale": self.head_dim**-0.5, "soft_cap": self.soft_cap}


def covering(factors: dict[str, list[Any]], seed: int = 0) -> list[Case]:
    """Few cases in which every pair of values of two factors occurs."""
    rng = np.random.default_rng(seed)
    names = list(factors)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }

    def pairs(choice: dict[str, int]) -> set[Any]:
        return {(a, choice[a], b, choice[b]) for a, b in itertools.combinations(names, 2)} & missing

    cases = []
    while missing:
        a, x, b, y = min(missing)
        tries = []
        for _ in range(60):
            choice = {name: int(rng.integers(len(factors[name]))) for name in names} | {a: x, b: y}
            tries.append((len(pairs(choice)), len(tries), choice))
        choice = max(tries)[2]
        missing -= pairs(choice)
        cases.append(Case(**{name: factors[name][choice[name]] for name in names}))
    return cases


def tree_mask(kind: str, nodes: int, rng: np.random.Generator) -> np.ndarray:
    """Ancestor mask of a tree, `[nodes, nodes]`."""
    mask = np.zeros((nodes, nodes), bool)
    for node in range(nodes):
        if node:
            parent = {"chain": node - 1, "star": 0}.get(kind, int(rng.integers(node)))
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask


def make_arrays(case: Case, lengths: list[int], *, seed: int = 0, poison: float | None = None) -> Arrays:
    """Arguments of the call; cache rows at and beyond the lengths hold `poison`, or numbers like the others if it is None."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[case.dtype]
    heads, kv_heads = case.heads
    assert len(lengths) == case.batch

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    arrays: Arrays = {
        "queries": normal(case.batch, case.queries, heads, case.head_dim),
        "cache_keys": normal(case.batch, kv_heads, case.capacity, case.head_dim),
        "cache_values": normal(case.batch, kv_heads, case.capacity, case.head_dim),
        "lengths": np.array(lengths, np.int32),
        "tail_keys": normal(case.batch, kv_heads, case.tail_rows, case.head_dim),
        "tail_values": normal(case.batch, kv_heads, case.tail_rows, case.head_dim),
        "tail_mask": None,
        "prefix_start": None,
    }
    if case.tail != "causal":
        kinds = [("random", "star", "chain")[(seed + slot) % 3] for slot in range(case.batch)]
        arrays["tail_mask"] = np.stack([tree_mask(kind, case.tail_rows, rng)[-case.queries :] for kind in kinds])
    if case.windowed:
        # Windows that begin in the prefix, at its end, and beyond it.
        starts = rng.integers(-20, np.array(lengths)[:, None] + 20, (case.batch, case.queries))
        arrays["prefix_start"] = np.minimum(starts, case.capacity).astype(np.int32)
    if poison is not None:
        for slot, length in enumerate(lengths):
            arrays["cache_keys"][slot, :, length:] = poison
            arrays["cache_values"][slot, :, length:] = poison
    return arrays


def truth(case: Case, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """In float64: the result `[B, T, Hq, Dh]`, and the same sum over absolute values, to which rounding errors are relative."""
    heads, kv_heads = case.heads
    group = heads // kv_heads
    wide = {name: arrays[name].astype(np.float64) for name in ("queries", "tail_keys", "tail_values")}
    result = np.empty(wide["queries"].shape)
    sizes = np.empty(wide["queries"].shape)
    for slot, kv_head in np.ndindex(case.batch, kv_heads):
        length = arrays["lengths"][slot]

        def rows(name: str, slot: int = slot, kv_head: int = kv_head, length: int = length) -> np.ndarray:
            committed = arrays["cache_" + name][slot, kv_head, :length].astype(np.float64)
            return np.concatenate([committed, wide["tail_" + name][slot, kv_head]])

        keys, values = rows("keys"), rows("values")
        seen = np.ones((case.queries, len(keys)), bool)
        if case.windowed:
            seen[:, :length] = np.arange(length) >= arrays["prefix_start"][slot][:, None]
        causal = np.arange(case.tail_rows) <= np.arange(case.queries)[:, None]
        seen[:, length:] = causal if case.tail == "causal" else arrays["tail_mask"][slot]
        for head in range(kv_head * group, (kv_head + 1) * group):
            scores = wide["queries"][slot, :, head] @ keys.T * case.head_dim**-0.5
            if case.soft_cap is not None:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            weights = np.exp(
                np.where(seen, scores, -np.inf) - np.max(scores, axis=1, keepdims=True, where=seen, initial=-np.inf)
            )
            weights /= weights.sum(axis=1, keepdims=True)
            result[slot, :, head] = weights @ values
            sizes[slot, :, head] = weights @ np.abs(values)
    return result, sizes


def assert_true(case: Case, arrays: Arrays, out: Any) -> None:
    """Compares a backend's result with the truth, element by element.

    In bfloat16 the weights and the result are rounded to 8 bits, each by up to 2^-8 of the terms' absolute sum. In float32 the
    sums of a few hundred products make the rest.
    """
    assert out.dtype == DTYPES[case.dtype]
    expected, sizes = truth(case, arrays)
    allowed = 2**-7 + 2e-5 if case.dtype == "bfloat16" else 1e-5
    error = np.abs(np.asarray(out).astype(np.float64) - expected) / sizes
    assert np.isfinite(error).all(), f"{np.count_nonzero(~np.isfinite(error))} results are not finite"
    assert error.max() < allowed, f"relative error {error.max():.2e} at {np.unravel_index(error.argmax(), error.shape)}"


def lengths_of(case: Case, kind: str, edge: int = 128) -> list[int]:
    """Lengths of a case's slots: "edges" lie around multiples of `edge`, "any" are odd, and "none" has empty slots."""
    capacity, batch = case.capacity, case.batch
    if kind == "edges":
        multiples = range(edge, capacity + edge, edge)
        every = sorted({n for m in multiples for n in (m - 1, m, m + 1) if n <= capacity} | {capacity})
        # Others for every case, the same in every run.
        return np.random.default_rng(zlib.crc32(str(case).encode())).choice(every, batch).tolist()
    odd = [(capacity // (i + 1) - 1) | 1 for i in range(batch)]
    return odd if kind == "any" else [0, *odd][:batch]


@functools.cache
def small_cases() -> list[Case]:
    """Every pair of settings in sizes that an interpreter of kernels can do."""
    return covering({
        "head_dim": [64, 80, 96, 128, 192, 256],
        "tail": ["causal", "tree", "level"],
        "queries": [1, 7, 17],
        "heads": [(4, 4), (8, 2), (9, 3)],
        "dtype": ["float32", "bfloat16"],
        "batch": [1, 2],
        "capacity": [300, 640],
        "windowed": [False, True],
        "soft_cap": [None, 5.0],
    })  # fmt: skip


@functools.cache
def large_cases() -> list[Case]:
    """Every pair of settings in the sizes of real models, for a device."""
    return covering({
        "head_dim": [64, 80, 96, 128, 192, 256],
        "tail": ["causal", "tree", "level"],
        "queries": [1, 2, 7, 8, 9, 15, 16, 17, 60, 63, 64, 65, 128, 257, 512],
        "heads": [(32, 8), (32, 32), (9, 3), (16, 1), (64, 8), (28, 4)],
        "dtype": ["float32", "bfloat16"],
        "batch": [1, 2, 5],
        "capacity": [256, 1280, 4096],
        "windowed": [False, True],
        "soft_cap": [None, 5.0],
    })  # fmt: skip


def extreme_cases() -> list[Case]:
    """The ends of what the contract promises, for a device."""
    common = {"dtype": "bfloat16", "heads": (32, 8), "head_dim": 128, "windowed": False, "soft_cap": None}
    return [
        Case(**common, batch=1, queries=1, capacity=131072, tail="causal"),
        Case(**common, batch=1, queries=64, capacity=131072, tail="tree"),
        Case(**common, batch=64, queries=16, capacity=2048, tail="tree"),
        Case(**common, batch=2, queries=512, capacity=32768, tail="causal"),
    ]
