"""`EngineCore`: requests are added and aborted at any time, and each `step` brings what the devices added to their outputs."""

import collections
import dataclasses
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from eagle_jax.decoding.report import Report, SlotReport
from eagle_jax.decoding.state import RUNNING, STOPPED, DecodeState
from eagle_jax.engine.config import EngineConfig
from eagle_jax.engine.outputs import OutputProcessor
from eagle_jax.engine.programs import Programs
from eagle_jax.engine.request import Request
from eagle_jax.engine.scheduler import Running, Schedule, Scheduler
from eagle_jax.models.llama import Llama
from eagle_jax.outputs import Delta
from eagle_jax.sampling.params import SamplingMode
from eagle_jax.sampling.processing import NO_TOKEN


@dataclasses.dataclass
class StepTimes:
    """Wall seconds of the steps since the caller last set them to 0, the time between two steps included."""

    prefill: float = 0.0
    """From the first chunk of a prompt to its first token; rounds of other slots do not run meanwhile."""
    decode: float = 0.0
    """Everything else."""


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """What was launched and not read."""

    report: Report
    running: Mapping[int, Running]
    """By slot, the requests that it can tell something about."""
    is_prefill: bool


class EngineCore:
    """Decodes any number of requests in a fixed number of slots.

    `add_request` and `abort` may be called from any thread; `step` and `reset` from one at a time.

    Args:
      target: the target model.
      draft: what `config.method` drafts with, such as a draft head; None for plain decoding.
      config: the configuration.
      outputs: what makes texts and results of tokens; an engine of its own.
      mesh: the devices that hold the weights, as `eagle_jax.parallel.make_mesh` makes it; None is one device.

    Raises:
      ValueError: as `Programs`.
    """

    def __init__(
        self,
        target: Llama,
        draft: Any,
        config: EngineConfig,
        *,
        outputs: OutputProcessor | None = None,
        mesh: Mesh | None = None,
    ):
        self.config = config
        self.programs = Programs(target, draft, config, mesh)
        self.outputs = OutputProcessor(None, config.max_depth) if outputs is None else outputs
        self.times = StepTimes()
        self._dtype = target.dtype
        self._lock = threading.Lock()
        self._ids: set[str] = set()  # requests whose last delta was not given out yet
        self._inbox: collections.deque[Request | str] = collections.deque()  # requests, and ids to abort
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._state: DecodeState | None = None
        self._mode: SamplingMode | None = None  # of the costs in the state
        self._last_end: float | None = None
        self._outside = 0.0  # time since then that was not spent in `step`
        self._left_at = 0.0
        self._is_shut_down = False
        self._scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        plan = self.programs.plan
        return Scheduler(
            plan.slots, plan.prefill_chunk, data_parallel_size=plan.groups, by_clock=jax.process_count() == 1
        )

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._ids)

    @property
    def num_requests(self) -> int:
        """Requests whose last delta was not given out yet."""
        return len(self._ids)

    def add_request(self, request: Request) -> None:
        """Lets a request take part from the next step on.

        Raises:
          ValueError: its id is in use, or it does not fit this engine.
          RuntimeError: after `shutdown`.
        """
        self._check(request)
        with self._lock:
            self._check_running()
            if request.request_id in self._ids:
                raise ValueError(f"request_id {request.request_id!r} is in use by a request that has not ended")
            self._ids.add(request.request_id)
            self._inbox.append(request)

    def abort(self, request_id: str) -> None:
        """Ends a request: its last delta comes with the next step and says "abort". An unknown id is no error."""
        with self._lock:
            if request_id in self._ids:
                self._inbox.append(request_id)

    def reset(self) -> None:
        """Forgets all requests, without further deltas: after an error in `step`, or when nobody wants them any more.

        The slots are free at once; what the devices are still running for them is not waited for, and never reported.
        """
        with self._lock:
            self._ids.clear()
            self._inbox.clear()
        self.outputs.clear()
        self._in_flight.clear()
        self._scheduler = self._new_scheduler()
        self._mode = self._last_end = None

    def shutdown(self) -> None:
        """Forgets all requests and frees the caches; the engine cannot be used any more."""
        with self._lock:
            self._is_shut_down = True
        self.reset()
        self._state = None

    def step(self) -> list[Delta]:
        """Launches what comes next, and returns what the oldest dispatch that has not been read added to each request.

        While no request waits for a slot, one dispatch runs ahead of the one that is read. An error of a single request, logits
        without any finite value, is its `Delta.error`.

        Raises:
          RuntimeError: after `shutdown`.
        """
        self._check_running()
        now = time.perf_counter()
        if self._last_end is None:
            self._last_end, self._outside = now, 0.0
        else:
            self._outside += now - self._left_at
        try:
            return self._step()
        except BaseException:
            self._state = None  # the program that failed may have consumed it
            raise
        finally:
            self._left_at = time.perf_counter()

    def run(self, requests: Iterable[Request]) -> Iterator[Delta]:
        """Adds requests, and steps until the engine has none left.

        Raises:
          ValueError: as `add_request`, before anything is run.
        """
        for request in requests:
            self.add_request(request)
        while self.has_unfinished_requests:
            yield from self.step()

    def _step(self) -> list[Delta]:
        deltas = self._take_inbox()
        schedule = self._scheduler.schedule()
        if schedule.running:
            self._launch(schedule)
        elif not self._scheduler:
            self._in_flight.clear()  # nobody is left whom it could tell something
        while len(self._in_flight) > (schedule.ahead and bool(schedule.running)):
            deltas += self._read(self._in_flight.popleft())
        if deltas:
            with self._lock:
                self._ids.difference_update(delta.request_id for delta in deltas if delta.finished)
                if not self._ids:
                    self._last_end = self._mode = None
        return deltas

    def _take_inbox(self) -> list[Delta]:
        deltas = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, str):
                self._scheduler.finish(item)
                deltas += [self.outputs.end(item, "abort")] if item in self.outputs else []
                continue
            self.outputs.add(item)
            if item.max_new_tokens == 0:
                deltas.append(self.outputs.end(item.request_id, "length"))
            else:
                self._scheduler.add(item)
        return deltas

    def _launch(self, schedule: Schedule) -> None:
        state = self.programs.init() if self._state is None else self._state
        if schedule.mode != self._mode:
            state, self._mode = self.programs.with_costs(state, schedule.mode), schedule.mode
        self._state = None
        for chunks in schedule.prefills:
            state, report = self.programs.prefill(state, chunks)
            if ended := {c.running.slot: c.running for c in chunks if c is not None and c.is_last}:
                self._in_flight.append(_InFlight(report, ended, is_prefill=True))
        self._state, report = self.programs.decode(
            state,
            list(schedule.running),
            schedule.mode,
            rounds=schedule.rounds,
            max_ended=schedule.max_ended,
        )
        self._in_flight.append(_InFlight(report, schedule.running, is_prefill=False))

    def _read(self, dispatch: "_InFlight") -> list[Delta]:
        wanted = {
            slot: running.request.params.logprobs is not None
            for slot, running in dispatch.running.items()
            if self._scheduler.owner(slot, running.generation) is not None
        }
        slots = self.programs.read(dispatch.report, wanted)
        self._count_time(dispatch, max((len(slot.round_lengths) for slot in slots.values()), default=0))
        deltas = []
        for slot, found in slots.items():
            request = self._scheduler.owner(slot, found.generation)
            if request is None:
                continue
            delta = self._add(request, found)
            if delta is not None:
                deltas.append(delta)
                if delta.finished:
                    self._scheduler.finish(request.request_id)
        return deltas

    def _count_time(self, dispatch: "_InFlight", rounds: int) -> None:
        now = time.perf_counter()
        assert self._last_end is not None
        seconds = now - self._last_end
        if dispatch.is_prefill:
            self.times.prefill += seconds
        else:
            self.times.decode += seconds
            self._scheduler.update(rounds, seconds - self._outside)
        self._last_end, self._outside = now, 0.0

    def _add(self, request: Request, found: SlotReport) -> Delta | None:
        if NO_TOKEN not in found.token_ids:
            return self.outputs.process(
                request.request_id, found, finished=found.finish != RUNNING, stopped=found.finish == STOPPED
            )
        position = found.length + 1 - len(found.token_ids) + found.token_ids.index(NO_TOKEN)
        advice = ""
        if self._dtype == np.float16:
            advice = ", as happens when activations leave the range of float16; load the target in float32 or bfloat16"
        error = FloatingPointError(
            f"no token of prompt {request.index} has a probability at position {position}: the target's logits are NaN or all "
            f"-inf there{advice}"
        )
        return dataclasses.replace(self.outputs.end(request.request_id, "abort"), error=error)

    def _check_running(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("this engine was shut down")

    def _check(self, request: Request) -> None:
        config, length = self.config, len(request.prompt_token_ids)
        which = f"prompt {request.index}"
        if not length:
            raise ValueError(f"{which} is empty")
        if length >= config.max_model_len:
            raise ValueError(
                f"{which} has {length} tokens, which leaves no room for output: prompt and output together have at most "
                f"max_model_len {config.max_model_len} tokens"
            )
        if request.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens of {which} must be at least 0, got {request.max_new_tokens}")
        if len(request.stop_ids) > config.max_stop_ids:
            raise ValueError(
                f"{which} has {len(request.stop_ids)} stop ids; at most {config.max_stop_ids} are possible"
            )
        if request.accept_limit is not None and (not config.shape_invariant or request.accept_limit < 0):
            raise ValueError(
                f"accept_limit of {which} must be at least 0, and the engine shape-invariant, got {request.accept_limit}"
            )
        if request.rounds_per_dispatch is not None and request.rounds_per_dispatch < 1:
            raise ValueError(f"rounds_per_dispatch of {which} must be at least 1, got {request.rounds_per_dispatch}")
