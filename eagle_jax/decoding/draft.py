"""Drafters: plain decoding, and EAGLE heads that grow a dynamic tree (a chain is the tree with one child a node)."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from eagle_jax.decoding.state import DecodeState, DraftState
from eagle_jax.decoding.tree import ROOT_PARENT, DraftTree, TreeConfig
from eagle_jax.models.cache import KVCache, KVRows
from eagle_jax.models.eagle3 import Eagle3Head
from eagle_jax.models.llama import Llama


class Drafter(Protocol):
    """Proposes a tree for every slot. Built inside the jitted step around the modules it reads; keeps its memory in the state."""

    @property
    def num_nodes(self) -> int:
        """Nodes of a tree, the root included: N."""
        ...

    @property
    def max_depth(self) -> int:
        """Most drafted tokens a round can accept: D."""
        ...

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that the drafter reads (`Llama.__call__`)."""
        ...

    def empty(self, slots: int, capacity: int) -> DraftState:
        """The drafter's memory before any prefill."""
        ...

    def prefill(
        self,
        draft: DraftState,
        slot: jax.Array,
        start: jax.Array,
        next_tokens: jax.Array,
        features: jax.Array,
        valid: jax.Array,
    ) -> DraftState:
        """Takes in one chunk of a slot's prompt.

        Args:
          draft: the memory of all slots.
          slot: the slot, int32 scalar.
          start: position of the chunk's first token, int32 scalar.
          next_tokens: the token after each of the chunk's C tokens, int32 `[1, C]`.
          features: target features of the chunk's tokens, `[1, C, F]`.
          valid: how many of the C tokens belong to the prompt, int32 scalar of at least 1. The last of them stays due: the token
            after it is not known before the target's logits are.
        """
        ...

    def propose(self, state: DecodeState) -> tuple[DraftTree, DraftState]:
        """Grows a tree on each slot's pending root."""
        ...


@dataclasses.dataclass(frozen=True)
class PlainDrafter:
    """Drafts nothing: the loop then decodes one token a round."""

    num_nodes: int = 1
    max_depth: int = 0
    capture_layers: tuple[int, ...] = ()

    def empty(self, slots: int, capacity: int) -> DraftState:
        """A memory without content."""
        del capacity
        return DraftState(KVCache((), ()), jnp.zeros((slots,), jnp.int32), jnp.zeros((slots, 1, 0), jnp.float32))

    def prefill(
        self,
        draft: DraftState,
        slot: jax.Array,
        start: jax.Array,
        next_tokens: jax.Array,
        features: jax.Array,
        valid: jax.Array,
    ) -> DraftState:
        """Keeps nothing of the prompt."""
        del slot, start, next_tokens, features, valid
        return draft

    def propose(self, state: DecodeState) -> tuple[DraftTree, DraftState]:
        """The root alone."""
        return DraftTree.only_root(state.roots), state.draft


