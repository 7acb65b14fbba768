"""Draft trees: the static shape of a tree, its nodes for a batch, and the masks that follow from its parents."""

import dataclasses

import jax
import jax.numpy as jnp

ROOT_PARENT = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """Size of a dynamic draft tree, in the meaning of the EAGLE-2/3 reference; a chain is the tree with `top_k` 1.

    The root is the pending token, already decided. The head's `top_k` best next tokens are its children (depth 1). Then `depth`
    times the `top_k` best nodes of the deepest level are expanded by `top_k` children each, and at last the `total_tokens - 1`
    best of all nodes are kept. A node's score is the sum of its path's log-probabilities.

    Worked example, `total_tokens=4, depth=1, top_k=2`: the root's children a, b (depth 1) are expanded into aa, ab, ba, bb
    (depth 2); of these six the three with the best scores stay, say a, b, aa. The tree has 4 nodes with the root, and up to
    2 = depth + 1 drafted tokens can be accepted in a round.
    """

    total_tokens: int
    """Nodes of the tree, the root included: N."""
    depth: int
    """Expansions after the first level: the deepest drafted node is at depth + 1."""
    top_k: int
    """Nodes expanded in each level, and children of each: K."""

    def __post_init__(self) -> None:
        for name, least in (("total_tokens", 2), ("depth", 0), ("top_k", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"tree {name} must be an integer of at least {least}, got {value!r}")
        if self.total_tokens - 1 > self.pool_size:
            raise ValueError(
                f"tree total_tokens {self.total_tokens} (the root included) exceeds the {self.pool_size + 1} nodes that depth "
                f"{self.depth} and top_k {self.top_k} can reach (1 + top_k + depth * top_k^2)"
            )

    @staticmethod
    def chain(num_speculative_tokens: int) -> "TreeConfig":
        """The chain that drafts `num_speculative_tokens` tokens."""
        if not isinstance(num_speculative_tokens, int) or isinstance(num_speculative_tokens, bool):
            raise ValueError(f"num_speculative_tokens must be an integer, got {num_speculative_tokens!r}")
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, got {num_speculative_tokens}")
        return TreeConfig(total_tokens=num_speculative_tokens + 1, depth=num_speculative_tokens - 1, top_k=1)

    @property
    def pool_size(self) -> int:
        """Nodes scored, of which `total_tokens - 1` are kept."""
        return self.top_k + self.depth * self.top_k**2

    @property
    def max_depth(self) -> int:
        """Most drafted tokens that one round can accept: D."""
        return min(self.depth + 1, self.total_tokens - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Proposed tokens of every slot as a tree. Node 0 is the root; parents come before their children."""

    tokens: jax.Array
    """Target ids, int32 `[B, N]`."""
    parents: jax.Array
    """Node index of the parent, `ROOT_PARENT` for the root, int32 `[B, N]`."""
    depths: jax.Array
    """Distance from the root, int32 `[B, N]`."""
    scores: jax.Array
    """Sum of the draft log-probabilities from the root, float32 `[B, N]`; 0 for the root."""

    @staticmethod
    def only_root(tokens: jax.Array) -> "DraftTree":
        """The tree of plain decoding: one node a slot, from root tokens int32 `[B]`."""
        root = tokens[:, None]
        return DraftTree(
            tokens=root,
            parents=jnp.full_like(root, ROOT_PARENT),
            depths=jnp.zeros_like(root),
            scores=jnp.zeros(root.shape, jnp.float32),
        )


def ancestor_mask(parents: jax.Array, max_depth: int) -> jax.Array:
    """Which nodes lie on the path from the root to each node, itself included: bool `[B, N, N]`, `[b, node, ancestor]`.

    Args:
      parents: int32 `[B, N]`, as in `DraftTree`.
      max_depth: depth of the deepest node at most.
    """
    nodes = jnp.arange(parents.shape[1], dtype=jnp.int32)
    mask = jnp.broadcast_to(nodes[:, None] == nodes, (*parents.shape, nodes.size))
    above = parents
    for _ in range(max_depth):
        mask = mask | (above[..., None] == nodes)
        above = jnp.where(above < 0, above, jnp.take_along_axis(parents, jnp.maximum(above, 0), axis=1))
    return mask
