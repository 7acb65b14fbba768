"""Verification: one forward of the target over every node of every slot's tree."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle_jax.decoding.state import DecodeState
from eagle_jax.decoding.tree import DraftTree, ancestor_mask
from eagle_jax.models.cache import KVRows
from eagle_jax.models.llama import Llama


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetOutput:
    """What the target says about a tree."""

    choices: jax.Array
    """The token that the target puts after each node, int32 `[B, N]`."""
    features: jax.Array
    """Captured features of each node, `[B, N, F]`."""
    rows: KVRows
    """Keys and values of each node."""
    ancestors: jax.Array
    """`ancestor_mask` of the tree, bool `[B, N, N]`."""


def choose(logits: jax.Array) -> jax.Array:
    """The greedy token of each row: int32 `[...]` from float32 logits `[..., V]`, ties to the lowest id."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def verify(
    target: Llama, state: DecodeState, tree: DraftTree, max_depth: int, capture_layers: tuple[int, ...]
) -> TargetOutput:
    """Runs the N nodes behind each slot's committed rows; node n sits at position `lengths + depths[n]`."""
    ancestors = ancestor_mask(tree.parents, max_depth)
    out = target(
        tree.tokens,
        state.lengths[:, None] + tree.depths,
        state.target_cache,
        state.lengths,
        tail_mask=ancestors,
        capture_layers=capture_layers,
        prompt_lengths=state.prompt_lengths,
    )
    with jax.named_scope("lm_head"):
        choices = choose(target.logits(out.hidden))
    return TargetOutput(choices, out.features, out.rows, ancestors)
