"""One run that measures plain decoding and rounds of speculative decoding side by side, and the parts of a round."""

import concurrent.futures
import dataclasses
import functools
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding.adaptive import AdaptiveSpeculation
from eagle_jax.decoding.compiler import compile_for_device
from eagle_jax.decoding.loop import init_state
from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.engine.calibration import at_length, candidate_name, measure_candidates, run_rounds
from eagle_jax.engine.config import EngineConfig
from eagle_jax.engine.core import EngineCore
from eagle_jax.engine.request import Request
from eagle_jax.measurement import loops
from eagle_jax.measurement.floor import Floor
from eagle_jax.models import DraftHead, Llama
from eagle_jax.models.cache import KVRows
from eagle_jax.sampling.params import SamplingMode

GREEDY = SamplingMode.GREEDY
COPIED_BYTES = 2**30
COPIED_BYTES_CPU = 2**28
"""Size of the array whose copying is the measure of bandwidth: far beyond every cache."""

LOOP, DIFFERENCE = "a loop of its own", "difference of loops"
CANDIDATE = "a candidate, no other allowed"
ROOM = 768
"""Tokens that slots can grow by while whole rounds are measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured. Two results can be compared if theirs are equal."""

    model: str
    """Name of the geometry, or of the checkpoint."""
    draft: str | None
    """Name of the draft head; None measures plain decoding alone."""
    random_weights: bool
    dtype: str
    batch: int
    """Sequences decoded side by side: B."""
    context: int
    """Committed tokens of each at the start."""
    tree: dict[str, Any] | str | None
    """Shape of the draft trees; "auto" measures every candidate."""
    accepted_length: float | None
    """Tokens a round for which speeds are computed. Given, not measured: acceptance is synthetic."""
    attention: str | None = None
    """Backend of tree attention that was forced; None leaves the choice to the shapes."""
    parts: bool = True
    """Whether the parts of a round are measured."""
    runs: int = 5
    steps: int | None = None
    """Steps of a measured run; None takes as many as last a fifth of a second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a round, or a whole step."""

    name: str
    ms: float
    how: str
    """`LOOP`, `DIFFERENCE` or `CANDIDATE`."""
    count: int = 1
    """How often it happens in a round; `ms` and `bytes` are of all of them."""
    bytes: int = 0
    """Read at least; 0 where that is next to nothing."""
    runs: list[float] = dataclasses.field(default_factory=list)
    """Of each measured run, of one occurrence, in ms; empty for differences."""


Say = Callable[[str], None]


