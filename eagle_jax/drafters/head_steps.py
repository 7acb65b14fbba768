"""Passes of an EAGLE head: its guesses after its outputs, and the steps that grow a tree."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from eagle_jax.drafters.base import Drafts, DraftView
from eagle_jax.models.cache import KVCache, KVRows
from eagle_jax.models.context import CacheContext
from eagle_jax.models.heads import DraftHead
from eagle_jax.models.llama import Llama
from eagle_jax.parallel.vocabulary import Vocabulary
from eagle_jax.sampling.noise import Stream, stream_key, vocabulary_gumbel
from eagle_jax.sampling.processing import log_probabilities, process_logits
from eagle_jax.sampling.settings import SlotSettings

_NEVER_DRAWN = -1e4
"""Added to the draft logits of tokens that the request's cuts remove: behind all others, but still in order."""


@dataclasses.dataclass(frozen=True)
class HeadSteps:
    """An EAGLE head of any generation beside its target."""

    head: DraftHead
    target: Llama
    drafts: Drafts = dataclasses.field(default=Drafts.SHARED_NOISE, kw_only=True)
    """How slots that sample pick children; greedy ones take the likeliest."""

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeddings in the head's width and dtype: its own table if it has one, else the target's."""
        table = self.target.embed if self.head.embed is None else self.head.embed
        return table(tokens).astype(self.head.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits over the draft vocabulary of outputs `[B, T, h]`: by the head's own output head, else the target's."""
        with jax.named_scope("draft_lm_head"):
            if self.head.config.own_lm_head:
                return self.head.logits(hidden)
            return self.target.logits(self.head.before_lm_head(hidden).astype(self.target.dtype))

    @property
    def draft_vocabulary(self) -> Vocabulary:
        """What of the draft vocabulary a device has logits of."""
        return self.head.draft_vocabulary if self.head.config.own_lm_head else self.target.vocabulary

    @property
    def vocabulary(self) -> jax.Array:
        """Target ids of this device's columns of the draft vocabulary, int32 `[Vd]`; those of padding mean nothing."""
        return self.head.target_ids(self.draft_vocabulary.ids())

    def best(
        self, hidden: jax.Array, count: int, view: DraftView, level: jax.Array | int
    ) -> tuple[jax.Array, jax.Array]:
        """The best guesses of the token after each output of the head.

        Args:
          hidden: `[B, T, h]`.
          count: k.
          view: gives settings, seeds and positions where tokens are sampled.
          level: depth of the nodes that the guesses follow.

        Returns:
          Their scores and target ids, `[B, T, k]` each, best first; ties go to the lower draft id. Scores are float32
          log-probabilities over the draft vocabulary; under shared noise, those of the disturbed logits.
        """
        logits = self.logits(hidden)
        settings = view.settings
        if settings is not None and self.drafts is Drafts.SHARED_NOISE:
            with jax.named_scope("noise"):
                noise = settings.target_noise((view.lengths + 1 + level)[:, None], self.vocabulary)  # [B, 1, Vd]
                logits = self._cut(logits, settings) + jnp.where(settings.greedy[:, None, None], 0, noise)
        with jax.named_scope("top_k"):
            scores, ids = self.draft_vocabulary.top_log_probs(logits, count)
        return scores, self.head.target_ids(ids)

    def sample(
        self, hidden: jax.Array, count: int, view: DraftView, nodes: Sequence[int]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Draws tokens after each output of the head, without replacement; in greedy slots the likeliest.

        The `count` largest sums of log-probability and Gumbel noise, largest first, are such a draw
        (https://arxiv.org/abs/1903.06059).

        Args:
          hidden: `[B, T, h]`.
          count: k.
          view: gives settings and seeds; the draws of a round are keyed by the position of its root.
          nodes: the T nodes that the drawn tokens follow.

        Returns:
          Log-probabilities and target ids of the drawn tokens, `[B, T, k]`, and the distribution after each node over the draft
          vocabulary, float32 `[B, T, Vd]`.
        """
        settings, vocabulary = view.settings, self.draft_vocabulary
        assert settings is not None
        scores = log_probabilities(process_logits(self.logits(hidden), settings, vocabulary), vocabulary)
        with jax.named_scope("noise"):
            first, second = stream_key(settings.seeds, view.lengths, Stream.DRAFT)
            lanes = jnp.asarray(nodes, jnp.int32)[None]  # every node draws by its own numbers
            noise = vocabulary_gumbel((first[:, None], second[:, None]), self.vocabulary, lanes)  # [B, T, Vd]
        _, ids = vocabulary.top_k(scores + jnp.where(settings.greedy[:, None, None], 0, noise), count)
        # The test of acceptance reads whole distributions, so they are gathered where the head is split.
        return vocabulary.take(scores, ids), self.head.target_ids(ids), vocabulary.whole(jnp.exp(scores))

    def over_target_ids(self, values: jax.Array) -> jax.Array:
        """Spreads values over the draft vocabulary `[..., Vd]` over the target's, `[..., V]`, with zeros elsewhere."""
        everywhere = jnp.zeros((*values.shape[:-1], self.target.config.vocab_size), values.dtype)
        ids = self.head.target_ids(jnp.arange(self.head.config.draft_vocab_size, dtype=jnp.int32))
        return everywhere.at[..., ids].set(values)

    def _cut(self, logits: jax.Array, settings: SlotSettings) -> jax.Array:
        """Draft logits under the temperature and the cuts of each slot; what a cut removes stays behind the rest."""
        vocabulary = self.draft_vocabulary
        processed = process_logits(logits, settings, vocabulary)
        behind = jnp.nan_to_num(logits - vocabulary.max(logits), nan=2 * _NEVER_DRAWN, neginf=2 * _NEVER_DRAWN)
        cut = jnp.where(processed > -jnp.inf, processed, jnp.maximum(behind, _NEVER_DRAWN) + _NEVER_DRAWN)
        return vocabulary.hide_padding(cut)

    def empty_tail(self, batch: int, rows: int) -> KVRows:
        """Buffers for the uncommitted rows of a tree, M = `rows`."""
        cache = self.head.empty_cache(batch, rows)
        return KVRows(cache.keys, cache.values)

    def step(
        self,
        view: DraftView,
        cache: KVCache,
        tokens: jax.Array,
        hidden: jax.Array,
        level: jax.Array | int,
        tail: KVRows,
        offset: jax.Array | int,
        tail_mask: jax.Array,
        tail_levels: jax.Array,
    ) -> tuple[jax.Array, KVRows]:
        """One draft step: T nodes of one level of every slot's tree, on top of the committed draft rows.

        Args:
          view: gives the committed lengths.
          cache: draft cache after the extend step.
          tokens: the nodes' tokens, target ids, int32 `[B, T]`.
          hidden: outputs of the head for their parents, `[B, T, h]`.
          level: depth of the nodes minus 1; it is added to the position of the last committed row plus one.
          tail: rows of the levels before.
          offset: where the T rows go in `tail`.
          tail_mask: bool `[B, T, M]`, each node's ancestors and itself.
          tail_levels: level of every tail row, int32 `[M]`.

        Returns:
          Outputs `[B, T, h]` and the tail with the new rows.
        """
        start = view.lengths[:, None]
        context = CacheContext(
            positions=jnp.broadcast_to(start + level, tokens.shape),
            cache=cache,
            lengths=view.lengths,
            tail=tail,
            tail_offset=offset,
            tail_mask=tail_mask,
            tail_positions=start + tail_levels,
        )
        return self.head(self.embed(tokens), hidden, context)
