"""The compiled programs of an engine: make a state, prefill a chunk, decode rounds; and numpy values in their form."""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle_jax.decoding.attention import AttentionShape
from eagle_jax.decoding.compiler import compile_for_device
from eagle_jax.decoding.loop import decode, init_state, prefill, state_shapes
from eagle_jax.decoding.placement import everywhere
from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.decoding.prefill import PromptChunk
from eagle_jax.decoding.report import Report, SlotReport
from eagle_jax.decoding.rules import SEEDED
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafters.registry import DrafterSpec
from eagle_jax.engine.config import EngineConfig
from eagle_jax.engine.request import Request
from eagle_jax.engine.scheduler import Chunk, Running
from eagle_jax.models.heads import DraftHead
from eagle_jax.models.llama import Llama
from eagle_jax.models.module_def import ModuleDef
from eagle_jax.parallel.mesh import check_mesh, data_groups, model_shards, replicate, replicated
from eagle_jax.sampling.params import SamplingMode
from eagle_jax.sampling.settings import SlotSettings

_MOST_SENT = 256
"""The most values of the host that are kept on the devices."""


@dataclasses.dataclass(frozen=True)
class _Compiled:
    program: jax.stages.Compiled
    seconds: float

    @property
    def temporary_bytes(self) -> int:
        analysis = self.program.memory_analysis()
        return 0 if analysis is None else analysis.temp_size_in_bytes


_compiled: dict[Any, _Compiled] = {}
"""Of this process: shared by all engines with an equal `Plan` and weights of the same shapes and placement."""


