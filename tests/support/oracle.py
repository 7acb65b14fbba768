"""A drafter that knows the target's continuation, and spoils its trees where a test tells it to; it plugs in by its name."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.drafters.base import Drafter, DraftView, Outcome, Reading
from eagle_jax.drafters.registry import DrafterSpec, register
from eagle_jax.drafters.tree import ROOT_PARENT, DraftTree, StaticTree


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


def oracle_shape(depth: int, children: int) -> StaticTree:
    """As many nodes and levels as the oracle's trees have, whose parents are its own."""
    paths: list[list[int]] = []
    for d in range(depth):
        paths += [[0] * d + [r] for r in range(children)]
        if children > 1:
            paths.append([0] * d + [1, 0])
    return StaticTree.from_paths(paths)


@dataclasses.dataclass(frozen=True)
class OracleDrafter(Drafter):
    """Proposes a spine of D tokens with K - 1 wrong siblings at every depth, and decoys.

    At each depth a decoy, a child of a wrong sibling, carries the token that would be right one level deeper, so that an
    acceptance which forgets about parents takes it. Behind a spoiled depth the spine goes on with right tokens, for the same
    reason. Node 1 + (K + 1) * d + r is child r of the spine at depth d + 1, and node 1 + (K + 1) * d + K the decoy below it
    (without siblings there is none: a chain has D + 1 nodes). Its memory counts the rounds of each slot.
    """

    script: Script
    vocab_size: int
    num_nodes: int
    max_depth: int

    def init(self, slots: int, capacity: int) -> jax.Array:
        return jnp.zeros((slots,), jnp.int32)

    def prefill(self, memory: jax.Array, reading: Reading) -> jax.Array:
        return memory.at[reading.slot].set(0)

    def observe(self, memory: jax.Array, outcome: Outcome) -> jax.Array:
        return memory + (outcome.emitted > 0)

    def propose(self, memory: jax.Array, view: DraftView) -> tuple[DraftTree, jax.Array]:
        script, depth = self.script, self.script.ranks.shape[2]
        k = 1 if self.num_nodes == depth + 1 else (self.num_nodes - 1) // depth - 1
        batch = view.lengths.shape[0]
        slots, group = jnp.arange(batch), 1 if k == 1 else k + 1
        spoiled = script.spoiled[slots, memory]  # [B]
        ranks = script.ranks[slots, memory]  # [B, D]
        tokens, parents, depths = [view.roots], [jnp.full((batch,), ROOT_PARENT)], [jnp.zeros((batch,), jnp.int32)]
        parent = jnp.zeros((batch,), jnp.int32)
        for d in range(depth):
            at = view.lengths + 1 + d
            right = jnp.take_along_axis(script.texts, at[:, None], axis=1, mode="clip")[:, 0]
            after = jnp.take_along_axis(script.texts, at[:, None] + 1, axis=1, mode="clip")[:, 0]
            base = 1 + group * d
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
        return tree, memory


@register("oracle")
def build(spec: DrafterSpec, target: Any, weights: Any, tree: Any, **options: Any) -> OracleDrafter:
    """The oracle around a `Script`; `oracle_shape` gives the tree."""
    return OracleDrafter(weights, target.config.vocab_size, tree.total_tokens, tree.max_depth)


def with_oracle(plan: Plan, weights: Weights, script: Script, depth: int, children: int) -> tuple[Plan, Weights]:
    """A plain plan and its weights with the oracle as their drafter."""
    plan = dataclasses.replace(plan, drafter=DrafterSpec("oracle"), tree=oracle_shape(depth, children))
    return plan, Weights(weights.target, script)
