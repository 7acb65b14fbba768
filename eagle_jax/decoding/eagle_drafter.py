"""Drafting with an EAGLE head: encode what was accepted with true features, then grow a tree from the last row."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from eagle_jax.decoding.dynamic_tree import grow_dynamic_tree
from eagle_jax.decoding.rules import Drafts
from eagle_jax.decoding.state import DecodeState, DraftState
from eagle_jax.decoding.static_tree import grow_static_tree
from eagle_jax.decoding.tree import DraftTree, StaticTree, TreeConfig
from eagle_jax.models.cache import KVCache, KVRows, ordered_after
from eagle_jax.models.draft_layer import DraftContext
from eagle_jax.models.heads import DraftHead
from eagle_jax.models.llama import Llama
from eagle_jax.parallel.vocabulary import Vocabulary
from eagle_jax.sampling.noise import Stream, stream_key, vocabulary_gumbel
from eagle_jax.sampling.processing import log_probabilities, process_logits
from eagle_jax.sampling.settings import SlotSettings

_NEVER_DRAWN = -1e4
"""Added to the draft logits of tokens that the request's cuts remove: behind all others, but still in order."""


@dataclasses.dataclass(frozen=True)
class EagleDrafter:
    """An EAGLE head of any generation and the shape of the trees it grows (`eagle_jax.decoding.draft.Drafter`)."""

    head: DraftHead
    target: Llama
    tree: TreeConfig | StaticTree
    drafts: Drafts = dataclasses.field(default=Drafts.SHARED_NOISE, kw_only=True)
    """How slots that sample pick children; greedy ones take the likeliest."""
    due_rows: int | None = dataclasses.field(default=None, kw_only=True)
    """Rows of features that the memory holds; None: those of the tree's longest path, which one round leaves at most."""

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.tree.total_tokens

    @property
    def max_depth(self) -> int:
        """D."""
        return self.tree.max_depth

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The head's."""
        return self.head.config.capture_layers

    def empty(self, slots: int, capacity: int) -> DraftState:
        """An empty draft cache; room for the features of the rows that can be due."""
        size = (slots, self.due_rows or self.max_depth + 1, self.head.config.feature_size)
        return DraftState(
            cache=self.head.empty_cache(slots, capacity),
            lengths=jnp.zeros((slots,), jnp.int32),
            features=jnp.zeros(size, self.target.dtype),
        )

    def prefill(
        self,
        draft: DraftState,
        slot: jax.Array,
        start: jax.Array,
        next_tokens: jax.Array,
        features: jax.Array,
        valid: jax.Array,
    ) -> DraftState:
        """Encodes the chunk; its last valid token stays due with its feature."""
        context = DraftContext(
            positions=start + jnp.arange(next_tokens.shape[1], dtype=jnp.int32)[None],
            cache=draft.cache.slot(slot),
            lengths=start[None],
        )
        _, rows = self.head(self.embed(next_tokens), self.head.fuse(features), context)
        due = jax.lax.dynamic_slice_in_dim(features, valid - 1, 1, axis=1)  # [1, 1, F]
        zero = jnp.zeros((), jnp.int32)
        return DraftState(
            cache=draft.cache.write_slot(rows, slot, start),
            lengths=draft.lengths.at[slot].set(start + valid - 1),
            features=jax.lax.dynamic_update_slice(draft.features, due, (slot, zero, zero)),
        )

    def propose(self, state: DecodeState) -> tuple[DraftTree, DraftState]:
        """Encodes what is due with true features, then grows a tree from the head's last output."""
        with jax.named_scope("extend"):
            draft, last = self._extend(state, None if self.due_rows is None else self.max_depth + 1)
        with jax.named_scope("grow"):
            if isinstance(self.tree, StaticTree):
                return grow_static_tree(self, self.tree, state, draft.cache, last), draft
            return grow_dynamic_tree(self, self.tree, state, draft.cache, last), draft

    def settle(self, state: DecodeState) -> DecodeState:
        """Encodes all rows that are due but each slot's last one, from which the next tree grows."""
        before = state.draft
        draft, _ = self._extend(state)
        last = jnp.maximum(state.lengths - before.lengths - 1, 0)
        # The last due row comes first; behind it none is due.
        rows = last[:, None] + jnp.arange(before.rows, dtype=jnp.int32)
        features = jnp.take_along_axis(before.features, rows[..., None], axis=1, mode="clip")
        draft = dataclasses.replace(draft, lengths=before.lengths + last, features=features)
        return dataclasses.replace(state, draft=draft)

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
        self, hidden: jax.Array, count: int, state: DecodeState, level: jax.Array | int
    ) -> tuple[jax.Array, jax.Array]:
        """The best guesses of the token after each output of the head.

        Args:
          hidden: `[B, T, h]`.
          count: k.
          state: gives settings, seeds and positions where tokens are sampled.
          level: depth of the nodes that the guesses follow.

        Returns:
          Their scores and target ids, `[B, T, k]` each, best first; ties go to the lower draft id. Scores are float32
          log-probabilities over the draft vocabulary; under shared noise, those of the disturbed logits.
        """
        logits = self.logits(hidden)
        if state.sampling is not None and self.drafts is Drafts.SHARED_NOISE:
            with jax.named_scope("noise"):
                settings = state.sampling.settings
                noise = state.sampling.target_noise((state.lengths + 1 + level)[:, None], self.vocabulary)  # [B, 1, Vd]
                logits = self._cut(logits, settings) + jnp.where(settings.greedy[:, None, None], 0, noise)
        with jax.named_scope("top_k"):
            scores, ids = self.draft_vocabulary.top_log_probs(logits, count)
        return scores, self.head.target_ids(ids)

    def sample(
        self, hidden: jax.Array, count: int, state: DecodeState, nodes: Sequence[int]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Draws tokens after each output of the head, without replacement; in greedy slots the likeliest.

        The `count` largest sums of log-probability and Gumbel noise, largest first, are such a draw
        (https://arxiv.org/abs/1903.06059).

        Args:
          hidden: `[B, T, h]`.
          count: k.
          state: gives settings and seeds; the draws of a round are keyed by the position of its root.
          nodes: the T nodes that the drawn tokens follow.

        Returns:
          Log-probabilities and target ids of the drawn tokens, `[B, T, k]`, and the distribution after each node over the draft
          vocabulary, float32 `[B, T, Vd]`.
        """
        assert state.sampling is not None
        settings, vocabulary = state.sampling.settings, self.draft_vocabulary
        scores = log_probabilities(process_logits(self.logits(hidden), settings, vocabulary), vocabulary)
        with jax.named_scope("noise"):
            first, second = stream_key(settings.seeds, state.lengths, Stream.DRAFT)
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

    def _extend(self, state: DecodeState, rows: int | None = None) -> tuple[DraftState, jax.Array]:
        """Commits the rows that are due; returns the memory and the head's output of each slot's last row, `[B, 1, h]`.

        `rows` bounds how many are due; None: as many as the memory holds.
        """
        draft = state.draft
        offsets = jnp.arange(rows or draft.rows, dtype=jnp.int32)
        positions = draft.lengths[:, None] + offsets  # [B, A]
        tokens = jnp.take_along_axis(state.tokens, positions + 1, axis=1, mode="clip")
        # Rows beyond the last due one are computed on what happens to be there and lie beyond the length: never read.
        context = DraftContext(positions=positions, cache=draft.cache, lengths=draft.lengths)
        out, new = self.head(self.embed(tokens), self.head.fuse(draft.features[:, :rows]), context)
        final = jnp.maximum(state.lengths - draft.lengths - 1, 0)
        last = jnp.take_along_axis(out, final[:, None, None], axis=1)
        start = ordered_after(draft.lengths, (last[:, 0, 0] > 0).astype(jnp.int32))
        cache = draft.cache.write(new, start)
        return DraftState(cache=cache, lengths=state.lengths, features=draft.features), last

    def step(
        self,
        state: DecodeState,
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
          state: gives the committed lengths.
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
        start = state.lengths[:, None]
        context = DraftContext(
            positions=jnp.broadcast_to(start + level, tokens.shape),
            cache=cache,
            lengths=state.lengths,
            tail=tail,
            tail_offset=offset,
            tail_mask=tail_mask,
            tail_positions=start + tail_levels,
        )
        return self.head(self.embed(tokens), hidden, context)
