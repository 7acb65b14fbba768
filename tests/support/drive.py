"""Runs the decoding programs by hand: prompts into slots, and rounds one at a time with everything they computed."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh

from eagle_jax.decoding.loop import decode, init_state, prefill
from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.decoding.prefill import PromptChunk
from eagle_jax.decoding.report import SlotReport, TokenLogProbs
from eagle_jax.decoding.round import Round, decode_round
from eagle_jax.decoding.state import RUNNING, DecodeState
from eagle_jax.drafters.eagle import EagleDrafter
from eagle_jax.drafters.registry import DrafterSpec
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.engine.config import EngineConfig
from eagle_jax.engine.core import EngineCore
from eagle_jax.engine.outputs import OutputProcessor
from eagle_jax.engine.request import Request
from eagle_jax.models import DraftHead, Eagle3Head, Llama
from eagle_jax.models.module_def import ModuleDef
from eagle_jax.outputs import Delta, RequestOutput
from eagle_jax.sampling import SamplingMode, SamplingParams


def make_plan(target: Llama, head: Eagle3Head | None, tree: TreeConfig | None, **settings: Any) -> tuple[Plan, Weights]:
    """The plan of a configuration and the weights to run it with."""
    target_def, target_state = ModuleDef.split(target)
    if head is None:
        return Plan(target_def=target_def, drafter=None, tree=tree, **settings), Weights(target_state, None)
    head_def, head_state = ModuleDef.split(head)
    spec = DrafterSpec(head.config.method, head_def)
    return Plan(target_def=target_def, drafter=spec, tree=tree, **settings), Weights(target_state, head_state)


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
            generation=np.int32(slot + 1),
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
            state, _ = prefill(plan, weights, state, chunk)
    return state


def run_to_end(plan: Plan, weights: Weights, state: DecodeState) -> tuple[DecodeState, list[SlotReport]]:
    """Decodes until all slots have ended; the state then, and the reports of each slot as one, the first token with them."""
    first = np.take_along_axis(np.asarray(state.tokens), np.asarray(state.prompt_lengths)[:, None], axis=1).tolist()
    steering = np.ones((plan.slots,), bool), np.int32(1000), np.int32(99)
    whole: list[SlotReport] = []
    while not whole or any(slot.finish == RUNNING for slot in whole):
        state, report = decode(plan, weights, state, *steering)
        new = plan.layout.unpack(report)
        before = whole or [dataclasses.replace(new[b], token_ids=first[b], round_lengths=[], drafted=[]) for b in new]
        whole = [
            dataclasses.replace(
                new[b],
                token_ids=before[b].token_ids + new[b].token_ids,
                round_lengths=before[b].round_lengths + new[b].round_lengths,
                drafted=before[b].drafted + new[b].drafted,
            )
            for b in range(plan.slots)
        ]
    return state, whole


@dataclasses.dataclass(frozen=True)
class RecordingDrafter(EagleDrafter):
    """Hands the log-probabilities of every call of `logits` to the host, in order."""

    calls: list[np.ndarray]

    def logits(self, hidden: jax.Array) -> jax.Array:
        out = super().logits(hidden)
        io_callback(lambda x: self.calls.append(np.array(x)), None, jax.nn.log_softmax(out), ordered=True)
        return out


class RoundDriver:
    """Runs single rounds of an EAGLE plan, through the same functions as the loop on the device, and looks inside."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._calls: list[np.ndarray] = []
        self._step = jax.jit(self._trace)

    def _trace(self, weights: Weights, state: DecodeState) -> tuple[DecodeState, Round]:
        target, drafter = self.plan.modules(weights)
        assert isinstance(drafter, EagleDrafter)
        drafter = RecordingDrafter(drafter.head, drafter.target, self._calls, tree=drafter.tree)
        new, done = decode_round(target, drafter, dataclasses.replace(state, sampling=None))  # a greedy one
        return dataclasses.replace(new, sampling=state.sampling), done

    def __call__(self, weights: Weights, state: DecodeState) -> tuple[DecodeState, Round, list[np.ndarray]]:
        """The next state, the round (as numpy arrays), and the draft log-probabilities of each call, `[B, rows, Vd]`."""
        self._calls.clear()
        state, result = self._step(weights, state)
        result = jax.device_get(result)
        jax.effects_barrier()
        return state, result, list(self._calls)


