"""Commit: keep the accepted rows, emit their tokens, and end the slots that are done."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle_jax.decoding.accept import Acceptance
from eagle_jax.decoding.sampling_state import SamplingState
from eagle_jax.decoding.state import LENGTH, RUNNING, STOPPED, DecodeState, write_tokens
from eagle_jax.decoding.verify import TargetOutput
from eagle_jax.models.cache import ordered_after


def cut(state: DecodeState, tokens: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many of the tokens offered to each slot are emitted, and whether the slot ends with them.

    Args:
      state: the state before the tokens are written; `lengths + 1` tokens are there already.
      tokens: int32 `[B, A]`.
      counts: how many of them are valid, int32 `[B]`, at least 1.

    Returns:
      The emitted number int32 `[B]`, cut behind the first stop id and at the slot's limit, 0 for slots that do not run; and the
      new `DecodeState.finish`. A stop id that is the last token of the budget counts as a stop.
    """
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    stops = jnp.any(tokens[..., None] == state.stop_ids[:, None], axis=-1)  # [B, A]
    first_stop = jnp.min(jnp.where(stops, steps, tokens.shape[1]), axis=1)
    room = state.limits - (state.lengths + 1)
    emitted = jnp.minimum(jnp.minimum(counts, first_stop + 1), room)
    finish = jnp.where(first_stop < emitted, STOPPED, jnp.where(emitted >= room, LENGTH, RUNNING))
    running = state.running
    return jnp.where(running, emitted, 0), jnp.where(running, finish, state.finish).astype(jnp.int32)


def commit(state: DecodeState, output: TargetOutput, acceptance: Acceptance, shape: int = 0) -> DecodeState:
    """Moves the accepted path of each slot into the state; `shape` is the round's place among the candidates.

    The root and all emitted tokens but the last get their rows into the target cache; the last emitted token is the next root.
    """
    emitted, finish = cut(state, acceptance.tokens, acceptance.counts + 1)
    lengths = state.lengths + emitted
    # All D + 1 rows of the path are written; those beyond the new length are never read and soon overwritten.
    cache = state.target_cache.write(output.rows, ordered_after(state.lengths, emitted), acceptance.path)
    running = state.running
    depth = state.accepted_at_depth.shape[1]
    reached = (jnp.arange(depth) < acceptance.counts[:, None]) & running[:, None]
    return dataclasses.replace(
        state,
        tokens=write_tokens(state.tokens, acceptance.tokens, state.lengths + 1, emitted),
        lengths=lengths,
        finish=finish,
        target_cache=cache,
        rounds=state.rounds + running,
        unread=state.unread.add(acceptance.tokens, emitted, tag=1 + shape),
        accepted_at_depth=state.accepted_at_depth + reached,
        sampling=record(state, output, acceptance, emitted),
    )


def record(
    state: DecodeState, output: TargetOutput, acceptance: Acceptance, emitted: jax.Array
) -> SamplingState | None:
    """The sampling state after the first `emitted[b]` tokens of each slot's accepted path."""
    sampling = state.sampling
    if sampling is None or sampling.history is None:
        return sampling
    assert output.logits is not None
    assert output.processed is not None
    # Token i of the path is what follows its node i.
    path = acceptance.path[..., None]
    return sampling.record(
        acceptance.tokens,
        emitted,
        state.unread.counts,
        slots=jnp.arange(emitted.shape[0]),
        logits=jnp.take_along_axis(output.logits, path, axis=1),
        processed=jnp.take_along_axis(output.processed, path, axis=1),
    )
