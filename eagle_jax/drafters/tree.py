"""Draft trees: the static shape of a tree, its nodes for a batch, and the masks that follow from its parents."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

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


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A tree of the same shape every round, as EAGLE-1 uses it.

    Each drafted node is the path of child ranks that leads to it from the root: `(0,)` is the head's best next token, `(2, 0)`
    the best token after its third best. Paths may come in any order; they are kept level by level.
    """

    paths: tuple[tuple[int, ...], ...]
    """Paths of all drafted nodes; every path's beginning is there too."""

    @staticmethod
    def from_paths(paths: Sequence[Sequence[int]]) -> "StaticTree":
        """Checks and orders paths.

        Raises:
          ValueError: no path, an empty or repeated one, a rank that is no integer of at least 0, or a path without its parent.
        """
        given = [tuple(path) for path in paths]
        if not given or not all(given):
            raise ValueError("tree paths must name at least one node, and the root's empty path is not among them")
        for path in given:
            if not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in path):
                raise ValueError(f"tree path {path} must hold integers of at least 0")
            if len(path) > 1 and path[:-1] not in given:
                raise ValueError(f"tree path {path} has no parent: {path[:-1]} is missing")
        if len(set(given)) != len(given):
            raise ValueError("tree paths must differ from each other")
        return StaticTree(tuple(sorted(given, key=lambda path: (len(path), path))))

    @property
    def total_tokens(self) -> int:
        """Nodes, the root included: N."""
        return len(self.paths) + 1

    @property
    def max_depth(self) -> int:
        """Most drafted tokens that one round can accept: D."""
        return len(self.paths[-1])

    @property
    def top_k(self) -> int:
        """Most guesses read after one node."""
        return int(self.ranks.max()) + 1

    @functools.cached_property
    def parents(self) -> np.ndarray:
        """Node index of each node's parent, int32 `[N]`; `ROOT_PARENT` for the root."""
        index = {(): 0} | {path: i + 1 for i, path in enumerate(self.paths)}
        return np.array([ROOT_PARENT] + [index[path[:-1]] for path in self.paths], np.int32)

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """int32 `[N]`."""
        return np.array([0] + [len(path) for path in self.paths], np.int32)

    @functools.cached_property
    def ranks(self) -> np.ndarray:
        """Rank of each node among its parent's guesses, int32 `[N]`; 0 for the root."""
        return np.array([0] + [path[-1] for path in self.paths], np.int32)


NAMED_TREES = {
    # The 25-node tree of the first EAGLE release, by the name that its code gives it.
    "mc_sim_7b_63": StaticTree.from_paths([
        [0], [1], [2], [3],
        [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0],
        [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0],
        [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2],
        [0, 0, 0, 0, 0], [0, 0, 0, 0, 1],
    ]),
    "chain_5": StaticTree.from_paths([[0] * depth for depth in range(1, 6)]),
}  # fmt: skip
"""Static trees that the field knows by name."""


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
    probabilities: jax.Array | None = None
    """What each node's children were drawn from, over target ids, float32 `[B, N, V]`; zeros for leaves. None unless sampled."""
    shape: StaticTree | None = dataclasses.field(default=None, metadata={"static": True})
    """The static tree that this is an instance of, where children are sampled."""

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

    @staticmethod
    def with_root(
        roots: jax.Array, *, tokens: jax.Array, parents: jax.Array, depths: jax.Array, scores: jax.Array
    ) -> "DraftTree":
        """Puts the root int32 `[B]` before drafted nodes `[B, N - 1]`, whose parents count the root as 0."""
        root = DraftTree.only_root(roots)

        def join(first: jax.Array, rest: jax.Array) -> jax.Array:
            return jnp.concatenate([first, rest.astype(first.dtype)], axis=1)

        return jax.tree.map(join, root, DraftTree(tokens, parents, depths, scores))


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
