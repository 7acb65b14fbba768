"""Drafting with an EAGLE head: encode what was accepted with true hidden states, then grow a tree from the last row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from eagle_jax.drafters.base import Drafter, DraftView, Outcome, Reading
from eagle_jax.drafters.dynamic_tree import grow_dynamic_tree
from eagle_jax.drafters.head_steps import HeadSteps
from eagle_jax.drafters.static_tree import grow_static_tree
from eagle_jax.drafters.tree import DraftTree, StaticTree, TreeConfig
from eagle_jax.models.cache import KVCache, ordered_after
from eagle_jax.models.context import CacheContext
from eagle_jax.parallel.mesh import DATA, MODEL


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EagleMemory:
    """What an EAGLE head keeps between rounds."""

    cache: KVCache
    """Committed draft rows: row p holds (hidden states of token p, embedding of token p + 1)."""
    lengths: jax.Array
    """Committed draft rows, int32 `[B]`. The rows up to the root are due in the next extend step."""
    states: jax.Array
    """True auxiliary hidden states of the rows that are due, `[B, A, F]`, first due row first."""

    @property
    def rows(self) -> int:
        """A: most rows that can be due."""
        return self.states.shape[1]


@dataclasses.dataclass(frozen=True)
class EagleDrafter(HeadSteps, Drafter):
    """An EAGLE head of any generation and the shape of the trees it grows."""

    tree: TreeConfig | StaticTree = dataclasses.field(kw_only=True)
    due_rows: int | None = dataclasses.field(default=None, kw_only=True)
    """Rows that can be due; None: those of the tree's longest path, which one round leaves at most."""

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Nodes of a tree, the root included: N."""
        return self.tree.total_tokens

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        """Most drafted tokens that a round can accept: D."""
        return self.tree.max_depth

    @property
    def shards(self) -> int:  # type: ignore[override]
        """The head's."""
        return self.head.shards

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Those that the head was trained on."""
        return self.head.config.capture_layers

    def init(self, slots: int, capacity: int) -> EagleMemory:
        """An empty draft cache; room for the hidden states of the rows that can be due."""
        size = (slots, self.due_rows or self.max_depth + 1, self.head.config.feature_size)
        return EagleMemory(
            cache=self.head.empty_cache(slots, capacity),
            lengths=jnp.zeros((slots,), jnp.int32),
            states=jnp.zeros(size, self.target.dtype),
        )

    def prefill(self, memory: EagleMemory, reading: Reading) -> EagleMemory:
        """Encodes the chunk; its last valid token stays due with its hidden states."""
        slot, start, valid = reading.slot, reading.start, reading.valid
        context = CacheContext(
            positions=start + jnp.arange(reading.next_tokens.shape[1], dtype=jnp.int32)[None],
            cache=memory.cache.slot(slot),
            lengths=start[None],
        )
        _, rows = self.head(self.embed(reading.next_tokens), self.head.fuse(reading.states), context)
        due = jax.lax.dynamic_slice_in_dim(reading.states, valid - 1, 1, axis=1)  # [1, 1, F]
        zero = jnp.zeros((), jnp.int32)
        return EagleMemory(
            cache=memory.cache.write_slot(rows, slot, start),
            lengths=memory.lengths.at[slot].set(start + valid - 1),
            states=jax.lax.dynamic_update_slice(memory.states, due, (slot, zero, zero)),
        )

    def propose(self, memory: EagleMemory, view: DraftView) -> tuple[DraftTree, EagleMemory]:
        """Encodes what is due with true hidden states, then grows a tree from the head's last output."""
        with jax.named_scope("extend"):
            memory, last = self._extend(memory, view, None if self.due_rows is None else self.max_depth + 1)
        with jax.named_scope("grow"):
            if isinstance(self.tree, StaticTree):
                return grow_static_tree(self, self.tree, view, memory.cache, last), memory
            return grow_dynamic_tree(self, self.tree, view, memory.cache, last), memory

    def observe(self, memory: EagleMemory, outcome: Outcome) -> EagleMemory:
        """Keeps the true hidden states of the accepted path: its rows are due now."""
        states = outcome.states.astype(memory.states.dtype)
        if states.shape[1] != memory.rows:  # one of several shapes of rounds: behind the rows that are still due
            put = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))
            states = put(memory.states, states, outcome.lengths - memory.lengths)
        return dataclasses.replace(memory, states=states)

    @property
    def backlog_room(self) -> int:  # type: ignore[override]
        """Rows that the extend step encodes at once."""
        return self.max_depth + 1

    def backlog(self, memory: EagleMemory, view: DraftView) -> jax.Array:
        """Rows that are due."""
        return view.lengths - memory.lengths

    def catch_up(self, memory: EagleMemory, view: DraftView) -> EagleMemory:
        """Encodes all rows that are due but each slot's last one, from which the next tree grows."""
        extended, _ = self._extend(memory, view)
        last = jnp.maximum(view.lengths - memory.lengths - 1, 0)
        # The last due row comes first; behind it none is due.
        rows = last[:, None] + jnp.arange(memory.rows, dtype=jnp.int32)
        states = jnp.take_along_axis(memory.states, rows[..., None], axis=1, mode="clip")
        return dataclasses.replace(extended, lengths=memory.lengths + last, states=states)

    def assume(self, memory: EagleMemory, lengths: jax.Array) -> EagleMemory:
        """With one row that is due."""
        return dataclasses.replace(memory, lengths=jnp.maximum(lengths - 1, 0))

    def specs(self, memory: EagleMemory) -> EagleMemory:
        """The heads of the cache go to the devices that share the head."""
        specs: EagleMemory = super().specs(memory)
        if self.shards == 1:
            return specs
        return dataclasses.replace(specs, cache=jax.tree.map(lambda _: PartitionSpec(DATA, MODEL), memory.cache))

    def choose(self, active: jax.Array, new: EagleMemory, old: EagleMemory) -> EagleMemory:
        """The cache is the new one in any case."""
        chosen: EagleMemory = super().choose(active, new, dataclasses.replace(old, cache=new.cache))
        return chosen

    def _extend(self, memory: EagleMemory, view: DraftView, rows: int | None = None) -> tuple[EagleMemory, jax.Array]:
        """Commits the rows that are due; returns the memory and the head's output of each slot's last row, `[B, 1, h]`.

        `rows` bounds how many are due; None: as many as the memory holds.
        """
        offsets = jnp.arange(rows or memory.rows, dtype=jnp.int32)
        positions = memory.lengths[:, None] + offsets  # [B, A]
        tokens = jnp.take_along_axis(view.tokens, positions + 1, axis=1, mode="clip")
        # Rows beyond the last due one are computed on what happens to be there and lie beyond the length: never read.
        context = CacheContext(positions=positions, cache=memory.cache, lengths=memory.lengths)
        out, new = self.head(self.embed(tokens), self.head.fuse(memory.states[:, :rows]), context)
        final = jnp.maximum(view.lengths - memory.lengths - 1, 0)
        last = jnp.take_along_axis(out, final[:, None, None], axis=1)
        start = ordered_after(memory.lengths, (last[:, 0, 0] > 0).astype(jnp.int32))
        return EagleMemory(memory.cache.write(new, start), view.lengths, memory.states), last
