"""Prefill: one chunk of one slot's prompt through the target and the drafter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.decoding.commit import cut
from eagle_jax.decoding.placement import only_if
from eagle_jax.decoding.sampling_state import SamplingState
from eagle_jax.decoding.state import RUNNING, DecodeState, write_tokens
from eagle_jax.drafters.base import Drafter, Reading
from eagle_jax.models.cache import ordered_after
from eagle_jax.models.context import CacheContext
from eagle_jax.models.llama import Llama
from eagle_jax.parallel.vocabulary import Vocabulary
from eagle_jax.sampling.params import SamplingMode
from eagle_jax.sampling.processing import choose, draw
from eagle_jax.sampling.settings import SlotSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptChunk:
    """C consecutive prompt tokens for one slot, as numpy values on the host and arrays inside the program."""

    slot: Any
    """int32 scalar."""
    generation: Any
    """See `DecodeState.generations`, int32 scalar."""
    tokens: Any
    """The chunk and the token after it, int32 `[C + 1]`; what lies beyond the prompt is arbitrary."""
    start: Any
    """Position of the first token, a multiple of C, int32 scalar."""
    valid: Any
    """How many of the C tokens belong to the prompt, int32 scalar, at least 1."""
    prompt_length: Any
    """int32 scalar."""
    limit: Any
    """See `DecodeState.limits`, int32 scalar; at least `prompt_length + 1`."""
    stop_ids: Any
    """See `DecodeState.stop_ids`, int32 `[E]`."""
    sampling: SlotSettings | None
    """How the request's tokens are chosen; None is greedy."""
    accept_limit: Any
    """See `DecodeState.accept_limits`, int32 scalar, or None."""
    active: Any = None
    """False, a bool scalar, for the chunk of a group of devices that has none: it is run while the others run theirs, at a place
    that is no sequence's, and changes nothing. None where there is one group."""


def prefill_chunk(
    target: Llama, drafter: Drafter, state: DecodeState, chunk: PromptChunk, processed_logprobs: bool = False
) -> DecodeState:
    """Runs one chunk and emits the token after its last valid one.

    Only the last chunk's token is the true first output token; what earlier chunks emit is overwritten by the next chunk.
    """
    before = state
    assert state.sampling is not None
    size = chunk.tokens.shape[0] - 1
    tokens, next_tokens = chunk.tokens[None, :-1], chunk.tokens[None, 1:]
    slot, start = chunk.slot, chunk.start
    context = CacheContext(
        positions=start + jnp.arange(size, dtype=jnp.int32)[None],
        cache=state.target_cache.slot(slot),
        lengths=start[None],
    )
    out = target(tokens, context, aux_layers=drafter.aux_layers, prompt_lengths=chunk.prompt_length[None])
    last = jax.lax.dynamic_slice_in_dim(out.hidden, chunk.valid - 1, 1, axis=1)  # [1, 1, H]
    logits = target.logits(last)  # [1, 1, V]
    first_token, sampling = first_choice(logits, target.vocabulary, state.sampling, chunk, processed_logprobs)  # [1, 1]
    draft = drafter.prefill(state.draft, Reading(slot, start, next_tokens, out.aux, chunk.valid))
    end = start + chunk.valid  # position of the token after the chunk

    state = dataclasses.replace(
        state,
        tokens=jax.lax.dynamic_update_slice(state.tokens, tokens, (slot, start)),
        lengths=state.lengths.at[slot].set(end - 1),
        prompt_lengths=state.prompt_lengths.at[slot].set(chunk.prompt_length),
        limits=state.limits.at[slot].set(chunk.limit),
        stop_ids=state.stop_ids.at[slot].set(chunk.stop_ids),
        finish=state.finish.at[slot].set(RUNNING),
        target_cache=state.target_cache.write_slot(out.rows, slot, ordered_after(start, first_token[0, 0])),
        draft=draft,
        generations=state.generations.at[slot].set(chunk.generation),
        unread=dataclasses.replace(state.unread, counts=state.unread.counts.at[slot].set(0)),
        rounds=state.rounds.at[slot].set(0),
        accepted_at_depth=state.accepted_at_depth.at[slot].set(0),
        sampling=sampling,
        adaptive=None if state.adaptive is None else state.adaptive.start(slot),
        accept_limits=None if state.accept_limits is None else state.accept_limits.at[slot].set(chunk.accept_limit),
    )
    # The first token leaves through the same gate as every other: it may be a stop id, or all there is room for.
    here = jnp.arange(state.lengths.shape[0]) == slot
    offered = jnp.broadcast_to(first_token, (here.shape[0], 1))
    emitted, finish = cut(state, offered, jnp.ones_like(state.lengths))
    emitted = jnp.where(here, emitted, 0)
    state = dataclasses.replace(
        state,
        tokens=write_tokens(state.tokens, offered, state.lengths + 1, emitted),
        unread=state.unread.add(offered, emitted, tag=0),
        lengths=state.lengths + emitted,
        finish=jnp.where(here, finish, state.finish),
    )
    if chunk.active is None:
        return state
    return only_if(chunk.active, state, before, drafter.choose(chunk.active, state.draft, before.draft))


def first_choice(
    logits: jax.Array, vocabulary: Vocabulary, sampling: SamplingState, chunk: PromptChunk, processed_logprobs: bool
) -> tuple[jax.Array, SamplingState]:
    """The token after the chunk, int32 `[1, 1]`, by the same rules as any later one, and the slot's new sampling state.

    Args:
      logits: after the chunk's last valid token, float32 `[1, 1, V]`.
      vocabulary: the target's.
      sampling: of all slots.
      chunk: the chunk.
      processed_logprobs: see `SamplingState`.
    """
    whole = sampling.start(chunk.slot, chunk.sampling)
    if chunk.sampling is None:
        return choose(logits, vocabulary), whole
    mode = SamplingMode.SAMPLING if chunk.sampling.controls is None else SamplingMode.FULL
    rounds = whole.of_mode(mode, processed_logprobs)
    assert rounds is not None
    rounds = rounds.read_prompt(chunk.slot, chunk.tokens[:-1], chunk.valid, chunk.start == 0)
    here = rounds.of_slot(chunk.slot)
    processed = here.process(
        logits,
        tokens=jnp.zeros((1, 1), jnp.int32),
        ancestors=jnp.ones((1, 1, 1), bool),
        output_lengths=jnp.zeros((1, 1), jnp.int32),
        stop_ids=chunk.stop_ids[None],
    )
    token = draw(processed, here.target_noise((chunk.start + chunk.valid)[None, None]), here.settings, vocabulary)
    one = jnp.ones((1,), jnp.int32)
    rounds = rounds.record(token, one, 0 * one, slots=chunk.slot[None], logits=logits, processed=processed)
    return token, whole.after(rounds)