@dataclasses.dataclass(frozen=True)
class EagleDrafter:
    """An EAGLE head that grows EAGLE-2's dynamic tree (https://arxiv.org/abs/2406.16858) in static shapes."""

    head: Eagle3Head
    target: Llama
    tree: TreeConfig

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
        """An empty draft cache; room for the features of the longest path."""
        size = (slots, self.max_depth + 1, self.head.config.feature_size)
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
        positions = start + jnp.arange(next_tokens.shape[1], dtype=jnp.int32)[None]
        _, rows = self.head(
            self._embed(next_tokens), self.head.fuse(features), positions, draft.cache.slot(slot), start[None]
        )
        due = jax.lax.dynamic_slice_in_dim(features, valid - 1, 1, axis=1)  # [1, 1, F]
        zero = jnp.zeros((), jnp.int32)
        return DraftState(
            cache=draft.cache.write_slot(rows, slot, start),
            lengths=draft.lengths.at[slot].set(start + valid - 1),
            features=jax.lax.dynamic_update_slice(draft.features, due, (slot, zero, zero)),
        )

    def propose(self, state: DecodeState) -> tuple[DraftTree, DraftState]:
        """Encodes what is due with true features, then expands the tree level by level inside one `lax.scan`."""
        with jax.named_scope("extend"):
            draft, last = self._extend(state)
        with jax.named_scope("grow"):
            tree = self._grow(state, draft.cache, last)
        return tree, draft

    def _embed(self, tokens: jax.Array) -> jax.Array:
        """Embeddings in the head's width and dtype: its own table if it has one, else the target's."""
        table = self.target.embed if self.head.embed is None else self.head.embed
        return table(tokens).astype(self.head.dtype)

    def _extend(self, state: DecodeState) -> tuple[DraftState, jax.Array]:
        """Commits the rows that are due; returns the memory and the head's output of each slot's last row, `[B, h]`."""
        draft = state.draft
        offsets = jnp.arange(draft.features.shape[1], dtype=jnp.int32)
        positions = draft.lengths[:, None] + offsets  # [B, A]
        tokens = jnp.take_along_axis(state.tokens, positions + 1, axis=1, mode="clip")
        # Rows beyond the last due one are computed on what happens to be there and lie beyond the length: never read.
        out, rows = self.head(
            self._embed(tokens), self.head.fuse(draft.features), positions, draft.cache, draft.lengths
        )
        final = jnp.maximum(state.lengths - draft.lengths - 1, 0)
        last = jnp.take_along_axis(out, final[:, None, None], axis=1)[:, 0]
        cache = draft.cache.write(rows, draft.lengths)
        return DraftState(cache=cache, lengths=state.lengths, features=draft.features), last

    def _grow(self, state: DecodeState, cache: KVCache, last: jax.Array) -> DraftTree:
        """EAGLE-2's expansion and re-ranking from the last output `[B, h]`. Pool nodes are numbered in creation order."""
        head, k, depth = self.head, self.tree.top_k, self.tree.depth
        batch, pool = last.shape[0], self.tree.pool_size
        scores, ids = _best(head.logits(last[:, None]), k)  # [B, 1, k]
        scores, ids = scores[:, 0], ids[:, 0]
        first = (head.target_ids(ids), scores, jnp.full((batch, k), ROOT_PARENT, jnp.int32))

        rows = (
            max(depth, 1) * k
        )  # M: every expanded node leaves a row in the tail; a scan of no level is traced all the same
        own = jnp.arange(rows, dtype=jnp.int32)
        buffers = KVCache.zeros(
            head.config.num_hidden_layers,
            batch,
            head.config.num_key_value_heads,
            rows,
            head.config.head_dim,
            head.dtype,
        )
        tail = KVRows(buffers.keys, buffers.values)

        def expand(carry, step):  # one level: run the frontier's k nodes, score their k * k children, keep the k best
            tokens, scores, hidden, nodes, seen, tail = carry
            offset = step * k
            seen = seen | (own == (offset + jnp.arange(k, dtype=jnp.int32))[:, None])  # [B, k, M]
            positions = jnp.broadcast_to(state.lengths[:, None] + step, (batch, k))
            out, tail = head(
                self._embed(tokens), hidden, positions, cache, state.lengths,
                tail=tail, tail_offset=offset, tail_mask=seen,
            )  # fmt: skip
            steps, ids = _best(head.logits(out), k)  # [B, k, k]
            children = (scores[..., None] + steps).reshape(batch, k * k)
            ids = head.target_ids(ids).reshape(batch, k * k)
            level = (ids, children, jnp.repeat(nodes, k, axis=1))
            scores, best = jax.lax.top_k(children, k)  # ties to the lower index
            parent = best // k
            carry = (
                jnp.take_along_axis(ids, best, axis=1),
                scores,
                jnp.take_along_axis(out, parent[..., None], axis=1),
                k + step * k * k + best,
                jnp.take_along_axis(seen, parent[..., None], axis=1),
                tail,
            )
            return carry, level

        start = (
            first[0],
            scores,
            jnp.repeat(last[:, None], k, axis=1),
            jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k)),
            jnp.zeros((batch, k, rows), bool),
            tail,
        )
        _, levels = jax.lax.scan(expand, start, jnp.arange(depth, dtype=jnp.int32))

        def in_order(head_part: jax.Array, scanned: jax.Array) -> jax.Array:
            return jnp.concatenate([head_part, scanned.swapaxes(0, 1).reshape(batch, depth * k * k)], axis=1)

        tokens, scores, parents = map(in_order, first, levels)  # [B, pool]
        # A child never outranks its parent, and top_k prefers the lower index, so every kept node's parent is kept.
        kept = jnp.sort(jax.lax.top_k(scores, self.num_nodes - 1)[1], axis=1)
        place = jnp.zeros((batch, pool), jnp.int32)
        slots = jnp.arange(batch)[:, None]
        place = place.at[slots, kept].set(jnp.arange(1, self.num_nodes, dtype=jnp.int32))
        parent = jnp.take_along_axis(parents, kept, axis=1)
        parent = jnp.where(parent < 0, 0, jnp.take_along_axis(place, jnp.maximum(parent, 0), axis=1))
        depths = jnp.where(kept < k, 1, 2 + (kept - k) // (k * k))

        def with_root(root: jax.Array, nodes: jax.Array) -> jax.Array:
            return jnp.concatenate([root[:, None].astype(nodes.dtype), nodes], axis=1)

        zeros = jnp.zeros((batch,), jnp.int32)
        return DraftTree(
            tokens=with_root(state.roots, jnp.take_along_axis(tokens, kept, axis=1)),
            parents=with_root(zeros + ROOT_PARENT, parent),
            depths=with_root(zeros, depths),
            scores=with_root(zeros, jnp.take_along_axis(scores, kept, axis=1)),
        )


def _best(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k best draft ids of each row and their log-probabilities, best first, ties to the lower id: `[B, T, k]` each."""
    peak, ids = jax.lax.top_k(logits, k)
    return peak - jax.nn.logsumexp(logits, axis=-1, keepdims=True), ids.astype(jnp.int32)