class Programs:
    """What the functions of `eagle_jax.decoding.loop` do, compiled for one configuration.

    Requests of all modes (`SamplingMode`) share one state, so `init` is one program; `prefill` and `decode` are one for each mode
    that is used.

    Args:
      target: the target model.
      draft: what `config.method` drafts with: a module, or any pytree of arrays; None exactly when `config` has no tree.
      config: the configuration.
      mesh: the devices that hold the weights, as `eagle_jax.parallel.make_mesh` makes it; None is one device.

    Raises:
      ValueError: modules that were not made for the mesh, or a configuration that does not suit them.
    """

    def __init__(self, target: Llama, draft: Any, config: EngineConfig, mesh: Mesh | None = None):
        mesh = check_mesh(mesh)
        head = draft if isinstance(draft, DraftHead) else None
        _check_shards(target, head, mesh, config.max_num_seqs)
        if (draft is None) != (config.tree is None):
            raise ValueError("draft and tree go together: give both to speculate, neither to decode plainly")
        if head is not None and config.tree is not None and config.tree.top_k > head.config.draft_vocab_size:
            raise ValueError(
                f"tree top_k {config.tree.top_k} exceeds the head's vocabulary of {head.config.draft_vocab_size}"
            )
        target_def, target_weights = ModuleDef.split(target)
        draft_def, draft_weights = ModuleDef.split(draft) if isinstance(draft, nnx.Module) else (None, draft)
        self.config, self._mesh = config, mesh
        self.plan = Plan(
            target_def=target_def,
            drafter=None if draft is None else DrafterSpec(config.method, draft_def),
            tree=config.tree,
            slots=config.max_num_seqs,
            max_length=config.max_model_len,
            prefill_chunk=config.prefill_chunk,
            max_stop_ids=config.max_stop_ids,
            rule=config.rule,
            processed_logprobs=config.logprobs_mode == "processed_logprobs",
            shape_invariant=config.shape_invariant,
            mesh=mesh,
        )
        self.weights = Weights(target_weights, draft_weights)
        self.costs: dict[SamplingMode, Sequence[float]] = {}
        """By mode, the time of a round of each candidate, in any unit, where the tree is a choice of several."""
        self._layout = self.plan.layout
        self._vocab_size = target.config.vocab_size
        self._replicated = jax.tree.leaves(target_weights)[0].sharding if mesh is None else replicated(mesh)
        self._sent: dict[tuple[Any, ...], jax.Array] = {}
        self._target = target.config, target.dtype, target.shards
        self._head = None if head is None else (head.config, head.dtype, head.shards)
        self._own: dict[tuple[str, SamplingMode | None], _Compiled] = {}

    @property
    def device(self) -> jax.Device:
        """One of the devices."""
        return min(self._replicated.device_set, key=lambda device: device.id)

    def of_mode(self, mode: SamplingMode) -> Plan:
        """The plan of the rounds of a mode; what makes no difference there must not make another program."""
        return dataclasses.replace(
            self.plan,
            mode=mode,
            rule=SEEDED if mode is SamplingMode.GREEDY or self.plan.tree is None else self.plan.rule,
            processed_logprobs=self.plan.processed_logprobs and mode is SamplingMode.FULL,
        )

    def compile(self, mode: SamplingMode) -> float:
        """Compiles what requests of a mode need unless that was done before; returns the seconds it took when it was done."""
        return sum(self._program(*name).seconds for name in (("init", None), ("prefill", mode), ("decode", mode)))

    def is_compiled(self, mode: SamplingMode) -> bool:
        """Whether `compile` was called for a mode."""
        return ("decode", mode) in self._own

    def init(self) -> DecodeState:
        """A state without requests."""
        state: DecodeState = self._program("init", None).program(self.weights)
        return state

    def prefill(self, state: DecodeState, chunks: tuple[Chunk | None, ...]) -> tuple[DecodeState, Report]:
        """Reads a chunk of one request, or one for each data-parallel group; the state is consumed."""
        given = [chunk for chunk in chunks if chunk is not None]
        mode = max(chunk.running.request.mode for chunk in given)
        arrays = [self._chunk(given[0], mode) if chunk is None else self._chunk(chunk, mode) for chunk in chunks]
        idle = [chunk is None for chunk in chunks]
        new, report = self._program("prefill", mode).program(self.weights, state, self._stacked(arrays, idle))
        return new, self._on_its_way(report) if any(chunk.is_last for chunk in given) else report

    def decode(
        self, state: DecodeState, slots: Sequence[int], mode: SamplingMode, *, rounds: int, max_ended: int
    ) -> tuple[DecodeState, Report]:
        """Rounds for the requests in some slots; the state is consumed. See `eagle_jax.decoding.loop.decode`."""
        active = np.zeros((self.plan.slots,), bool)
        active[list(slots)] = True
        steering = [self._send(value) for value in (active, np.int32(rounds), np.int32(max_ended))]
        # What the mode does not touch stays here: each array that a program takes and gives costs the host microseconds.
        given = state.of_mode(mode, self.of_mode(mode).processed_logprobs)
        new, report = self._program("decode", mode).program(self.weights, given, *steering)
        return new.with_rest_of(state), self._on_its_way(report)

    def _on_its_way(self, report: Report) -> Report:
        if jax.process_count() > 1 and self._mesh is not None:
            report = replicate(self._mesh)(report)  # what a process reads must lie on its own devices
        report.copy_to_host()
        return report

    def read(self, report: Report, slots: Mapping[int, bool] | None = None) -> dict[int, SlotReport]:
        """Waits for a report; see `ReportLayout.unpack`."""
        return self._layout.unpack(report, slots)

    def with_costs(self, state: DecodeState, mode: SamplingMode) -> DecodeState:
        """The state with `costs` of a mode, so that the choice of candidates rests on what comes now, not on earlier requests.

        Raises:
          ValueError: there is a choice, but no costs.
        """
        if state.adaptive is None:
            return state
        costs, number = self.costs.get(mode), state.adaptive.costs.shape[0]
        if costs is None or len(costs) != number or not all(cost > 0 for cost in costs):
            raise ValueError(f"costs must hold a positive time for each of {number} candidates, got {costs}")
        placed = jax.device_put(np.asarray(costs, np.float32), state.adaptive.costs.sharding)
        shardings = jax.tree.map(lambda x: x.sharding, state.adaptive)
        return dataclasses.replace(state, adaptive=jax.device_put(state.adaptive.restart(placed), shardings))

    @property
    def geometry(self) -> dict[str, str | int]:
        """What the target and the head are like, for people and for files."""
        config, dtype, _ = self._target
        sizes: dict[str, str | int] = {
            "target": config.model_type,
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "dtype": str(dtype),
        }
        if self._head is not None:
            head, dtype, _ = self._head
            sizes |= {"draft": head.method, "draft_vocab_size": head.draft_vocab_size, "draft_dtype": str(dtype)}
        return sizes

    @functools.cached_property
    def attention(self) -> dict[str, str]:
        """Backend of tree attention in the prefill ("prefill"), the verification ("verify") and the head ("draft")."""
        plan, (config, dtype, shards) = self.plan, self._target
        nodes = 1 if plan.tree is None else plan.tree.total_tokens
        shape = functools.partial(AttentionShape.of, capacity=plan.capacity)
        whole = functools.partial(shape, config, dtype, shards=shards)
        shapes = {
            "prefill": whole(slots=1, tokens=plan.prefill_chunk, tree=False),
            "verify": whole(slots=plan.group_slots, tokens=nodes, tree=True),
        }
        if self._head is not None:
            # The step that encodes what was accepted; those that grow the tree have the same heads and fewer tokens.
            head, dtype, shards = self._head
            shapes["draft"] = shape(
                head,
                dtype,
                slots=plan.group_slots,
                tokens=plan.max_depth + 1,
                tree=False,
                windowed=any(head.sliding_windows or ()),
                shards=shards,
            )
        return {part: entry.choice(self.device).name for part, entry in shapes.items()}

    @property
    def temporary_bytes(self) -> int:
        """Device memory of the largest compiled program's temporaries, in bytes."""
        return max((compiled.temporary_bytes for compiled in self._own.values()), default=0)

    def compile_program(self, kind: str, mode: SamplingMode | None) -> jax.stages.Compiled:
        """Compiles a program, also if that was done before: "init", or "prefill" or "decode" of a mode."""
        if mode is None:
            return init_state.lower(self.of_mode(SamplingMode.GREEDY), self.weights).compile()
        plan = self.of_mode(mode)
        state = state_shapes(plan, self.weights)
        if kind == "prefill":
            example = self._chunk(
                Chunk(Running(Request(request_id="", prompt_token_ids=(0,), max_new_tokens=1), 0, 0), 0, is_last=True),
                mode,
            )
            groups = plan.groups
            chunk = self._stacked([example] * groups, [False] * groups)
            lowered = prefill.lower(plan, self.weights, state, everywhere(chunk, plan.mesh))
        else:
            state = state.of_mode(mode, plan.processed_logprobs)
            steering = (np.ones((plan.slots,), bool), np.int32(1), np.int32(1))
            lowered = decode.lower(plan, self.weights, state, *everywhere(steering, plan.mesh))
        return compile_for_device(lowered, self.device)

    def _program(self, kind: str, mode: SamplingMode | None) -> _Compiled:
        if (found := self._own.get((kind, mode))) is not None:
            return found
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), self.weights)
        leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
        plan = self.of_mode(SamplingMode.GREEDY if mode is None else mode)
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        key = (kind, plan, structure, tuple(leaves), precision)
        if key not in _compiled:
            start = time.perf_counter()
            program = self.compile_program(kind, mode)
            _compiled[key] = _Compiled(program, time.perf_counter() - start)
        self._own[kind, mode] = _compiled[key]
        return _compiled[key]

    def _send(self, value: np.ndarray | np.generic) -> jax.Array:
        """A numpy value on all devices. The same few steer most dispatches, so they are kept there."""
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._sent:
            if len(self._sent) >= _MOST_SENT:
                self._sent.clear()
            self._sent[key] = jax.make_array_from_callback(
                value.shape, self._replicated, lambda index: np.asarray(value)[index]
            )
        return self._sent[key]

    def _chunk(self, chunk: Chunk, mode: SamplingMode) -> PromptChunk:
        plan, request = self.plan, chunk.running.request
        size, length = plan.prefill_chunk, len(request.prompt_token_ids)
        part = request.prompt_token_ids[chunk.start : chunk.start + size + 1]
        tokens = np.zeros((size + 1,), np.int32)
        tokens[: len(part)] = part
        stops = np.full((plan.max_stop_ids,), -1, np.int32)
        stops[: len(request.stop_ids)] = request.stop_ids
        limit = plan.max_depth if request.accept_limit is None else request.accept_limit
        return PromptChunk(
            slot=np.int32(chunk.running.slot % plan.group_slots),
            generation=np.int32(chunk.running.generation),
            tokens=tokens,
            start=np.int32(chunk.start),
            valid=np.int32(min(size, length - chunk.start)),
            prompt_length=np.int32(length),
            limit=np.int32(min(length + request.max_new_tokens, plan.max_length)),
            stop_ids=stops,
            sampling=SlotSettings.of(request.params, request.params.seed or 0, self._vocab_size, mode),
            accept_limit=np.int32(limit) if plan.shape_invariant else None,
        )

    def _stacked(self, chunks: Sequence[PromptChunk], idle: Sequence[bool]) -> PromptChunk:
        """The chunks of all data-parallel groups as one: as it is where there is one group, else with an axis in front.

        An idle group has the chunk of another one, at a place that is no sequence's (see `cache_capacity`).
        """
        if len(chunks) == 1:
            return chunks[0]
        nowhere = np.int32(self.plan.capacity - self.plan.prefill_chunk)
        own = [
            dataclasses.replace(chunk, active=np.bool_(True))
            if not off
            else dataclasses.replace(chunk, slot=np.int32(0), start=nowhere, valid=np.int32(1), active=np.bool_(False))
            for chunk, off in zip(chunks, idle, strict=True)
        ]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *own)


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
