"""Everything that changes while a batch is decoded, as one pytree that each step consumes and returns."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle_jax.decoding.adaptive import MAX_CANDIDATES, AdaptiveState
from eagle_jax.decoding.sampling_state import SamplingState
from eagle_jax.drafters.base import DraftView, Memory
from eagle_jax.models.cache import KVCache
from eagle_jax.sampling.params import SamplingMode

RUNNING, STOPPED, LENGTH = 0, 1, 2
"""Values of `DecodeState.finish`: still running; a stop id was emitted; the budget or the context is used up."""


TAGS = MAX_CANDIDATES + 1
"""Values of the tag in `Unread.codes`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unread:
    """Tokens that were emitted since the last report, W at most, and which rounds they came from."""

    codes: jax.Array
    """`id * TAGS + tag` of each token, int32 `[B, W]`. The tag is 0, but for the first token of a round it is 1 + the place of
    the round's shape among the candidates (0 where all rounds have one shape)."""
    counts: jax.Array
    """How many there are, int32 `[B]`."""

    @staticmethod
    def none(slots: int, width: int) -> "Unread":
        """Before anything is emitted."""
        return Unread(jnp.zeros((slots, width), jnp.int32), jnp.zeros((slots,), jnp.int32))

    def add(self, tokens: jax.Array, counts: jax.Array, tag: int) -> "Unread":
        """The first `counts[b]` of tokens int32 `[B, A]`; `tag` is that of the first."""
        first = jnp.arange(tokens.shape[1]) == 0
        codes = tokens * TAGS + jnp.where(first, tag, 0)
        return Unread(write_tokens(self.codes, codes, self.counts, counts), self.counts + counts)


def write_tokens(tokens: jax.Array, new: jax.Array, start: jax.Array, counts: jax.Array) -> jax.Array:
    """Writes the first `counts[b]` of `new [B, A]` at `start[b]` of `tokens [B, S]`; the rest is dropped."""
    steps = jnp.arange(new.shape[1], dtype=jnp.int32)
    at = jnp.where(steps < counts[:, None], start[:, None] + steps, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], at].set(new, mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """State of B slots. A slot that is not running is frozen: rounds pass over it without changing anything a caller reads."""

    tokens: jax.Array
    """Prompt and output of each slot, int32 `[B, S]`; the pending root is at index `lengths`."""
    lengths: jax.Array
    """Committed rows of the target cache, int32 `[B]`: all tokens but the last one emitted."""
    prompt_lengths: jax.Array
    """int32 `[B]`."""
    limits: jax.Array
    """Number of tokens, prompt included, at which the slot ends by length, int32 `[B]`."""
    stop_ids: jax.Array
    """Ids that end the slot, int32 `[B, E]`, padded with -1."""
    finish: jax.Array
    """`RUNNING`, `STOPPED` or `LENGTH`, int32 `[B]`; a slot without a request is `LENGTH`."""
    target_cache: KVCache
    """Committed rows of the target."""
    draft: Memory
    """What the drafter keeps, unopened."""
    generations: jax.Array
    """Which request each slot holds, int32 `[B]`: a number that the host gave with the prompt."""
    unread: Unread
    """Emitted tokens that the host has not read yet."""
    rounds: jax.Array
    """Rounds run since the prefill, int32 `[B]`."""
    accepted_at_depth: jax.Array
    """Rounds that accepted a draft at depth d + 1, before cutting, int32 `[B, D]` (vLLM's per-position counter)."""
    sampling: SamplingState | None
    """How tokens are chosen; within greedy rounds None."""
    accept_limits: jax.Array | None
    """Most drafts that a round of each slot accepts, int32 `[B]`; None in programs that are not shape-invariant."""
    adaptive: AdaptiveState | None = None
    """What the choice among several shapes of rounds rests on; None where all rounds have the same."""

    @property
    def running(self) -> jax.Array:
        """bool `[B]`."""
        return self.finish == RUNNING

    def of_mode(self, mode: SamplingMode, processed_logprobs: bool) -> "DecodeState":
        """What rounds of a mode read and write; see `SamplingState.of_mode`."""
        if self.sampling is None:
            return self
        return dataclasses.replace(self, sampling=self.sampling.of_mode(mode, processed_logprobs))

    def with_rest_of(self, whole: "DecodeState") -> "DecodeState":
        """The whole after rounds on what `of_mode` took of it."""
        if whole.sampling is None:
            return self
        return dataclasses.replace(self, sampling=whole.sampling.after(self.sampling))

    @property
    def view(self) -> DraftView:
        """What a drafter may see."""
        settings = None if self.sampling is None else self.sampling.settings
        return DraftView(self.tokens, self.lengths, self.running, settings)


def cache_capacity(
    max_length: int, prefill_chunk: int, path_length: int, multiple: int = 256, *, idle_prefills: bool = False
) -> int:
    """Rows S of the caches for sequences of up to `max_length` tokens.

    A window written at the last committed row must fit as a whole (`KVCache.write`): a prefill chunk, which starts at a multiple
    of its length, or the `path_length` rows of an accepted path. S is rounded up to `multiple`. With `idle_prefills` the last
    `prefill_chunk` rows are no sequence's: a group of devices without a chunk of its own writes there while another has one.
    """
    chunks = -(-max_length // prefill_chunk) * prefill_chunk
    rows = max(chunks, max_length + path_length) + 1  # one more: `tokens` holds the token after a chunk
    rows += prefill_chunk if idle_prefills else 0
    return -(-rows // multiple) * multiple
