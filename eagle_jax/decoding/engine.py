"""The host side of decoding: requests into slots, dispatches, and what came out of them."""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from eagle_jax.decoding.attention import AttentionShape
from eagle_jax.decoding.compiler import compile_for_device
from eagle_jax.decoding.ladder import Ladder
from eagle_jax.decoding.loop import Plan, Weights, decode, init_state, prefill, split
from eagle_jax.decoding.pace import FIRST_ROUNDS, Pace
from eagle_jax.decoding.placement import everywhere
from eagle_jax.decoding.prefill import PromptChunk
from eagle_jax.decoding.rules import SEEDED, Rule
from eagle_jax.decoding.sampling_state import LogProbs
from eagle_jax.decoding.state import RUNNING, STOPPED, DecodeState, Report
from eagle_jax.decoding.tree import StaticTree, TreeConfig
from eagle_jax.models.heads import DraftHead
from eagle_jax.models.llama import Llama
from eagle_jax.parallel.mesh import check_mesh, data_groups, model_shards, replicate, replicated
from eagle_jax.sampling.params import SamplingMode, SamplingParams
from eagle_jax.sampling.processing import NO_TOKEN
from eagle_jax.sampling.settings import SlotSettings

_UNBOUNDED = np.int32(2**31 - 1)
_ROUNDS_BEFORE_REFILL = 16
"""While requests wait, groups of devices that have nothing left to do wait so many rounds for the others at most."""
_MOST_SENT = 256
"""The most values of the host that are kept on the devices."""
GREEDY = SamplingParams()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued. Checked by whoever builds it; the engine checks only what it relies on."""

    prompt: Sequence[int]
    """Token ids, at least one."""
    max_new_tokens: int
    """At least 1; the sequence also ends at the engine's `max_length`."""
    stop_ids: Sequence[int] = ()
    """Ids that end the output; the id itself is part of it."""
    sampling: SamplingParams = GREEDY
    """How tokens are chosen; what it says about ends and text is not read here."""
    seed: int = 0
    """In place of the one in `sampling`, which may be None."""
    accept_limit: int | None = None
    """Most drafts that a round accepts, in a shape-invariant engine; 0 decodes plainly, None is no limit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogProbs:
    """Log-probabilities at one place of an output."""

    chosen: float
    """Of the token that was emitted."""
    rank: int
    """How many tokens were at least as likely, itself included."""
    top: list[tuple[int, float]]
    """The likeliest tokens, best first."""


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
    drafted: list[int]
    """Drafted nodes of each round: N - 1, as far as it had a tree."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """What one dispatch added to one request."""

    index: int
    """Place of the request in the sequence given to `Engine.serve`."""
    token_ids: list[int]
    """New tokens."""
    completion: Completion | None
    """Given with the last update of a request."""
    log_probs: list[TokenLogProbs] | None = None
    """One entry a token, with as many alternatives as were asked for; None if none were."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of an engine, which take what the functions of `eagle_jax.decoding.loop` take but the plan."""

    init: Callable[..., DecodeState]
    prefill: Callable[..., DecodeState]
    decode: Callable[..., tuple[DecodeState, Report]]
    compile_seconds: float
    temporary_bytes: int


