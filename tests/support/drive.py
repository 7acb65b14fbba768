"""Runs the decoding programs by hand: prompts into slots, and rounds one at a time with everything they computed."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import io_callback

from eagle_jax.decoding.accept import Acceptance, accept
from eagle_jax.decoding.commit import commit
from eagle_jax.decoding.eagle_drafter import EagleDrafter
from eagle_jax.decoding.engine import Completion, Engine, Request
from eagle_jax.decoding.loop import Plan, Weights, init_state, prefill
from eagle_jax.decoding.prefill import PromptChunk
from eagle_jax.decoding.state import DecodeState, DraftState
from eagle_jax.decoding.tree import DraftTree, TreeConfig
from eagle_jax.decoding.verify import TargetOutput, verify
from eagle_jax.models import Eagle3Head, Llama


def make_plan(target: Llama, head: Eagle3Head | None, tree: TreeConfig | None, **settings: Any) -> tuple[Plan, Weights]:
    """The plan of a configuration and the weights to run it with."""
    target_def, target_state = nnx.split(target)
    head_def, head_state = (None, None) if head is None else nnx.split(head)
    return Plan(target_def=target_def, head_def=head_def, tree=tree, **settings), Weights(target_state, head_state)


def prompt_chunks(
    plan: Plan, slot: int, prompt: Sequence[int], limit: int, stop_ids: Sequence[int] = ()
) -> Iterator[PromptChunk]:
    """The chunks of one prompt; what lies beyond it is filled with a token that occurs in no prompt."""
    size = plan.prefill_chunk
    for start in range(0, len(prompt), size):
        tokens = np.full((size + 1,), 1, np.int32)
        part = prompt[start : start + size + 1]
        tokens[: len(part)] = part
        stops = np.full((plan.max_stop_ids,), -1, np.int32)
        stops[: len(stop_ids)] = stop_ids
        yield PromptChunk(
            slot=np.int32(slot),
            tokens=tokens,
            start=np.int32(start),
            valid=np.int32(min(size, len(prompt) - start)),
            prompt_length=np.int32(len(prompt)),
            limit=np.int32(limit),
            stop_ids=stops,
            sampling=None,
            accept_limit=None,
        )


def prefill_slots(
    plan: Plan,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop_ids: Sequence[Sequence[int]] | None = None,
) -> DecodeState:
    """A state with one prompt in each of the first slots."""
    state = init_state(plan, weights)
    for slot, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        for chunk in prompt_chunks(plan, slot, prompt, limit, stop_ids[slot] if stop_ids else ()):
            state = prefill(plan, weights, state, chunk)
    return state


@dataclasses.dataclass(frozen=True)
class RecordingDrafter(EagleDrafter):
    """Hands the log-probabilities of every call of `logits` to the host, in order."""

    calls: list[np.ndarray]

    def logits(self, hidden: jax.Array) -> jax.Array:
        out = super().logits(hidden)
        io_callback(lambda x: self.calls.append(np.array(x)), None, jax.nn.log_softmax(out), ordered=True)
        return out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Round:
    """What one round computed."""

    tree: DraftTree
    output: TargetOutput
    acceptance: Acceptance
    draft: DraftState
    """The drafter's memory behind the extend step."""


class RoundDriver:
    """Runs single rounds of an EAGLE plan, through the same functions as the loop on the device, and looks inside."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._calls: list[np.ndarray] = []
        self._step = jax.jit(self._trace)

    def _trace(self, weights: Weights, state: DecodeState) -> tuple[DecodeState, Round]:
        target, drafter = self.plan.modules(weights)
        assert isinstance(drafter, EagleDrafter)
        drafter = RecordingDrafter(drafter.head, drafter.target, drafter.tree, self._calls)
        tree, draft = drafter.propose(state)
        output = verify(target, state, tree, drafter.max_depth, drafter.capture_layers)
        acceptance = accept(tree, output, drafter.max_depth)
        return commit(state, draft, output, acceptance), Round(tree, output, acceptance, draft)

    def __call__(self, weights: Weights, state: DecodeState) -> tuple[DecodeState, Round, list[np.ndarray]]:
        """The next state, the round (as numpy arrays), and the draft log-probabilities of each call, `[B, rows, Vd]`."""
        self._calls.clear()
        state, result = self._step(weights, state)
        result = jax.device_get(result)
        jax.effects_barrier()
        return state, result, list(self._calls)


def serve(engine: Engine, requests: Sequence[Request], **options: Any) -> list[Completion]:
    """All completions in order; checks on the way that the updates add up and that the statistics are consistent."""
    pieces: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    completions: dict[int, Completion] = {}
    for updates in engine.serve(requests, **options):
        for update in updates:
            assert update.index not in completions, "an update behind the last one"
            pieces[update.index] += update.token_ids
            if update.completion is not None:
                completions[update.index] = update.completion
    for index, completion in completions.items():
        assert pieces[index] == completion.token_ids
        check_statistics(completion)
    return [completions[i] for i in range(len(requests))]


def check_statistics(completion: Completion) -> None:
    """The identities between tokens, rounds and acceptance that hold for every completion."""
    lengths, at_depth = completion.accepted_lengths, completion.accepted_at_depth
    assert sum(lengths) + 1 == len(completion.token_ids)
    assert all(1 <= n <= len(at_depth) + 1 for n in lengths)
    assert at_depth == sorted(at_depth, reverse=True), "a deeper draft cannot be accepted more often"
    assert all(n <= len(lengths) for n in at_depth)
    # Depths are counted before the cut, and only the last round can be cut.
    for depth, count in enumerate(at_depth, start=1):
        full = sum(n > depth for n in lengths[:-1])
        last = lengths[-1] > depth if lengths else False
        assert full + last <= count <= full + bool(lengths)
