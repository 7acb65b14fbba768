"""A round: draft, verify, accept, commit, and what the drafter learns of it."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle_jax.decoding.accept import Acceptance
from eagle_jax.decoding.commit import commit
from eagle_jax.decoding.rejection import accept_by
from eagle_jax.decoding.rules import SEEDED, Rule
from eagle_jax.decoding.state import DecodeState
from eagle_jax.decoding.verify import TargetOutput, verify
from eagle_jax.drafters.base import Drafter, Memory, Outcome
from eagle_jax.drafters.tree import DraftTree
from eagle_jax.models.llama import Llama
from eagle_jax.parallel.collectives import from_first_shard


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Round:
    """What one round computed."""

    tree: DraftTree
    output: TargetOutput
    acceptance: Acceptance
    memory: Memory
    """The drafter's, after its proposal."""


def decode_round(
    target: Llama, drafter: Drafter, state: DecodeState, rule: Rule = SEEDED, shape: int = 0
) -> tuple[DecodeState, Round]:
    """One round for every running slot.

    In shape-invariant programs attention sums in an order that belongs to positions, and a slot can be kept from accepting: with
    a limit of 0 the program decodes plainly.

    Args:
      target: the target.
      drafter: what drafts.
      state: the slots; `sampling` is the part that the rounds' mode sees.
      rule: how drafts are accepted.
      shape: place of the drafter among several candidates.

    Returns:
      The new state, and what was computed on the way: whoever does not look at it does not pay for it.
    """
    with jax.named_scope("draft"):
        tree, memory = drafter.propose(state.draft, state.view)
        if drafter.num_nodes > 1:
            tokens, parents, depths = from_first_shard((tree.tokens, tree.parents, tree.depths), target.shards)
            tree = dataclasses.replace(tree, tokens=tokens, parents=parents, depths=depths)
    with jax.named_scope("verify"):
        output = verify(
            target,
            state,
            tree,
            drafter.max_depth,
            drafter.aux_layers,
            draws=rule.exact_match,
            attention=None if state.accept_limits is None else "xla_positioned",
        )
    with jax.named_scope("accept"):
        acceptance = accept_by(rule, tree, output, state, drafter.max_depth)
        if not rule.exact_match:
            acceptance = from_first_shard(acceptance, target.shards)
        if state.accept_limits is not None:
            acceptance = acceptance.limited(state.accept_limits)
    with jax.named_scope("commit"):
        new = commit(state, output, acceptance, shape)
        outcome = Outcome(
            lengths=state.lengths,
            emitted=new.lengths - state.lengths,
            tokens=acceptance.tokens,
            states=jnp.take_along_axis(output.aux, acceptance.path[..., None], axis=1),  # [B, D + 1, F]
        )
        new = dataclasses.replace(new, draft=drafter.observe(memory, outcome))
    return new, Round(tree, output, acceptance, memory)