_compiled: dict[Any, Programs] = {}


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
      tree: shape of the draft trees, or several to choose from; None exactly when there is no head.
      slots: sequences decoded side by side.
      max_length: tokens of the longest sequence, prompt and output together.
      prefill_chunk: prompt tokens run at once.
      max_stop_ids: stop ids that a request can have.
      mode: what requests can ask for.
      rule: how drafts are made and accepted in slots that sample.
      processed_logprobs: whether log-probabilities are those of the processed distribution.
      shape_invariant: see `Plan.shape_invariant`.
      costs: time of a round of each rung, in any unit, where `tree` is a ladder; it may be set later, but before `serve`.
      mesh: the devices that hold the weights, as `eagle_jax.parallel.make_mesh` makes it; None is one device.
    """

    def __init__(
        self,
        target: Llama,
        head: DraftHead | None,
        *,
        tree: TreeConfig | StaticTree | Ladder | None,
        slots: int,
        max_length: int,
        prefill_chunk: int,
        max_stop_ids: int = 8,
        mode: SamplingMode = SamplingMode.GREEDY,
        rule: Rule = SEEDED,
        processed_logprobs: bool = False,
        shape_invariant: bool = False,
        costs: Sequence[float] | None = None,
        mesh: Mesh | None = None,
    ):
        mesh = check_mesh(mesh)
        _check_shards(target, head, mesh, slots)
        if (head is None) != (tree is None):
            raise ValueError("head and tree go together: give both to speculate, neither to decode plainly")
        for name, value in (("slots", slots), ("max_length", max_length), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if head is not None and tree is not None and tree.top_k > head.config.draft_vocab_size:
            raise ValueError(f"tree top_k {tree.top_k} exceeds the head's vocabulary of {head.config.draft_vocab_size}")
        if isinstance(tree, Ladder) and not rule.exact_match:
            raise ValueError(
                f"a ladder of trees works with exact matches, but rejection_sample_method is {rule.name!r}"
            )
        if shape_invariant and (tree is None or isinstance(tree, Ladder) or tree.total_tokens != tree.max_depth + 1):
            raise ValueError(f"shape_invariant works on chains, but tree is {tree}")
        if shape_invariant and not rule.exact_match:
            raise ValueError(f"shape_invariant works with exact matches, but rejection_sample_method is {rule.name!r}")
        target_def, target_weights = split(target)
        head_def, head_weights = (None, None) if head is None else split(head)
        self.plan = Plan(
            target_def=target_def,
            head_def=head_def,
            tree=tree,
            slots=slots,
            max_length=max_length,
            prefill_chunk=prefill_chunk,
            max_stop_ids=max_stop_ids,
            mode=mode,
            # What makes no difference must not make another program.
            rule=SEEDED if mode is SamplingMode.GREEDY or tree is None else rule,
            processed_logprobs=processed_logprobs and mode is SamplingMode.FULL,
            shape_invariant=shape_invariant,
            mesh=mesh,
        )
        self._vocab_size = target.config.vocab_size
        self._weights = Weights(target_weights, head_weights)
        self._everywhere = jax.tree.leaves(target_weights)[0].sharding if mesh is None else replicated(mesh)
        self._sent: dict[tuple[Any, ...], jax.Array] = {}
        self._target_config, self._target_dtype = target.config, target.dtype
        self._draft_shape = None if head is None else (head.config, head.dtype, head.shards)
        self._target_shards = target.shards
        self.costs = costs
        self._programs: Programs | None = None
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
                _compiled[key] = self.compile_programs()
            self._programs = _compiled[key]
        return self._programs.compile_seconds

    @property
    def geometry(self) -> dict[str, str | int]:
        """What the target and the head are like, for people and for files."""
        config = self._target_config
        sizes: dict[str, str | int] = {
            "target": config.model_type,
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "dtype": str(self._target_dtype),
        }
        if self._draft_shape is not None:
            head, dtype, _ = self._draft_shape
            sizes |= {"draft": head.method, "draft_vocab_size": head.draft_vocab_size, "draft_dtype": str(dtype)}
        return sizes

    @property
    def weights(self) -> Weights:
        """The parameters, as the programs take them."""
        return self._weights

    @property
    def programs(self) -> Programs:
        """The programs; compiles them unless that was done before."""
        self.compile()
        assert self._programs is not None
        return self._programs

    def compile_programs(self) -> Programs:
        """Compiles the programs, also if that was done before."""
        start = time.perf_counter()
        device = jax.tree.leaves(self._weights)[0].sharding.device_set.copy().pop()
        init = init_state.lower(self.plan, self._weights).compile()
        state = self.plan.state_shapes(self._weights)
        chunk = self._of_groups([next(self._chunks(0, Request(prompt=(0,), max_new_tokens=1)))] * self.plan.groups)
        first = prefill.lower(self.plan, self._weights, state, everywhere(chunk, self.plan.mesh))
        steering = (np.ones((self.plan.slots,), bool), np.int32(1), np.bool_(False))
        rounds = decode.lower(self.plan, self._weights, state, *everywhere(steering, self.plan.mesh))
        compiled = [compile_for_device(lowered, device) for lowered in (first, rounds)]
        return Programs(
            init=init,
            prefill=compiled[0],
            decode=compiled[1],
            compile_seconds=time.perf_counter() - start,
            temporary_bytes=max(_temporary_bytes(program) for program in compiled),
        )

    @functools.cached_property
    def attention(self) -> dict[str, str]:
        """Backend of tree attention in the prefill ("prefill"), the verification ("verify") and the head ("draft")."""
        plan, config = self.plan, self._target_config
        device = jax.tree.leaves(self._weights)[0].sharding.device_set.copy().pop()
        nodes = 1 if plan.tree is None else plan.tree.total_tokens
        shape = functools.partial(AttentionShape.of, capacity=plan.capacity)
        whole = functools.partial(shape, config, self._target_dtype, shards=self._target_shards)
        shapes = {
            "prefill": whole(slots=1, tokens=plan.prefill_chunk, tree=False),
            "verify": whole(slots=plan.group_slots, tokens=nodes, tree=True),
        }
        if plan.tree is not None and self._draft_shape is not None:
            # The step that encodes what was accepted; those that grow the tree have the same heads and fewer tokens.
            head, dtype, shards = self._draft_shape
            shapes["draft"] = shape(
                head,
                dtype,
                slots=plan.group_slots,
                tokens=plan.tree.max_depth + 1,
                tree=False,
                windowed=any(head.sliding_windows or ()),
                shards=shards,
            )
        return {part: entry.choice(device).name for part, entry in shapes.items()}

    @property
    def temporary_bytes(self) -> int:
        """Device memory of the largest program's temporaries, in bytes."""
        return self.programs.temporary_bytes

    def abort(self, index: int) -> None:
        """Ends a request of the running `serve` after the dispatch in flight; its completion holds what was emitted so far."""
        self._aborted.add(index)

    def serve(
        self,
        requests: Sequence[Request],
        *,
        rounds_per_dispatch: int | None = None,
        seconds_per_dispatch: float | None = None,
    ) -> Iterator[list[Update]]:
        """Decodes requests, and yields after each dispatch what it added.

        A slot whose request has ended takes the next one. With `rounds_per_dispatch` a dispatch ends after so many rounds at
        the latest and the next one is launched before its tokens are read, which is what streaming wants; with
        `seconds_per_dispatch` it has about as many rounds as take so long by the clock, `FIRST_ROUNDS` at first (several
        processes, whose clocks differ, stay at that number). Without either a dispatch ends when a slot must be refilled or
        everything is done.

        Raises:
          ValueError: a request that does not fit, before anything is run; or both limits of a dispatch.
          RuntimeError: the engine is still serving another call.
        """
        if self._serving:
            raise RuntimeError("this engine is still serving: exhaust or close the iterator of the earlier call first")
        for index, request in enumerate(requests):
            self._check(index, request)
        if isinstance(self.plan.tree, Ladder) and (
            self.costs is None or len(self.costs) != len(self.plan.tree.rungs) or not all(c > 0 for c in self.costs)
        ):
            raise ValueError(
                f"costs must hold a positive time for each of {len(self.plan.tree.rungs)} rungs, got {self.costs}"
            )
        if rounds_per_dispatch is not None and seconds_per_dispatch is not None:
            raise ValueError("a dispatch has rounds_per_dispatch or seconds_per_dispatch, not both")
        pace = None
        if rounds_per_dispatch is not None:
            pace = Pace(rounds_per_dispatch)
        elif seconds_per_dispatch is not None:
            pace = Pace(FIRST_ROUNDS, seconds_per_dispatch if jax.process_count() == 1 else None)
        self._aborted = set()
        return self._serve(requests, pace)

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
        if request.accept_limit is not None and (not self.plan.shape_invariant or request.accept_limit < 0):
            raise ValueError(
                f"accept_limit of prompt {index} must be at least 0, and the engine shape-invariant, got {request.accept_limit}"
            )
        if request.sampling.mode > self.plan.mode:
            raise ValueError(
                f"prompt {index} needs {request.sampling.mode.name} rounds, but the engine's are {self.plan.mode.name}"
            )

    def _serve(self, requests: Sequence[Request], pace: Pace | None) -> Iterator[list[Update]]:
        if self._serving:
            raise RuntimeError("this engine is still serving: exhaust or close the iterator of the earlier call first")
        self._serving = True
        try:
            yield from self._dispatches(requests, pace)
        except GeneratorExit:
            raise
        except BaseException:
            self._state = None  # the program that failed may have consumed it
            raise
        finally:
            self._serving = False

    def _dispatches(self, requests: Sequence[Request], pace: Pace | None) -> Iterator[list[Update]]:
        programs, weights = self.programs, self._weights
        # A state left by a request that was not finished serves as well as a new one: prefill resets a slot completely.
        state = self._state if self._state is not None else programs.init(weights)
        self._state = None
        state = self._with_costs(state)
        waiting = collections.deque(enumerate(requests))
        running: dict[int, _Slot] = {}
        in_flight: tuple[Report, dict[int, _Slot]] | None = None
        while running or waiting or in_flight:
            new: list[tuple[int, Request]] = []
            for slot in self._slot_order:
                if waiting and slot not in running:
                    index, request = waiting.popleft()
                    running[slot] = _Slot(index, request)
                    new.append((slot, request))
            for chunk in self._prefills(new):
                state = programs.prefill(weights, state, chunk)
            launched = None
            # An aborted slot ends with the report that is in flight.
            pending = {} if in_flight is None else in_flight[1]
            wanted = {
                slot: entry
                for slot, entry in running.items()
                if entry.index not in self._aborted or pending.get(slot) is not entry
            }
            if wanted:
                active = np.isin(np.arange(self.plan.slots), list(wanted))
                limit = _UNBOUNDED if pace is None else np.int32(pace.rounds)
                at_most = min(limit, np.int32(_ROUNDS_BEFORE_REFILL)) if waiting and self.plan.groups > 1 else limit
                refill = self._send(np.bool_(bool(waiting)))
                state, report = programs.decode(weights, state, self._send(active), self._send(at_most), refill)
                if jax.process_count() > 1 and self.plan.mesh is not None:
                    report = replicate(self.plan.mesh)(report)  # what a process reads must lie on its own devices
                launched = (report, wanted)
            self._state = state
            if pace is None:
                read, in_flight = launched, None
            else:
                read, in_flight = in_flight, launched
            if read is None:
                continue
            updates, rounds = self._read(*read)
            if pace is not None:
                pace.after(rounds)
            for slot, entry in read[1].items():
                # By the time a report is read its slot may already belong to the next request.
                if entry.done and running.get(slot) is entry:
                    del running[slot]
            if updates:
                given = time.perf_counter()
                yield updates
                if pace is not None:
                    pace.leave_out(time.perf_counter() - given)

    def _send(self, value: np.ndarray | np.generic) -> jax.Array:
        """A numpy value on all devices. The same few steer most dispatches, so they are kept there."""
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._sent:
            if len(self._sent) >= _MOST_SENT:
                self._sent.clear()
            self._sent[key] = jax.make_array_from_callback(
                value.shape, self._everywhere, lambda index: np.asarray(value)[index]
            )
        return self._sent[key]

    def _with_costs(self, state: DecodeState) -> DecodeState:
        if state.ladder is None:
            return state
        # The choice rests on the requests of this call alone, not on an earlier one's.
        costs = jax.device_put(np.asarray(self.costs, np.float32), state.ladder.costs.sharding)
        shardings = jax.tree.map(lambda x: x.sharding, state.ladder)
        return dataclasses.replace(state, ladder=jax.device_put(state.ladder.restart(costs), shardings))

    def _read(self, report: Report, slots: dict[int, "_Slot"]) -> tuple[list[Update], int]:
        """What a dispatch added, and how many rounds it had."""
        host = jax.device_get(report)
        updates, rounds = [], 0
        for slot, entry in slots.items():
            if entry.done:
                continue
            prompt = len(entry.request.prompt)
            output = host.tokens[slot, prompt : host.lengths[slot] + 1].tolist()
            if NO_TOKEN in output:
                advice = ""
                if self._target_dtype == np.float16:
                    advice = ", as happens when activations leave the range of float16; load the target in float32 or bfloat16"
                raise FloatingPointError(
                    f"no token of prompt {entry.index} has a probability at position {prompt + output.index(NO_TOKEN)}: the "
                    f"target's logits are NaN or all -inf there{advice}"
                )
            entry.done = host.finish[slot] != RUNNING or entry.index in self._aborted
            new = output[entry.emitted :]
            log_probs = self._log_probs(host.log_probs, slot, entry.request, entry.emitted, len(output))
            entry.emitted = len(output)
            rounds = max(rounds, int(host.rounds[slot]) - entry.rounds)
            entry.rounds = int(host.rounds[slot])
            completion = None
            if entry.done:
                completion = Completion(
                    token_ids=output,
                    stopped=bool(host.finish[slot] == STOPPED),
                    accepted_lengths=host.accepted_lengths[slot, : host.rounds[slot]].tolist(),
                    accepted_at_depth=host.accepted_at_depth[slot].tolist(),
                    drafted=self._drafted(host, slot),
                )
            if new or completion:
                updates.append(Update(index=entry.index, token_ids=new, completion=completion, log_probs=log_probs))
        return updates, rounds

    def _drafted(self, host: Report, slot: int) -> list[int]:
        rounds = int(host.rounds[slot])
        if host.drafted is not None:
            return host.drafted[slot, :rounds].tolist()
        return [0 if self.plan.tree is None else self.plan.tree.total_tokens - 1] * rounds

    @staticmethod
    def _log_probs(
        host: LogProbs | None, slot: int, request: Request, start: int, end: int
    ) -> list[TokenLogProbs] | None:
        """Those of the output tokens from `start` to `end`."""
        wanted = request.sampling.logprobs
        if host is None or wanted is None:
            return None
        prompt = len(request.prompt)
        return [
            TokenLogProbs(
                chosen=float(host.chosen[slot, place]),
                rank=int(host.ranks[slot, place]),
                top=list(
                    zip(
                        host.top_ids[slot, place, :wanted].tolist(),
                        host.top[slot, place, :wanted].tolist(),
                        strict=True,
                    )
                ),
            )
            for place in range(prompt + start, prompt + end)
        ]

    def _settings(self, request: Request) -> SlotSettings | None:
        return SlotSettings.of(request.sampling, request.seed, self._vocab_size, self.plan.mode)

    @property
    def _slot_order(self) -> list[int]:
        """In which order slots are filled: the first ones of every group, then the second ones."""
        return sorted(range(self.plan.slots), key=lambda slot: slot % self.plan.group_slots)

    def _prefills(self, new: Sequence[tuple[int, Request]]) -> Iterator[PromptChunk]:
        """The chunks of requests that go into slots, as the program takes them; groups of devices run theirs side by side."""
        streams: list[list[PromptChunk]] = [[] for _ in range(self.plan.groups)]
        for slot, request in new:
            group, own = divmod(slot, self.plan.group_slots)
            if self.plan.groups == 1:
                yield from self._chunks(own, request)
            else:
                streams[group] += self._chunks(own, request)
        for chunks in itertools.zip_longest(*streams):
            some = next(chunk for chunk in chunks if chunk is not None)
            yield self._of_groups([self._idle(some) if chunk is None else chunk for chunk in chunks])

    def _of_groups(self, chunks: Sequence[PromptChunk]) -> PromptChunk:
        """The chunks of all groups as one: as it is where there is one group, else stacked."""
        if len(chunks) == 1:
            return chunks[0]
        chunks = [
            chunk if chunk.active is not None else dataclasses.replace(chunk, active=np.bool_(True)) for chunk in chunks
        ]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *chunks)

    def _idle(self, chunk: PromptChunk) -> PromptChunk:
        """A chunk like that one for a group that has none; see `cache_capacity` for its place."""
        start = np.int32(self.plan.capacity - self.plan.prefill_chunk)
        return dataclasses.replace(chunk, slot=np.int32(0), start=start, valid=np.int32(1), active=np.bool_(False))

    def _chunks(self, slot: int, request: Request) -> Iterator[PromptChunk]:
        settings = self._settings(request)
        for start in range(0, len(request.prompt), self.plan.prefill_chunk):
            yield self._chunk(request, slot, start, settings)

    def _chunk(self, request: Request, slot: int, start: int, settings: SlotSettings | None) -> PromptChunk:
        size, length = self.plan.prefill_chunk, len(request.prompt)
        part = request.prompt[start : start + size + 1]
        tokens = np.zeros((size + 1,), np.int32)
        tokens[: len(part)] = part
        stops = np.full((self.plan.max_stop_ids,), -1, np.int32)
        stops[: len(request.stop_ids)] = request.stop_ids
        return PromptChunk(
            slot=np.int32(slot),
            tokens=tokens,
            start=np.int32(start),
            valid=np.int32(min(size, length - start)),
            prompt_length=np.int32(length),
            limit=np.int32(min(length + request.max_new_tokens, self.plan.max_length)),
            stop_ids=stops,
            sampling=settings,
            accept_limit=self._accept_limit(request),
        )

    def _accept_limit(self, request: Request) -> np.int32 | None:
        if not self.plan.shape_invariant:
            return None
        assert self.plan.tree is not None
        return np.int32(self.plan.tree.max_depth if request.accept_limit is None else request.accept_limit)


def _check_shards(target: Llama, head: DraftHead | None, mesh: Mesh | None, slots: int) -> None:
    """Raises ValueError if the modules were not made for that mesh."""
    shards, groups = model_shards(mesh), data_groups(mesh)
    if target.shards != shards:
        raise ValueError(
            f"the target is split over {target.shards} devices, but the mesh has {shards} to split it over"
        )
    if head is not None and head.shards not in (1, shards):
        raise ValueError(f"the draft head is split over {head.shards} devices; it must be 1 or the target's {shards}")
    if slots % groups:
        raise ValueError(f"slots {slots} is no multiple of the {groups} groups of devices of the mesh")


@dataclasses.dataclass
class _Slot:
    """A request in its slot, as the host sees it."""

    index: int
    request: Request
    emitted: int = 0
    rounds: int = 0
    done: bool = False
