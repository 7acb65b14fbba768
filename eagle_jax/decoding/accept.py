"""Acceptance: the longest path of each tree that the target would have written itself."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle_jax.decoding.verify import TargetOutput
from eagle_jax.drafters.tree import DraftTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The accepted path of each slot."""

    counts: jax.Array
    """Accepted drafts a, int32 `[B]`, 0..D."""
    path: jax.Array
    """Nodes of the path from the root on, int32 `[B, D + 1]`; node 0 beyond the `counts + 1` valid ones."""
    tokens: jax.Array
    """Tokens to emit: the accepted drafts, then the bonus token; int32 `[B, D + 1]`, of which `counts + 1` are valid."""

    def limited(self, limits: jax.Array) -> "Acceptance":
        """Accepts at most `limits` int32 `[B]` drafts; the next accepted one, if there is one, is then the bonus token."""
        return dataclasses.replace(self, counts=jnp.minimum(self.counts, limits))

    @staticmethod
    def up_to(leaf: jax.Array, bonus: jax.Array, tree: DraftTree, ancestors: jax.Array, max_depth: int) -> "Acceptance":
        """Accepts the path that ends at node `leaf` int32 `[B]`, followed by the token `bonus` int32 `[B]`."""
        counts = jnp.take_along_axis(tree.depths, leaf[:, None], axis=1)[:, 0]
        on_path = jnp.take_along_axis(ancestors, leaf[:, None, None], axis=1)[:, 0]  # [B, N]
        steps = jnp.arange(max_depth + 1, dtype=jnp.int32)
        here = on_path[:, None] & (tree.depths[:, None] == steps[:, None])  # [B, D + 1, N], at most one node a step
        path = jnp.argmax(here, axis=-1).astype(jnp.int32)
        drafts = jnp.take_along_axis(tree.tokens, jnp.roll(path, -1, axis=1), axis=1)
        return Acceptance(counts=counts, path=path, tokens=jnp.where(steps < counts[:, None], drafts, bonus[:, None]))


def accept(tree: DraftTree, output: TargetOutput, max_depth: int) -> Acceptance:
    """Accepts a node when the target's choice after its parent is its token, and its parent is accepted.

    Equal siblings may occur in trees given by hand; of several deepest paths the one with the lowest node index is taken.
    """
    parents = jnp.maximum(tree.parents, 0)
    agrees = tree.tokens == jnp.take_along_axis(output.choices, parents, axis=1)
    agrees = agrees.at[:, 0].set(True)  # the root is already decided
    accepted = jnp.all(agrees[:, None] | ~output.ancestors, axis=-1)  # [B, N]: the whole path agrees
    depths = jnp.where(accepted, tree.depths, -1)
    leaf = jnp.argmax(depths, axis=1)
    bonus = jnp.take_along_axis(output.choices, leaf[:, None], axis=1)[:, 0]
    return Acceptance.up_to(leaf, bonus, tree, output.ancestors, max_depth)
