"""What a head drafts behind a text, with log-probabilities: faults too small to move the acceptance are seen here."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from eagle_jax.decoding.loop import init_state
from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.decoding.prefill import PromptChunk, prefill_chunk
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.engine.config import EngineConfig
from eagle_jax.engine.programs import Programs
from eagle_jax.loading import Draft, Target
from eagle_jax.models.module_def import ModuleDef

_MULTIPLE = 64
"""Texts are padded to a multiple of so many tokens."""


@dataclasses.dataclass(frozen=True)
class DraftedChain:
    """What a round drafts behind the beginning of a text."""

    length: int
    """Tokens of the beginning; the root behind them is the target's greedy choice."""
    tokens: list[int]
    """Target ids, the first behind the root."""
    log_probs: list[float]
    """Of the beginnings of the chain: sums of the draft log-probabilities up to each token."""


def draft_chains(
    target: Target, draft: Draft, text: Sequence[int], lengths: Sequence[int], num_speculative_tokens: int
) -> list[DraftedChain]:
    """Reads beginnings of a text, and reports which chain is drafted behind each, by the programs' own prefill and drafter.

    The first token is drafted from the target's features, every one behind it from the head's own output.

    Args:
      target: the target.
      draft: the head.
      text: token ids.
      lengths: how much of it is read, each at least 1.
      num_speculative_tokens: K, tokens of a chain.
    """
    size = -(-len(text) // _MULTIPLE) * _MULTIPLE
    tree = TreeConfig.chain(num_speculative_tokens)
    room = size + num_speculative_tokens + 2
    config = EngineConfig(tree=tree, max_num_seqs=1, max_model_len=room, prefill_chunk=size)
    plan = Programs(target.model, draft.head, config).plan
    weights = Weights(ModuleDef.split(target.model)[1], ModuleDef.split(draft.head)[1])
    found = []
    for length in lengths:
        tokens, scores = jax.device_get(_draft(plan, weights, whole_prompt(plan, text[:length])))
        found.append(DraftedChain(length=length, tokens=tokens[0, 1:].tolist(), log_probs=scores[0, 1:].tolist()))
    return found


def whole_prompt(plan: Plan, text: Sequence[int]) -> PromptChunk:
    """A prompt as the only chunk of slot 0, in a plan whose chunks are long enough."""
    tokens = np.zeros((plan.prefill_chunk + 1,), np.int32)
    tokens[: len(text)] = text
    return PromptChunk(
        slot=np.int32(0),
        generation=np.int32(0),
        tokens=tokens,
        start=np.int32(0),
        valid=np.int32(len(text)),
        prompt_length=np.int32(len(text)),
        limit=np.int32(plan.max_length),
        stop_ids=np.full((plan.max_stop_ids,), -1, np.int32),
        sampling=None,
        accept_limit=None,
    )


@functools.partial(jax.jit, static_argnames="plan")
def _draft(plan: Plan, weights: Weights, chunk: PromptChunk) -> tuple[jax.Array, jax.Array]:
    """Tokens and scores of the tree of the first round."""
    target, drafter = plan.modules(weights)
    state = prefill_chunk(target, drafter, init_state(plan, weights), chunk)
    tree, _ = drafter.propose(state.draft, dataclasses.replace(state, sampling=None).view)  # greedily
    return tree.tokens, tree.scores