@dataclasses.dataclass(frozen=True)
class Completion:
    """What came out of one request."""

    token_ids: list[int]
    stopped: bool
    """Ended by a stop id; otherwise by the budget, the context or an abort."""
    accepted_lengths: list[int]
    accepted_at_depth: list[int]
    drafted: list[int]
    """Drafted nodes of each round."""
    log_probs: list[TokenLogProbs] = dataclasses.field(compare=False)
    """Of each token, where rounds made any."""


class Recorder(OutputProcessor):
    """Keeps what the devices said about each request beside its output."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.reports: dict[str, list[SlotReport]] = {}

    def add(self, request: Request) -> None:
        self.reports[request.request_id] = []
        super().add(request)

    def process(self, request_id: str, report: SlotReport, **end: bool) -> Delta | None:
        self.reports[request_id].append(report)
        return super().process(request_id, report, **end)


def make_engine(
    target: Llama,
    head: DraftHead | None,
    *,
    slots: int,
    max_length: int,
    mesh: Mesh | None = None,
    costs: Sequence[float] | None = None,
    **settings: Any,
) -> EngineCore:
    """An engine of modules; `settings` are fields of `EngineConfig`, `costs` those of a choice of trees in every mode."""
    config = EngineConfig(max_num_seqs=slots, max_model_len=max_length, **settings)
    engine = EngineCore(target, head, config, outputs=Recorder(None, config.max_depth), mesh=mesh)
    if costs is not None:
        engine.programs.costs.update(dict.fromkeys(SamplingMode, costs))
    return engine


_numbers = itertools.count()


def make_request(
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: SamplingParams | None = None,
    seed: int = 0,
    **fields: Any,
) -> Request:
    """A request with an id of its own, in the engine's terms alone."""
    params = dataclasses.replace(sampling or SamplingParams(max_tokens=None), seed=seed)
    return Request(
        request_id=f"request {next(_numbers)}", prompt_token_ids=prompt, max_new_tokens=max_new_tokens, params=params,
        eos_token_ids=stop_ids, **fields,
    )  # fmt: skip


def steps(engine: EngineCore, requests: Sequence[Request], **fields: Any) -> Iterator[list[Delta]]:
    """Adds requests and steps until all have ended; `fields` replace those of each request, `index` is its place."""
    mode = max(request.mode for request in requests)
    for index, one in enumerate(requests):
        own = {"index": index, "request_id": f"request {next(_numbers)}", "least_mode": mode, **fields}
        engine.add_request(dataclasses.replace(one, **own))
    while engine.has_unfinished_requests:
        if deltas := engine.step():
            yield deltas


def serve(engine: EngineCore, requests: Sequence[Request], **fields: Any) -> list[Completion]:
    """All completions in order; checks on the way that the deltas add up and that the statistics are consistent."""
    pieces: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    completions: dict[int, Completion] = {}
    for deltas in steps(engine, requests, **fields):
        for delta in deltas:
            if delta.error is not None:
                raise delta.error
            assert delta.index not in completions, "a delta behind the last one"
            pieces[delta.index] += delta.token_ids
            if delta.output is not None:
                completions[delta.index] = completed(engine, delta.output)
    for index, completion in completions.items():
        assert pieces[index] == completion.token_ids
        check_statistics(completion)
    return [completions[i] for i in range(len(requests))]


def completed(engine: EngineCore, output: RequestOutput) -> Completion:
    """What `make_engine` recorded of an output that has ended."""
    assert isinstance(engine.outputs, Recorder)
    reports = engine.outputs.reports.pop(output.request_id)
    [completion] = output.outputs
    return Completion(
        token_ids=completion.token_ids,
        stopped=completion.finish_reason == "stop",
        accepted_lengths=output.metrics.accepted_lengths,
        accepted_at_depth=output.metrics.accepted_at_depth,
        drafted=[drafted for report in reports for drafted in report.drafted],
        log_probs=[at for report in reports for at in report.log_probs or ()],
    )


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
