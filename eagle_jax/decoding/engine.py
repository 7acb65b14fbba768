"""The host side of decoding: requests into slots, dispatches, and what came out of them."""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from eagle_jax.decoding.loop import Plan, Weights, decode, init_state, prefill
from eagle_jax.decoding.prefill import PromptChunk
from eagle_jax.decoding.state import RUNNING, STOPPED, DecodeState, Report
from eagle_jax.decoding.tree import StaticTree, TreeConfig
from eagle_jax.models.heads import DraftHead
from eagle_jax.models.llama import Llama
from eagle_jax.models.matmul import CPU_COMPILER_OPTIONS

_UNBOUNDED = np.int32(2**31 - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued. Checked by whoever builds it; the engine checks only what it relies on."""

    prompt: Sequence[int]
    """Token ids, at least one."""
    max_new_tokens: int
    """At least 1; the sequence also ends at the engine's `max_length`."""
    stop_ids: Sequence[int] = ()
    """Ids that end the output; the id itself is part of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The output of one request."""

    token_ids: list[int]
    stopped: bool
    """Ended by a stop id; otherwise by the budget, the context, or `Engine.abort`."""
    accepted_lengths: list[int]
    """Tokens emitted by each round, bonus included, after cutting; the first token of the output belongs to no round."""
    accepted_at_depth: list[int]
    """Rounds whose draft at depth d + 1 was accepted, before cutting; one entry a depth."""
    drafted_per_round: int
    """Drafted nodes of a round: N - 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """What one dispatch added to one request."""

    index: int
    """Place of the request in the sequence given to `Engine.serve`."""
    token_ids: list[int]
    """New tokens."""
    completion: Completion | None
    """Given with the last update of a request."""


@dataclasses.dataclass(frozen=True)
class _Programs:
    init: Callable[..., DecodeState]
    prefill: Callable[..., DecodeState]
    decode: Callable[..., tuple[DecodeState, Report]]
    compile_seconds: float
    temporary_bytes: int


_compiled: dict[Any, _Programs] = {}


def _temporary_bytes(program: jax.stages.Compiled) -> int:
    analysis = program.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


class Engine:
    """Decodes any number of requests in a fixed number of slots.

    Three programs do everything: make a state, prefill a chunk, decode rounds. They are compiled by `compile` (or the first
    request) and shared by all engines of the process with an equal `Plan` and weights of the same shapes and placement.

    Args:
      target: the target model.
      head: the draft head, or None for plain decoding.
      tree: shape of the draft trees; None exactly when there is no head.
      slots: sequences decoded side by side.
      max_length: tokens of the longest sequence, prompt and output together.
      prefill_chunk: prompt tokens run at once.
      max_stop_ids: stop ids that a request can have.
    """

    def __init__(
        self,
        target: Llama,
        head: DraftHead | None,
        *,
        tree: TreeConfig | StaticTree | None,
        slots: int,
        max_length: int,
        prefill_chunk: int,
        max_stop_ids: int = 8,
    ):
        if (head is None) != (tree is None):
            raise ValueError("head and tree go together: give both to speculate, neither to decode plainly")
        for name, value in (("slots", slots), ("max_length", max_length), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if head is not None and tree is not None and tree.top_k > head.config.draft_vocab_size:
            raise ValueError(f"tree top_k {tree.top_k} exceeds the head's vocabulary of {head.config.draft_vocab_size}")
        target_def, target_state = nnx.split(target)
        head_def, head_state = (None, None) if head is None else nnx.split(head)
        self.plan = Plan(
            target_def=target_def,
            head_def=head_def,
            tree=tree,
            slots=slots,
            max_length=max_length,
            prefill_chunk=prefill_chunk,
            max_stop_ids=max_stop_ids,
        )
        self._weights = Weights(target_state, head_state)
        self._programs: _Programs | None = None
        self._state: DecodeState | None = None
        self._aborted: set[int] = set()
        self._serving = False

    def compile(self) -> float:
        """Compiles the programs unless that was done before; returns the seconds it took when it was done."""
        if self._programs is None:
            shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), self._weights)
            leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
            key = (self.plan, structure, tuple(leaves), jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
            if key not in _compiled:
                _compiled[key] = self._compile()
            self._programs = _compiled[key]
        return self._programs.compile_seconds

    def _compile(self) -> _Programs:
        start = time.perf_counter()
        platform = jax.tree.leaves(self._weights)[0].sharding.device_set.copy().pop().platform
        options = CPU_COMPILER_OPTIONS if platform == "cpu" else None
        init = init_state.lower(self.plan, self._weights).compile()
        state = jax.eval_shape(init_state, self.plan, self._weights)
        chunk = self._chunk((0,), 0, 0, 2, ())
        first = prefill.lower(self.plan, self._weights, state, chunk).compile(options)
        rounds = decode.lower(
            self.plan, self._weights, state, np.ones((self.plan.slots,), bool), np.int32(1), np.bool_(False)
        ).compile(options)
        return _Programs(
            init=init,
            prefill=first,
            decode=rounds,
            compile_seconds=time.perf_counter() - start,
            temporary_bytes=max(_temporary_bytes(p) for p in (first, rounds)),
        )

    @property
    def temporary_bytes(self) -> int:
        """Device memory of the largest program's temporaries, in bytes."""
        self.compile()
        assert self._programs is not None
        return self._programs.temporary_bytes

    def abort(self, index: int) -> None:
        """Ends a request of the running `serve` after the dispatch in flight; its completion holds what was emitted so far."""
        self._aborted.add(index)

    def serve(self, requests: Sequence[Request], *, rounds_per_dispatch: int | None = None) -> Iterator[list[Update]]:
        """Decodes requests, and yields after each dispatch what it added.

        A slot whose request has ended takes the next one. With `rounds_per_dispatch` a dispatch ends after so many rounds at
        the latest and the next one is launched before its tokens are read, which is what streaming wants; without it a dispatch
        ends when a slot must be refilled or everything is done.

        Raises:
          ValueError: a request that does not fit, before anything is run.
          RuntimeError: the engine is still serving another call.
        """
        if self._serving:
            raise RuntimeError("this engine is still serving: exhaust or close the iterator of the earlier call first")
        for index, request in enumerate(requests):
            self._check(index, request)
        self._aborted = set()
        return self._serve(requests, rounds_per_dispatch)

    def _check(self, index: int, request: Request) -> None:
        if not len(request.prompt):
            raise ValueError(f"prompt {index} is empty")
        if len(request.prompt) >= self.plan.max_length:
            raise ValueError(
                f"prompt {index} has {len(request.prompt)} tokens, which leaves no room for output in {self.plan.max_length}"
            )
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens of prompt {index} must be at least 1, got {request.max_new_tokens}")
        if len(request.stop_ids) > self.plan.max_stop_ids:
            raise ValueError(
                f"prompt {index} has {len(request.stop_ids)} stop ids; at most {self.plan.max_stop_ids} are possible"
            )

    def _serve(self, requests: Sequence[Request], rounds_per_dispatch: int | None) -> Iterator[list[Update]]:
        if self._serving:
            raise RuntimeError("this engine is still serving: exhaust or close the iterator of the earlier call first")
        self._serving = True
        try:
            yield from self._dispatches(requests, rounds_per_dispatch)
        except GeneratorExit:
            raise
        except BaseException:
            self._state = None  # the program that failed may have consumed it
            raise
        finally:
            self._serving = False

    def _dispatches(self, requests: Sequence[Request], rounds_per_dispatch: int | None) -> Iterator[list[Update]]:
        self.compile()
        programs, weights = self._programs, self._weights
        assert programs is not None
        # A state left by a request that was not finished serves as well as a new one: prefill resets a slot completely.
        state = self._state if self._state is not None else programs.init(weights)
        self._state = None
        waiting = collections.deque(enumerate(requests))
        running: dict[int, _Slot] = {}
        limit = _UNBOUNDED if rounds_per_dispatch is None else np.int32(rounds_per_dispatch)
        in_flight: tuple[Report, dict[int, _Slot]] | None = None
        while running or waiting or in_flight:
            for slot in range(self.plan.slots):
                if waiting and slot not in running:
                    index, request = waiting.popleft()
                    for chunk in self._chunks(slot, request):
                        state = programs.prefill(weights, state, chunk)
                    running[slot] = _Slot(index, request)
            launched = None
            if running:
                active = np.isin(np.arange(self.plan.slots), list(running))
                state, report = programs.decode(weights, state, active, limit, np.bool_(bool(waiting)))
                launched = (report, dict(running))
            self._state = state
            if rounds_per_dispatch is None:
                read, in_flight = launched, None
            else:
                read, in_flight = in_flight, launched
            if read is None:
                continue
            updates = self._read(*read)
            for slot, entry in read[1].items():
                # By the time a report is read its slot may already belong to the next request.
                if entry.done and running.get(slot) is entry:
                    del running[slot]
            if updates:
                yield updates

    def _read(self, report: Report, slots: dict[int, "_Slot"]) -> list[Update]:
        host = jax.device_get(report)
        updates = []
        for slot, entry in slots.items():
            if entry.done:
                continue
            prompt = len(entry.request.prompt)
            output = host.tokens[slot, prompt : host.lengths[slot] + 1].tolist()
            entry.done = host.finish[slot] != RUNNING or entry.index in self._aborted
            new = output[entry.emitted :]
            entry.emitted = len(output)
            completion = None
            if entry.done:
                completion = Completion(
                    token_ids=output,
                    stopped=bool(host.finish[slot] == STOPPED),
                    accepted_lengths=host.accepted_lengths[slot, : host.rounds[slot]].tolist(),
                    accepted_at_depth=host.accepted_at_depth[slot].tolist(),
                    drafted_per_round=0 if self.plan.tree is None else self.plan.tree.total_tokens - 1,
                )
            if new or completion:
                updates.append(Update(index=entry.index, token_ids=new, completion=completion))
        return updates

    def _chunks(self, slot: int, request: Request) -> Iterator[PromptChunk]:
        for start in range(0, len(request.prompt), self.plan.prefill_chunk):
            yield self._chunk(request.prompt, slot, start, request.max_new_tokens, request.stop_ids)

    def _chunk(
        self, prompt: Sequence[int], slot: int, start: int, max_new_tokens: int, stop_ids: Sequence[int]
    ) -> PromptChunk:
        size = self.plan.prefill_chunk
        part = prompt[start : start + size + 1]
        tokens = np.zeros((size + 1,), np.int32)
        tokens[: len(part)] = part
        stops = np.full((self.plan.max_stop_ids,), -1, np.int32)
        stops[: len(stop_ids)] = stop_ids
        return PromptChunk(
            slot=np.int32(slot),
            tokens=tokens,
            start=np.int32(start),
            valid=np.int32(min(size, len(prompt) - start)),
            prompt_length=np.int32(len(prompt)),
            limit=np.int32(min(len(prompt) + max_new_tokens, self.plan.max_length)),
            stop_ids=stops,
        )


@dataclasses.dataclass
class _Slot:
    """A request in its slot, as the host sees it."""

    index: int
    request: Request
    emitted: int = 0
    done: bool = False
