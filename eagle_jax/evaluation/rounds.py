"""Rounds one at a time, with their trees: what was drafted, what the target said to it, and what was accepted."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax.decoding.loop import init_state
from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.decoding.prefill import PromptChunk, prefill_chunk
from eagle_jax.decoding.round import decode_round
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.engine.config import EngineConfig
from eagle_jax.engine.programs import Programs
from eagle_jax.entrypoints.prompts import PromptReader
from eagle_jax.evaluation.probe import whole_prompt
from eagle_jax.loading import Draft, Target
from eagle_jax.models.module_def import ModuleDef
from eagle_jax.speculative_config import TreeArgument, default_tree, tree_config

_MULTIPLE = 64
"""Prompts are padded to a multiple of so many tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedRound:
    """One greedy round. Lists have one entry a node; node 0 is the root, and parents come before their children."""

    tokens: list[int]
    """Target ids; the root's is the token that was decided before the round."""
    parents: list[int]
    """Node of each one's parent, -1 for the root."""
    depths: list[int]
    """Distance from the root."""
    scores: list[float]
    """Sum of the head's log-probabilities on the way from the root; 0 for the root."""
    choices: list[int]
    """What the target puts after each node."""
    accepted: list[int]
    """Nodes of the accepted path, the root first: every further one is its parent's choice."""
    bonus: int
    """The target's choice after the last accepted node, which becomes the root of the next round."""
    texts: list[str] | None
    """Each token as text; None without a tokenizer."""
    bonus_text: str | None
    """None without a tokenizer."""

    @property
    def accepted_length(self) -> int:
        """Tokens that the round emits, the bonus included."""
        return len(self.accepted)


def trace_rounds(
    target: Target,
    draft: Draft,
    prompt: Any,
    *,
    rounds: int,
    num_speculative_tokens: int | None = None,
    tree: TreeArgument | None = None,
    chat: bool = False,
) -> list[TracedRound]:
    """Decodes a prompt greedily, and keeps what each round drafted and accepted: the rounds of `speculative_generate`.

    Args:
      target: what `load_target` returned.
      draft: what `load_draft` returned for it.
      prompt: one prompt, in any form that `eagle_jax.generate` takes.
      rounds: how many. Rounds behind the end of the text are left out.
      num_speculative_tokens: as in `speculative_generate`, like the rest.
      tree: a shape of its own; a list of shapes to choose from is not traced.
      chat: whether a text is the message of a user.

    Raises:
      ValueError, TypeError: as `speculative_generate`; `rounds` below 1; several prompts.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"rounds must be an integer of at least 1, got {rounds!r}")
    read = PromptReader(tokenizer=target.tokenizer, vocab_size=target.config.vocab_size, chat=chat).read(prompt)
    if len(read) != 1:
        raise ValueError(f"rounds of one prompt are traced, got {len(read)} prompts")
    shape = tree_config(num_speculative_tokens, tree, where="trace_rounds") or default_tree(draft)
    if not isinstance(shape, TreeConfig | StaticTree):
        raise ValueError(f"a tree of one shape is traced, got {shape}")
    ids = read[0].token_ids
    size = -(-len(ids) // _MULTIPLE) * _MULTIPLE
    room = size + (shape.max_depth + 1) * (rounds + 1)
    config = EngineConfig(tree=shape, max_num_seqs=1, max_model_len=room, prefill_chunk=size)
    plan = Programs(target.model, draft.head, config).plan
    weights = Weights(ModuleDef.split(target.model)[1], ModuleDef.split(draft.head)[1])
    chunk = dataclasses.replace(whole_prompt(plan, ids), stop_ids=_stop_ids(plan, target.config.eos_token_ids))
    state = _begin(plan, weights, chunk)
    traced: list[TracedRound] = []
    while len(traced) < rounds and bool(state.running[0]):
        state, seen = _round(plan, weights, state)
        traced.append(_traced(jax.device_get(seen), target))
    return traced


def _stop_ids(plan: Plan, ids: Sequence[int]) -> np.ndarray:
    padded = np.full((plan.max_stop_ids,), -1, np.int32)
    padded[: len(ids)] = ids
    return padded


@functools.partial(jax.jit, static_argnames="plan")
def _begin(plan: Plan, weights: Weights, chunk: PromptChunk) -> DecodeState:
    target, drafter = plan.modules(weights)
    state = prefill_chunk(target, drafter, init_state(plan, weights), chunk)
    return dataclasses.replace(state, sampling=None)  # greedy rounds


@functools.partial(jax.jit, static_argnames="plan")
def _round(plan: Plan, weights: Weights, state: DecodeState) -> tuple[DecodeState, dict[str, jax.Array]]:
    """`decode_round`, and the arrays of slot 0 on its way."""
    target, drafter = plan.modules(weights)
    state, done = decode_round(target, drafter, state)
    seen = {
        "tokens": done.tree.tokens,
        "parents": done.tree.parents,
        "depths": done.tree.depths,
        "scores": done.tree.scores,
        "choices": done.output.choices,
        "path": done.acceptance.path,
        "counts": done.acceptance.counts,
    }
    return state, {name: value[0] for name, value in seen.items()}


def _traced(seen: dict[str, Any], target: Target) -> TracedRound:
    lists = {name: seen[name].tolist() for name in ("tokens", "parents", "depths", "scores", "choices")}
    accepted = seen["path"][: int(seen["counts"]) + 1].tolist()
    bonus = lists["choices"][accepted[-1]]
    tokenizer = target.tokenizer
    return TracedRound(
        **lists,
        accepted=accepted,
        bonus=bonus,
        texts=None if tokenizer is None else [tokenizer.decode([id_]) for id_ in lists["tokens"]],
        bonus_text=None if tokenizer is None else tokenizer.decode([bonus]),
    )