class _Bench:
    def __init__(
        self,
        target: Llama,
        head: DraftHead | None,
        tree: TreeConfig | StaticTree | AdaptiveSpeculation | None,
        settings: BenchSettings,
        say: Say,
    ):
        self.target, self.head, self.tree, self.settings, self.say = target, head, tree, settings, say
        self.device = min(jax.tree.leaves(target.embed.weight)[0].devices(), key=lambda device: device.id)
        self.max_length = settings.context + ROOM
        self.floor = Floor.of(target, head, slots=settings.batch, length=settings.context)
        self.measured: dict[str, loops.Measured] = {}

    def engine(self, speculative: bool) -> EngineCore:
        config = EngineConfig(
            tree=self.tree if speculative else None,
            max_num_seqs=self.settings.batch,
            max_model_len=self.max_length,
            prefill_chunk=64 if self.device.platform == "cpu" else 256,
        )
        return EngineCore(self.target, self.head if speculative else None, config)

    def state(self, plan: Plan, weights: Weights) -> Any:
        state = init_state(plan, weights)
        placement = jax.tree.map(lambda x: x.sharding, state)
        return jax.device_put(at_length(plan, weights, state, self.settings.context), placement)

    def bandwidth(self) -> float:
        """Bytes a second that copying moves, what is read and what is written together."""
        size = COPIED_BYTES_CPU if self.device.platform == "cpu" else COPIED_BYTES
        x = jax.device_put(jnp.zeros((size // 4,), jnp.float32), self.device)
        program = jax.jit(loops.copy_loop, donate_argnums=0).lower(x, np.int32(1)).compile()

        def run(steps: int) -> tuple[float, int]:
            nonlocal x
            seconds, x = loops.timed(program, x, np.int32(steps))
            return seconds, steps

        return 2 * size / (loops.measure(run, runs=self.settings.runs).ms / 1e3)

    def rounds(self, name: str, engine: EngineCore) -> None:
        """Times `decode`, the program that generates."""
        programs = engine.programs
        most = ROOM // (programs.plan.max_depth + 1)  # however many drafts are accepted

        state = self.state(programs.plan, programs.weights)

        def run(steps: int) -> tuple[float, int]:
            # As an engine does: with buffers at new addresses a GPU would have to change its graph of the program.
            nonlocal state
            state = at_length(programs.plan, programs.weights, state, self.settings.context)
            state, measured = run_rounds(programs, GREEDY, state, min(steps, most))
            return measured

        self._measure(name, run)

    def _compile(self, function: Any, *arguments: Any) -> Any:
        return compile_for_device(function.lower(*arguments), self.device)

    def _measure(self, name: str, run: Callable[[int], tuple[float, int]]) -> None:
        self.measured[name] = loops.measure(run, runs=self.settings.runs, steps=self.settings.steps)
        self.say(f"{name}: {self.measured[name].ms:.3f} ms")

    def candidates(self, speculation: AdaptiveSpeculation, engine: EngineCore) -> list[Part]:
        """Times a round of every candidate. Plain rounds also keep features, which they would not elsewhere."""
        engine.programs.costs[GREEDY] = costs = measure_candidates(engine.programs, GREEDY, self.settings.context)
        parts = []
        for candidate, ms in zip(speculation.candidates, costs, strict=True):
            passes = 0 if candidate is None else draft_steps(candidate) * self.floor.draft_step + self.floor.extend
            parts.append(Part(name=candidate_name(candidate), ms=ms, how=CANDIDATE, bytes=self.floor.target + passes))
            self.say(f"candidate {parts[-1].name}: {ms:.3f} ms")
        return parts

    def parts(self, engine: EngineCore) -> None:
        """Times the parts of a round, each in a loop of its own."""
        assert isinstance(self.tree, TreeConfig | StaticTree)
        plan, weights, slots = engine.programs.plan, engine.programs.weights, self.settings.batch
        tree = loops.some_tree(self.tree, slots)
        config, nodes = self.target.config, self.tree.total_tokens
        shape = (slots, config.num_key_value_heads, nodes, config.head_dim)
        rows = KVRows(
            *(tuple(jnp.zeros(shape, self.target.dtype) for _ in range(config.num_hidden_layers)) for _ in "kv")
        )
        loop: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "first guesses": (functools.partial(loops.propose_loop, plan, first_level(self.tree)), ()),
            "draft": (functools.partial(loops.propose_loop, plan, self.tree), ()),
            "verify": (functools.partial(loops.verify_loop, plan), (tree,)),
            "accept and commit": (functools.partial(loops.commit_loop, plan), (tree, rows)),
        }
        state = dataclasses.replace(self.state(plan, weights), sampling=None)  # parts of greedy rounds
        shapes = jax.eval_shape(lambda x: x, state)
        with concurrent.futures.ThreadPoolExecutor(len(loop)) as pool:
            lowered = {
                name: jax.jit(function, donate_argnums=1).lower(weights, shapes, *extra, np.int32(1))
                for name, (function, extra) in loop.items()
            }
            programs = dict(
                zip(lowered, pool.map(lambda x: compile_for_device(x, self.device), lowered.values()), strict=True)
            )
        for name, (_, extra) in loop.items():

            def run(steps: int, name: str = name, extra: tuple[Any, ...] = extra) -> tuple[float, int]:
                nonlocal state
                seconds, result = loops.timed(programs[name], weights, state, *extra, np.int32(steps))
                state = result[0] if isinstance(result, tuple) else result
                return seconds, steps

            self._measure(name, run)
        if isinstance(self.tree, TreeConfig):
            self._measure_building(self.tree)

    def _measure_building(self, tree: TreeConfig) -> None:
        # As in a real pool no child outranks its parent, and the order of the scores is not the one of creation.
        random = np.random.default_rng(0).standard_exponential((self.settings.batch, tree.pool_size))
        scores = jnp.asarray(-random, jnp.float32)
        function = functools.partial(loops.build_loop, tree, self.settings.batch)
        program = self._compile(jax.jit(function), scores, np.int32(1))
        self._measure("tree building", lambda steps: (loops.timed(program, scores, np.int32(steps))[0], steps))

    def compile_time(self, engine: EngineCore) -> dict[str, Any]:
        """Seconds that the programs of an engine take, and when they are in the persistent cache."""
        seconds = engine.programs.compile(GREEDY)
        cached = None
        if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
            jax.clear_caches()
            start = time.perf_counter()
            for kind, mode in (("init", None), ("prefill", GREEDY), ("decode", GREEDY)):
                engine.programs.compile_program(kind, mode)
            cached = time.perf_counter() - start
        return {"programs": 3, "seconds": seconds, "seconds_from_cache": cached}

    def first_token_ms(self, engine: EngineCore) -> float:
        """From a prompt as long as the context to its first token, programs compiled."""
        prompt = np.random.default_rng(0).integers(0, self.target.config.vocab_size, self.settings.context).tolist()
        times = []
        for _ in range(self.settings.runs + 1):
            start = time.perf_counter()
            for _ in engine.run([Request(request_id="prompt", prompt_token_ids=prompt, max_new_tokens=1)]):
                times.append(time.perf_counter() - start)
        return float(np.median(times[1:])) * 1e3


def first_level(tree: TreeConfig | StaticTree) -> TreeConfig | StaticTree:
    """The tree cut to the children of its root."""
    if isinstance(tree, StaticTree):
        return StaticTree.from_paths([path for path in tree.paths if len(path) == 1])
    return TreeConfig(total_tokens=min(tree.top_k, tree.total_tokens - 1) + 1, depth=0, top_k=tree.top_k)


def draft_steps(tree: TreeConfig | StaticTree) -> int:
    """Passes of the head that expand nodes, the extend step apart."""
    return tree.depth if isinstance(tree, TreeConfig) else tree.max_depth - 1


def run(
    target: Llama,
    head: DraftHead | None,
    tree: TreeConfig | StaticTree | AdaptiveSpeculation | None,
    settings: BenchSettings,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Measures, and returns a report that can be written as JSON.

    Args:
      target: the target.
      head: the draft head; None measures plain decoding alone.
      tree: shape of the draft trees, or several candidates, each of which is then measured; None exactly when there is no head.
      settings: what to measure; the report repeats them.
      say: is told about every measurement when it is done.
    """
    bench = _Bench(target, head, tree, settings, say)
    bandwidth = bench.bandwidth()
    say(f"copy bandwidth: {bandwidth / 1e9:.0f} GB/s")
    plain = bench.engine(speculative=False)
    compiled = {"plain": bench.compile_time(plain)}
    say(f"plain decoding compiled in {compiled['plain']['seconds']:.1f} s")
    bench.rounds("plain step", plain)
    first_token = {"plain": bench.first_token_ms(plain)}
    dispatch = {"plain": bench.measured["plain step"].dispatch_ms}
    del plain
    steps = [Part(name="plain step", ms=bench.measured["plain step"].ms, how=LOOP, bytes=bench.floor.target,
                  runs=bench.measured["plain step"].runs)]  # fmt: skip
    parts: list[Part] = []
    if tree is not None:
        engine = bench.engine(speculative=True)
        compiled["speculative"] = bench.compile_time(engine)
        say(f"speculative decoding compiled in {compiled['speculative']['seconds']:.1f} s")
        if isinstance(tree, AdaptiveSpeculation):
            parts = bench.candidates(tree, engine)
        else:
            bench.rounds("round", engine)
            dispatch["speculative"] = bench.measured["round"].dispatch_ms
        first_token["speculative"] = bench.first_token_ms(engine)
    if tree is not None and not isinstance(tree, AdaptiveSpeculation):
        floor, count = bench.floor, draft_steps(tree)
        whole = floor.extend + count * floor.draft_step + floor.target
        steps.append(
            Part(name="round", ms=bench.measured["round"].ms, how=LOOP, bytes=whole, runs=bench.measured["round"].runs)
        )
        if settings.parts:
            bench.parts(engine)
            parts = round_parts(bench.measured, floor, count)
    return {
        "settings": dataclasses.asdict(settings),
        "device": {"platform": bench.device.platform, "kind": bench.device.device_kind},
        "jax": jax.__version__,
        "copy_bandwidth_bytes_per_s": bandwidth,
        "steps": [_part(part, bandwidth) for part in steps],
        "parts": [_part(part, bandwidth) for part in parts],
        "speed": speed(steps, settings),
        "compilation": compiled,
        "first_token_ms": first_token,
        "dispatch_ms": dispatch,
        "peak_memory_bytes": peak_memory(bench.device),
    }


def round_parts(measured: dict[str, loops.Measured], floor: Floor, count: int) -> list[Part]:
    """The parts of a round from what loops took; what is not accounted for comes last."""
    ms = {name: value.ms for name, value in measured.items()}
    building = ms.get("tree building", 0.0)
    parts = [
        Part(name="extend", ms=ms["first guesses"], how=LOOP, bytes=floor.extend, runs=measured["first guesses"].runs),
        Part(
            name="draft steps",
            ms=max(ms["draft"] - ms["first guesses"] - building, 0.0) if count else 0.0,
            how=DIFFERENCE,
            count=count,
            bytes=count * floor.draft_step,
        ),
        Part(name="tree building", ms=building, how=LOOP),
        Part(name="verify", ms=ms["verify"], how=LOOP, bytes=floor.target, runs=measured["verify"].runs),
        Part(name="accept and commit", ms=ms["accept and commit"], how=LOOP),
    ]
    rest = ms["round"] - ms["draft"] - ms["verify"] - ms["accept and commit"]
    return [*parts, Part(name="rest", ms=rest, how=DIFFERENCE)]


def speed(steps: list[Part], settings: BenchSettings) -> dict[str, Any]:
    """Tokens a second of all sequences together, by the times of the steps."""
    ms = {part.name: part.ms for part in steps}
    per_second = 1e3 * settings.batch
    result: dict[str, Any] = {"plain_tokens_per_second": per_second / ms["plain step"]}
    if "round" in ms:
        result["break_even_accepted_length"] = ms["round"] / ms["plain step"]
        if settings.accepted_length is not None:
            result["acceptance"] = "synthetic"
            result["accepted_length"] = settings.accepted_length
            result["speculative_tokens_per_second"] = settings.accepted_length * per_second / ms["round"]
            result["speed_up"] = settings.accepted_length / result["break_even_accepted_length"]
    return result


def peak_memory(device: jax.Device) -> int:
    """Most bytes in use so far: of the device, or of the process where the device is the CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _part(part: Part, bandwidth: float) -> dict[str, Any]:
    floor = part.bytes / bandwidth * 1e3
    share = floor / part.ms if part.bytes and part.ms else None
    return {**dataclasses.asdict(part), "floor_ms": floor, "share_of_copy_bandwidth": share}
