"""Reductions over a vocabulary that is split: those of numpy over whole rows, ties and padding included."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from eagle_jax.parallel import make_mesh
from eagle_jax.parallel.mesh import MODEL
from eagle_jax.parallel.vocabulary import Vocabulary
from eagle_jax.sampling import SamplingMode, SamplingParams
from eagle_jax.sampling.processing import log_probabilities, process_logits
from eagle_jax.sampling.settings import SlotSettings


def on_shards(function: Callable[..., Any], vocabulary: Vocabulary, split: tuple[bool, ...] = ()) -> Callable[..., Any]:
    """`function(x)` with `x [..., W]` on each shard of rows `[..., V]` padded with -inf; `split`: outputs to be put together."""
    mesh = make_mesh(vocabulary.shards)
    assert mesh is not None
    out = tuple(PartitionSpec(None, None, MODEL) if whole else PartitionSpec() for whole in split) or PartitionSpec()
    run = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(None, None, MODEL), out_specs=out, check_vma=False)
    )

    def padded(rows: np.ndarray) -> Any:
        extra = vocabulary.padded_size - vocabulary.size
        return run(np.pad(rows, [(0, 0), (0, 0), (0, extra)], constant_values=-np.inf))

    return padded


def rows_with_ties(size: int) -> np.ndarray:
    """Float32 `[3, 5, size]` of few distinct values; every largest value occurs in several shards."""
    rng = np.random.default_rng(size)
    rows = rng.integers(-3, 3, (3, 5, size)).astype(np.float32)
    rows[0, 0, [size // 2 + 1, size - 1]] = 9  # in two shards, and nowhere before
    rows[0, 1] = -np.inf
    rows[0, 1, size // 3] = -5
    return rows


@pytest.mark.parametrize(("size", "shards"), [(97, 8), (9, 8), (96, 3)])
def test_reductions(size: int, shards: int) -> None:
    vocabulary, count = Vocabulary(size, shards), 7

    def everything(x: jax.Array) -> tuple[Any, ...]:
        ids = vocabulary.top_k(x, count)[1]
        return (
            *vocabulary.best(x),
            *vocabulary.top_k(x, count),
            *vocabulary.top_log_probs(x, count),
            vocabulary.take(x, ids),
            vocabulary.count(x >= -jnp.inf),
            vocabulary.whole(x),
            vocabulary.own(vocabulary.whole(x)),
        )

    rows = rows_with_ties(size)
    results = on_shards(everything, vocabulary, (False,) * 9 + (True,))(rows)
    best, best_id, top, top_ids, scores, score_ids, taken, every, whole, own = map(np.asarray, results)
    assert np.array_equal(best_id, rows.argmax(-1))
    assert np.array_equal(best, rows.max(-1))
    order = np.argsort(-rows, axis=-1, kind="stable")[..., :count]
    assert np.array_equal(top_ids, order)
    assert np.array_equal(score_ids, order)
    sorted_rows = np.take_along_axis(rows, order, -1)
    assert np.array_equal(top, sorted_rows)
    assert np.array_equal(taken, sorted_rows)
    log_sum = np.log(np.exp(rows.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(scores, sorted_rows - log_sum, rtol=1e-5, atol=1e-5)
    assert (every == size).all()
    assert np.array_equal(whole, rows)
    assert np.array_equal(own[..., :size], rows)


@functools.cache
def settings() -> SlotSettings:
    requests = [
        SamplingParams(temperature=0.8, top_k=60, top_p=0.97, min_p=0.01),
        SamplingParams(temperature=1.3, top_p=0.5),
        SamplingParams(temperature=2.0, top_k=180),  # behind the shortlist
    ]
    slots = SlotSettings.empty(len(requests), Vocabulary(200))
    for slot, request in enumerate(requests):
        one = SlotSettings.of(request, 0, 200, SamplingMode.SAMPLING)
        assert one is not None
        slots = slots.put(jnp.int32(slot), one, Vocabulary(200))
    return slots


def test_processing_is_that_of_one_device() -> None:
    vocabulary, slots = Vocabulary(200, 8), settings()
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, 5, 200)).astype(np.float32) * 4
    rows[0, 0, 190:] = rows[0, 0].max() + 1  # the likeliest tokens tie in the last shards

    def process(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return process_logits(x, slots, vocabulary), log_probabilities(x, vocabulary)

    processed, log_probs = on_shards(process, vocabulary, (True, True))(rows)
    wanted = np.asarray(jax.jit(process_logits)(rows, slots))
    assert np.array_equal(np.isfinite(processed), np.isfinite(wanted))
    assert np.isfinite(wanted).any(-1).all()
    assert np.isinf(wanted).any()
    np.testing.assert_allclose(np.asarray(processed), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(log_probs), np.asarray(log_probabilities(rows)), rtol=1e-5, atol=1e-5)
