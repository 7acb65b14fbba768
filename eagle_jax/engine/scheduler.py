"""Which requests run, which chunks of prompts are read next, and how many rounds a dispatch has: integers, no devices."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from eagle_jax.engine.request import Request
from eagle_jax.sampling import SamplingMode

FIRST_ROUNDS = 4
"""Rounds of a dispatch whose length in seconds is given, before anything is known of their time; in several processes, whose
clocks differ, always."""
ROUNDS_BEFORE_REFILL = 16
"""While requests wait, data-parallel groups that have nothing left to do wait so many rounds for the others at most."""
REFILLED_SHARE = 16
"""While requests wait, a dispatch goes on until one in so many slots has ended: of many slots one does in nearly every round."""
UNBOUNDED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Running:
    """A request in its slot."""

    request: Request
    slot: int
    generation: int
    """Number of the admission: what a report says of another one belongs to an earlier request in this slot."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a prompt that are read at once."""

    running: Running
    start: int
    """Place of the first one in the prompt."""
    is_last: bool
    """Whether the prompt ends with it."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One step: the chunks of the requests that got a slot, then a dispatch."""

    prefills: list[tuple[Chunk | None, ...]]
    """Chunks in their order, one for each data-parallel group, None where it has nothing to read meanwhile. The last chunk of a
    prompt brings its first token home; then comes the dispatch."""
    running: dict[int, Running]
    """By slot, the requests that decode."""
    mode: SamplingMode
    """Of the rounds: the least that covers all running requests."""
    rounds: int
    """Most rounds of the dispatch."""
    max_ended: int
    """The dispatch returns as soon as so many slots have ended, because other requests wait for them."""
    ahead: bool
    """Whether the next step may be launched before the report of this one is read."""


class Scheduler:
    """Gives slots to requests, first come first served.

    Args:
      slots: sequences decoded side by side.
      prefill_chunk: prompt tokens read at once.
      data_parallel_size: groups of devices that the slots are split over: slot s belongs to group `s // (slots / groups)`.
      by_clock: whether `Request.seconds_per_dispatch` counts; otherwise such a dispatch has `FIRST_ROUNDS`.
    """

    def __init__(self, slots: int, prefill_chunk: int, *, data_parallel_size: int = 1, by_clock: bool = True):
        self._chunk, self._groups, self._by_clock = prefill_chunk, data_parallel_size, by_clock
        self._group_slots = slots // data_parallel_size
        # The first slots of every group, then the second ones.
        self._order = sorted(range(slots), key=lambda slot: slot % self._group_slots)
        self._waiting: collections.OrderedDict[str, Request] = collections.OrderedDict()
        self._running: dict[int, Running] = {}
        self._slots: dict[str, int] = {}
        self._generations = itertools.count(1)
        self._timed_rounds = FIRST_ROUNDS
        self._wished_seconds: float | None = None

    def __len__(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._running)

    def add(self, request: Request) -> None:
        """Lets a request wait for a slot."""
        self._waiting[request.request_id] = request

    def finish(self, request_id: str) -> None:
        """Takes a request out, whether it waits or runs; its slot is free at once. Nothing happens if it is not there."""
        self._waiting.pop(request_id, None)
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            del self._running[slot]

    def owner(self, slot: int, generation: int) -> Request | None:
        """The running request that a report about a slot belongs to; None if it has ended."""
        running = self._running.get(slot)
        return running.request if running is not None and running.generation == generation else None

    def schedule(self) -> Schedule:
        """The next step."""
        admitted = []
        for slot in self._order if self._waiting else ():
            if slot in self._running:
                continue
            request_id, request = self._waiting.popitem(last=False)
            admitted.append(Running(request, slot, next(self._generations) & UNBOUNDED))
            self._running[slot], self._slots[request_id] = admitted[-1], slot
            if not self._waiting:
                break
        refill = bool(self._waiting)
        rounds = self._rounds()
        return Schedule(
            prefills=list(self._chunks(admitted)),
            running=dict(self._running),
            mode=max((running.request.mode for running in self._running.values()), default=SamplingMode.GREEDY),
            rounds=min(rounds, ROUNDS_BEFORE_REFILL) if refill and self._groups > 1 else rounds,
            max_ended=max(1, self._group_slots // REFILLED_SHARE) if refill else UNBOUNDED,
            ahead=not refill,
        )

    def update(self, rounds: int, seconds: float) -> None:
        """Takes note of a dispatch that was read: its rounds, and what it took as long as nothing else was done.

        The next dispatch runs while this one is read, so `seconds` are its length or what was left to wait for of it.
        """
        if self._by_clock and rounds and self._wished_seconds is not None:
            fitting = int(self._wished_seconds * rounds / max(seconds, 1e-9))
            self._timed_rounds = max(1, min(fitting, 2 * self._timed_rounds))

    def _rounds(self) -> int:
        requests = [running.request for running in self._running.values()]
        rounds = [r.rounds_per_dispatch for r in requests if r.rounds_per_dispatch is not None]
        seconds = min((r.seconds_per_dispatch for r in requests if r.seconds_per_dispatch is not None), default=None)
        if seconds != self._wished_seconds:
            self._wished_seconds, self._timed_rounds = seconds, FIRST_ROUNDS
        return min([*rounds, UNBOUNDED if seconds is None else self._timed_rounds])

    def _chunks(self, admitted: Sequence[Running]) -> Iterator[tuple[Chunk | None, ...]]:
        """Groups read side by side, each its own requests one after the other."""
        groups: list[list[Chunk]] = [[] for _ in range(self._groups)]
        for running in admitted:
            length = len(running.request.prompt_token_ids)
            groups[running.slot // self._group_slots] += [
                Chunk(running, start, start + self._chunk >= length) for start in range(0, length, self._chunk)
            ]
        return itertools.zip_longest(*groups)
