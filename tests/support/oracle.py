"""A drafter that knows the target's continuation, and spoils its trees where a test tells it to."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.decoding.draft import Drafter, PlainDrafter
from eagle_jax.decoding.loop import Plan, Weights
from eagle_jax.decoding.state import DecodeState, DraftState, cache_capacity
from eagle_jax.decoding.tree import ROOT_PARENT, DraftTree
from eagle_jax.models import Llama


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Script:
    """What the oracle plays. Goes where a head's weights go."""

    texts: jax.Array
    """Prompt and right continuation of each slot, int32 `[B, S]`."""
    spoiled: jax.Array
    """First depth whose right token is replaced, for each round of each slot, int32 `[B, R]`; above D: none."""
    ranks: jax.Array
    """Which child is the right one at each depth, int32 `[B, R, D]`."""


@dataclasses.dataclass(frozen=True)
class OracleDrafter(PlainDrafter):
    """Proposes a spine of D tokens with K - 1 wrong siblings at every depth, and decoys.

    At each depth a decoy, a child of a wrong sibling, carries the token that would be right one level deeper, so that an
    acceptance which forgets about parents takes it. Behind a spoiled depth the spine goes on with right tokens, for the same
    reason. Node 1 + (K + 1) * d + r is child r of the spine at depth d + 1, and node 1 + (K + 1) * d + K the decoy below it
    (without siblings there is none: a chain has D + 1 nodes).
    """

    script: Any = None
    vocab_size: int = 0
    depth: int = 1
    children: int = 1

    @property
    def group(self) -> int:
        return 1 if self.children == 1 else self.children + 1

    def empty(self, slots: int, capacity: int) -> DraftState:
        plain = super().empty(slots, capacity)
        return dataclasses.replace(plain, features=jnp.zeros((slots, self.max_depth + 1, 0)))

    def propose(self, state: DecodeState) -> tuple[DraftTree, DraftState]:
        script, k = self.script, self.children
        batch = state.lengths.shape[0]
        slots = jnp.arange(batch)
        spoiled = script.spoiled[slots, state.rounds]  # [B]
        ranks = script.ranks[slots, state.rounds]  # [B, D]
        tokens, parents, depths = [state.roots], [jnp.full((batch,), ROOT_PARENT)], [jnp.zeros((batch,), jnp.int32)]
        parent = jnp.zeros((batch,), jnp.int32)
        for d in range(self.depth):
            at = state.lengths + 1 + d
            right = jnp.take_along_axis(script.texts, at[:, None], axis=1, mode="clip")[:, 0]
            after = jnp.take_along_axis(script.texts, at[:, None] + 1, axis=1, mode="clip")[:, 0]
            base = 1 + self.group * d
            for r in range(k):
                wrong = (right + 1 + (r - ranks[:, d]) % k) % self.vocab_size
                on_spine = (r == ranks[:, d]) & (spoiled != d + 1)
                tokens.append(jnp.where(on_spine, right, wrong))
                parents.append(parent)
                depths.append(jnp.full((batch,), d + 1))
            if k > 1:
                tokens.append(after)
                parents.append(base + (ranks[:, d] + 1) % k)
                depths.append(jnp.full((batch,), d + 2))
            parent = base + ranks[:, d]
        tree = DraftTree(
            tokens=jnp.stack(tokens, axis=1).astype(jnp.int32),
            parents=jnp.stack(parents, axis=1).astype(jnp.int32),
            depths=jnp.stack(depths, axis=1).astype(jnp.int32),
            scores=jnp.zeros((batch, len(tokens)), jnp.float32),
        )
        return tree, state.draft


@dataclasses.dataclass(frozen=True, kw_only=True)
class OraclePlan(Plan):
    """A plan whose drafter is the oracle; `weights.head` is a `Script`."""

    vocab_size: int
    depth: int
    children: int

    @property
    def max_depth(self) -> int:
        return self.depth if self.children == 1 else self.depth + 1

    @property
    def capacity(self) -> int:
        return cache_capacity(self.max_length, self.prefill_chunk, self.max_depth + 1)

    def modules(self, weights: Weights) -> tuple[Llama, Drafter]:
        group = 1 if self.children == 1 else self.children + 1
        drafter = OracleDrafter(
            num_nodes=1 + group * self.depth,
            max_depth=self.max_depth,
            script=weights.head,
            vocab_size=self.vocab_size,
            depth=self.depth,
            children=self.children,
        )
        return nnx.merge(self.target_def, weights.target), drafter
