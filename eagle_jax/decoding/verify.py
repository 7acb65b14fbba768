"""Verification: one forward of the target over every node of every slot's tree."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafters.tree import DraftTree, ancestor_mask
from eagle_jax.models.cache import KVRows
from eagle_jax.models.context import CacheContext
from eagle_jax.models.llama import Llama
from eagle_jax.sampling.processing import choose, choose_possible, draw
from pallas_kernels.tree_attention import Implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetOutput:
    """What the target says about a tree."""

    choices: jax.Array
    """The token that the target puts after each node, int32 `[B, N]`: the likeliest, or the one it draws there."""
    aux: jax.Array
    """Auxiliary hidden states of each node, `[B, N, F]`."""
    rows: KVRows
    """Keys and values of each node."""
    ancestors: jax.Array
    """`ancestor_mask` of the tree, bool `[B, N, N]`."""
    logits: jax.Array | None = None
    """As the target gives them, float32 `[B, N, V]`; None in greedy programs. Over shards, the columns of one, as the next."""
    processed: jax.Array | None = None
    """After `process_logits`, float32 `[B, N, V]`; None in greedy programs."""


def verify(
    target: Llama,
    state: DecodeState,
    tree: DraftTree,
    max_depth: int,
    aux_layers: tuple[int, ...],
    *,
    draws: bool = True,
    attention: Implementation | None = None,
) -> TargetOutput:
    """Runs the N nodes behind each slot's committed rows; node n sits at position `lengths + depths[n]`.

    `draws` says whether slots that sample draw a token after every node, by the noise of its position; otherwise their `choices`
    are not read, because the rule of acceptance works on the processed logits. `attention` forces a backend.
    """
    ancestors = ancestor_mask(tree.parents, max_depth)
    context = CacheContext(
        positions=state.lengths[:, None] + tree.depths,
        cache=state.target_cache,
        lengths=state.lengths,
        tail_mask=ancestors,
        implementation=attention,
    )
    out = target(tree.tokens, context, aux_layers=aux_layers, prompt_lengths=state.prompt_lengths)
    with jax.named_scope("lm_head"):
        logits = target.logits(out.hidden)
    if state.sampling is None:
        return TargetOutput(choose(logits, target.vocabulary), out.aux, out.rows, ancestors)
    after = state.lengths[:, None] + 1 + tree.depths  # number of tokens up to each node, and place of the next one
    processed = state.sampling.process(
        logits,
        tokens=tree.tokens,
        ancestors=ancestors,
        output_lengths=after - state.prompt_lengths[:, None],
        stop_ids=state.stop_ids,
    )
    if not draws:
        choices = choose_possible(processed, target.vocabulary)
    else:
        # Nodes of one depth share a position, and so their noise.
        steps = jnp.arange(max_depth + 1, dtype=jnp.int32)
        noise = state.sampling.target_noise(state.lengths[:, None] + 1 + steps)  # [B, D + 1, V]
        if tree.tokens.shape[1] != max_depth + 1:  # a tree, not a chain
            noise = jnp.take_along_axis(noise, tree.depths[..., None], axis=1)
        choices = draw(processed, noise, state.sampling.settings, target.vocabulary)
    return TargetOutput(choices, out.aux, out.rows, ancestors, logits, processed)
