"""The one implementation behind `LLM`, `generate` and `speculative_generate`: prompts in, outputs out."""

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from eagle_jax.decoding.engine import Request
from eagle_jax.decoding.ladder import Ladder
from eagle_jax.decoding.rules import SEEDED, Drafts, Rule
from eagle_jax.front.calibration import Calibration, calibrate
from eagle_jax.front.compilation_cache import keep_compiled_programs
from eagle_jax.front.engines import EnginePool, TimedEngine
from eagle_jax.front.limits import (
    capacity_bucket,
    resolve_max_model_len,
    resolve_max_num_seqs,
    slot_bucket,
    stop_id_bucket,
)
from eagle_jax.front.memory import Footprint, check_memory
from eagle_jax.front.progress import progress_bar, spinner
from eagle_jax.front.prompts import Prompt, PromptReader
from eagle_jax.front.rows import OutputRow, RowResult
from eagle_jax.front.seeds import SeedSource
from eagle_jax.loading import Draft, Target
from eagle_jax.metrics import Timing
from eagle_jax.outputs import Delta
from eagle_jax.parallel.mesh import data_groups
from eagle_jax.sampling import SamplingMode, SamplingParams
from eagle_jax.speculative_config import AUTO, Tree, check_shape, default_ladder, default_tree
from pallas_kernels.tree_attention.blocked import block_of

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
SECONDS_PER_DISPATCH = 0.1
"""Time between two looks at the tokens of a stream; the first come sooner."""
SECONDS_PER_STOP_LOOK = 0.03
"""The same where a stop string may come and nobody reads: one or two dispatches run in vain after it."""

_pools: weakref.WeakKeyDictionary[nnx.Module, EnginePool] = weakref.WeakKeyDictionary()


class Runner:
    """Decodes prompts with one target, one draft head or none, and one shape of tree or a choice of several.

    Args:
      target: the target.
      draft: the draft head; None decodes plainly.
      tree: shape of the draft trees, or "auto" or a `Ladder` to choose from; None with a draft takes its `default_tree`.
      max_model_len: bound on prompt and output; None takes what the model is made for.
      max_num_seqs: most sequences decoded side by side; None takes 8, or what the groups of devices can share from there on.
      prefill_chunk: prompt tokens run at once; None takes 64 on CPU and 256 on accelerators.
      rule: how drafts are made and accepted where tokens are sampled; checked with `tree` by `make_rule`.
      logprobs_mode: whose log-probabilities are reported, "raw_logprobs" (the model's own) or "processed_logprobs" (those of the
        distribution that is sampled).
      seed: makes the seeds of requests that give none reproducible.
      shape_invariant: whether outputs are those of plain decoding bit for bit, also in bfloat16; see `speculative_generate`.

    Raises:
      TypeError: a target or draft that was not loaded.
      ValueError: a limit that cannot be, or a draft made for another target.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        tree: Tree | Literal["auto"] | None = None,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        prefill_chunk: int | None = None,
        rule: Rule = SEEDED,
        logprobs_mode: str = LOGPROBS_MODES[0],
        seed: int | None = None,
        shape_invariant: bool = False,
    ):
        if not isinstance(target, Target):
            raise TypeError(f"target must be what load_target returns, got {target!r}")
        shape: Tree | None = None
        if draft is not None:
            shape = _check_draft(target, draft, tree)
            check_shape(rule, shape)
        if prefill_chunk is not None and (
            isinstance(prefill_chunk, bool) or not isinstance(prefill_chunk, int) or prefill_chunk < 1
        ):
            raise ValueError(f"prefill_chunk must be an integer of at least 1, got {prefill_chunk!r}")
        if logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode must be {' or '.join(map(repr, LOGPROBS_MODES))}, got {logprobs_mode!r}")
        self.target, self.draft, self.tree, self.rule = target, draft, shape, rule
        self._processed_logprobs = logprobs_mode == "processed_logprobs"
        self._seeds = SeedSource(seed, shared=jax.process_count() > 1)
        self.shape_invariant = shape_invariant
        if shape_invariant:
            if shape is None:
                raise ValueError("shape_invariant needs a draft, whose rounds plain decoding then runs too")
            if isinstance(shape, Ladder) or shape.total_tokens != shape.max_depth + 1:
                raise ValueError(f"shape_invariant works on chains, but tree is {shape}; give num_speculative_tokens")
            if not rule.exact_match:
                raise ValueError(
                    f"shape_invariant works with rejection_sample_method 'seeded', but it is {rule.rejection_sample_method!r}"
                )
        self.tokenizer = target.tokenizer
        self.max_model_len = resolve_max_model_len(max_model_len, target.config)
        self._groups = data_groups(target.mesh)
        if isinstance(shape, Ladder) and jax.process_count() > 1:
            raise ValueError(
                f"tree 'auto' is measured by the clock of one process, and there are {jax.process_count()}; give a tree or "
                "num_speculative_tokens"
            )
        self.max_num_seqs = resolve_max_num_seqs(max_num_seqs, self._groups)
        self._device = _device_of(target.model)
        self.prefill_chunk = prefill_chunk or (64 if self._device.platform == "cpu" else 256)
        self._pool = _pools.setdefault(target.model, EnginePool())

    @property
    def depth(self) -> int:
        """Drafts that one round can accept at most."""
        return 0 if self.tree is None else self.tree.max_depth

    def read(self, prompts: Any, *, chat: bool = False, **chat_options: Any) -> list[Prompt]:
        """Reads prompts; see `PromptReader`, whose further fields are `chat_options`."""
        vocab_size = self.target.config.vocab_size
        return PromptReader(tokenizer=self.tokenizer, vocab_size=vocab_size, chat=chat, **chat_options).read(prompts)

    def run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        progress: bool,
        speculate: bool = True,
        least_prompts: int = 1,
        least_tokens: int = 1,
    ) -> tuple[list[RowResult], Timing]:
        """Continues prompts to their ends; results in the order of the prompts.

        Without `speculate`, which takes a shape-invariant runner, the same program accepts no draft. With `least_prompts` and
        `least_tokens` (prompt and output) the program is the one of a call that has so many, so that calls of different sizes run
        under the same conditions.

        Raises:
          ValueError: a prompt that leaves no room for output, or parameters that the model cannot honour, before anything runs.
          InsufficientMemoryError: the caches do not fit.
        """
        if not speculate and not self.shape_invariant:
            raise ValueError("speculate=False needs shape_invariant=True, whose program can decode plainly")
        job = self._prepare(prompts, params, streaming=False, speculate=speculate)
        job.least_prompts, job.least_tokens = least_prompts, least_tokens
        looks: dict[str, Any] = (
            {"seconds_per_dispatch": SECONDS_PER_STOP_LOOK} if any(p.stop_strings for p in params) else {}
        )
        with progress_bar("Generating", len(prompts), enabled=progress) as advance:
            for delta in self._serve(job, looks, progress):
                if delta.finish_reason is not None:
                    advance(1)
        results = [row.result for row in job.rows]
        return results, job.timing(results)

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        rounds_per_dispatch: int | None = None,
        on_finish: Callable[[int, RowResult], None] | None = None,
    ) -> Iterator[Delta]:
        """Continues prompts, and yields what is new after every `rounds_per_dispatch` rounds, or every `SECONDS_PER_DISPATCH`
        (`FIRST_ROUNDS` in several processes).

        `on_finish` is called with the index and the result of each prompt that has ended.

        Raises:
          ValueError, InsufficientMemoryError: as `run`, and at once, not at the first delta.
        """
        looks: dict[str, Any] = {"seconds_per_dispatch": SECONDS_PER_DISPATCH}
        if rounds_per_dispatch is not None:
            if (
                isinstance(rounds_per_dispatch, bool)
                or not isinstance(rounds_per_dispatch, int)
                or rounds_per_dispatch < 1
            ):
                raise ValueError(f"rounds_per_dispatch must be an integer of at least 1, got {rounds_per_dispatch!r}")
            looks = {"rounds_per_dispatch": rounds_per_dispatch}
        return self._stream(self._prepare(prompts, params, streaming=True), looks, on_finish)

    def _stream(
        self, job: "_Job", looks: dict[str, Any], on_finish: Callable[[int, RowResult], None] | None
    ) -> Generator[Delta, None, None]:
        with contextlib.closing(self._serve(job, looks, progress=False)) as deltas:
            for delta in deltas:
                if delta.finish_reason is not None and on_finish is not None:
                    on_finish(delta.index, job.rows[delta.index].result)
                yield delta

    def compile(
        self, *, prompts: int, tokens: int, params: SamplingParams | None = None, progress: bool = False
    ) -> float:
        """Compiles what a call of so many prompts needs whose longest has so many tokens, output included; seconds it took."""
        mode = self._mode([SamplingParams() if params is None else params])
        shape = self._shape(prompts, tokens, stop_ids=0, mode=mode)
        with self._engine(shape) as engine:
            return _compile(engine, progress)

    def calibrate(self, *, prompts: int, tokens: int, again: bool = False) -> Calibration:
        """Times of the rungs that a greedy call of so many prompts, the longest of so many tokens with its output, chooses from.

        Args:
          prompts: in the call.
          tokens: of the longest sequence.
          again: measure even if that was done before.

        Raises:
          ValueError: the runner has no ladder.
        """
        if not isinstance(self.tree, Ladder):
            raise ValueError(f"only a ladder can be calibrated: give tree {AUTO!r}, not {self.tree}")
        with self._engine(self._shape(prompts, tokens, stop_ids=0, mode=SamplingMode.GREEDY)) as engine:
            engine.compile()
            calibration = calibrate(engine, again=again)
            engine.costs = calibration.ms
        return calibration

    def check_memory(self, *, sequences: int, max_model_len: int | None) -> None:
        """Raises InsufficientMemoryError if so many sequences of `max_model_len` (None: the least capacity) do not fit."""
        length = capacity_bucket(1, self.max_model_len) if max_model_len is None else max_model_len
        shape = _Shape(slots=sequences, max_length=length, max_stop_ids=8, mode=SamplingMode.GREEDY)
        check_memory(self._footprint(shape), length, self._weight_bytes(), self._device, self._local_devices)

    def _prepare(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, streaming: bool, speculate: bool = True
    ) -> "_Job":
        requests, rows = [], []
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            if param.seed is None and not param.greedy:
                param = dataclasses.replace(param, seed=self._seeds.draw())
            request = self._request(index, prompt, param)
            requests.append(request if speculate else dataclasses.replace(request, accept_limit=0))
            rows.append(
                OutputRow(
                    index,
                    prompt,
                    param,
                    tokenizer=self.tokenizer,
                    eos_ids=self.target.config.eos_token_ids,
                    streaming=streaming,
                )
            )
        return _Job(rows=rows, requests=requests)

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> Request:
        length, vocab_size = len(prompt.token_ids), self.target.config.vocab_size
        if length >= self.max_model_len:
            raise ValueError(
                f"prompt {index} has {length} tokens, which leaves no room for output: prompt and output together have at most "
                f"max_model_len {self.max_model_len} tokens"
            )
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(
                f"stop {list(params.stop_strings)!r} needs a tokenizer, which the target does not have; use stop_token_ids"
            )
        assert params.stop_token_ids is not None
        if beyond := [i for i in params.stop_token_ids if i >= vocab_size]:
            raise ValueError(f"stop_token_ids has {beyond[0]}; ids of this model are 0 to {vocab_size - 1}")
        for name, ids in (
            ("logit_bias", [id_ for id_, _ in params.biases]),
            ("allowed_token_ids", list(params.allowed_token_ids or ())),
        ):
            if beyond := [i for i in ids if i >= vocab_size]:
                raise ValueError(f"{name} has {beyond[0]}; ids of this model are 0 to {vocab_size - 1}")
        room = self.max_model_len - length
        eos = () if params.ignore_eos else self.target.config.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        allowed = params.allowed_token_ids
        if params.min_tokens and allowed is not None and set(allowed) <= set(stop_ids):
            raise ValueError(
                f"allowed_token_ids {list(allowed)} are all ids that end the output, which leaves nothing to emit before "
                f"min_tokens {params.min_tokens}"
            )
        return Request(
            prompt=prompt.token_ids,
            max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_ids=stop_ids,
            sampling=params,
            seed=params.seed or 0,
        )

    def _mode(self, params: Sequence[SamplingParams]) -> SamplingMode:
        """The least class of rounds that covers these requests."""
        # Synthetic acceptance draws random numbers whatever the requests ask for.
        least = SamplingMode.SAMPLING if self.rule.name == "synthetic" else SamplingMode.GREEDY
        return max(least, *(param.mode for param in params))

    def _serve(self, job: "_Job", looks: dict[str, Any], progress: bool) -> Generator[Delta, None, None]:
        """`looks`: options of `Engine.serve` that say how long a dispatch is."""
        wanted = [index for index, request in enumerate(job.requests) if request.max_new_tokens > 0]
        for index in sorted(set(range(len(job.rows))) - set(wanted)):
            yield job.rows[index].finish_empty(self.depth)
        if not wanted:
            return
        requests = [job.requests[index] for index in wanted]
        shape = self._shape(
            max(len(requests), job.least_prompts),
            max(job.least_tokens, *(len(request.prompt) + request.max_new_tokens for request in requests)),
            max(len(request.stop_ids) for request in requests),
            self._mode([request.sampling for request in requests]),
        )
        with self._engine(shape) as engine:
            job.compile_seconds = _compile(engine, progress)
            job.attention = engine.attention
            engine.prefills.seconds = 0.0
            start = time.perf_counter()
            served = engine.serve(requests, **looks)
            with contextlib.closing(served):  # type: ignore[type-var]
                for updates in served:
                    for update in updates:
                        row = job.rows[wanted[update.index]]
                        delta = row.add(update)
                        if row.must_abort:
                            engine.abort(update.index)
                        job.prefill_seconds = engine.prefills.seconds
                        job.seconds = time.perf_counter() - start
                        if delta is not None:
                            yield delta

    def _shape(self, prompts: int, tokens: int, stop_ids: int, mode: SamplingMode) -> "_Shape":
        return _Shape(
            slots=slot_bucket(prompts, self.max_num_seqs, self._groups),
            max_length=capacity_bucket(tokens, self.max_model_len),
            max_stop_ids=stop_id_bucket(stop_ids),
            mode=mode,
        )

    def _engine(self, shape: "_Shape") -> contextlib.AbstractContextManager[TimedEngine]:
        # The arrays are part of the key: a module whose parameters were replaced since then needs another engine.
        arrays = tuple(map(id, self._weights()))

        def make() -> TimedEngine:
            footprint, sharing = self._footprint(shape), self._local_devices
            check_memory(footprint, shape.max_length, self._weight_bytes(), self._device, sharing)
            return TimedEngine(
                self.target.model,
                None if self.draft is None else self.draft.head,
                tree=self.tree,
                slots=shape.slots,
                max_length=shape.max_length,
                prefill_chunk=self.prefill_chunk,
                max_stop_ids=shape.max_stop_ids,
                mode=shape.mode,
                rule=self.rule,
                processed_logprobs=self._processed_logprobs,
                shape_invariant=self.shape_invariant,
                mesh=self.target.mesh,
            )

        sampling = (self.rule, self._processed_logprobs) if shape.mode > SamplingMode.GREEDY else None
        return self._pool.engine((shape, self.tree, self.prefill_chunk, sampling, self.shape_invariant, arrays), make)

    def _weights(self) -> list[jax.Array]:
        modules = [self.target.model] if self.draft is None else [self.target.model, self.draft.head]
        return [leaf for module in modules for leaf in jax.tree.leaves(nnx.state(module))]

    def _weight_bytes(self) -> int:
        """On one device."""
        arrays = {id(array): array for array in self._weights()}.values()
        return sum(array.addressable_shards[0].data.nbytes for array in arrays)

    @property
    def _local_devices(self) -> int:
        """Devices of this process that are in use."""
        return len(self._weights()[0].sharding.addressable_devices)

    def _footprint(self, shape: "_Shape") -> Footprint:
        return Footprint(
            target=self.target.config,
            draft=None if self.draft is None else self.draft.config,
            tree=self.tree,
            target_dtype=np.dtype(self.target.model.dtype),
            draft_dtype=None if self.draft is None else np.dtype(self.draft.head.dtype),
            slots=shape.slots,
            prefill_chunk=self.prefill_chunk,
            mode=shape.mode,
            sampled_drafts=shape.mode > SamplingMode.GREEDY and self.rule.drafts is Drafts.SAMPLED,
            shards=self.target.model.shards,
            draft_shards=1 if self.draft is None else self.draft.head.shards,
            groups=self._groups,
            attention_block=block_of(self._device.platform),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    """What of an engine depends on the call."""

    slots: int
    max_length: int
    max_stop_ids: int
    mode: SamplingMode


@dataclasses.dataclass
class _Job:
    """One call."""

    rows: list[OutputRow]
    requests: list[Request]
    least_prompts: int = 1
    least_tokens: int = 1
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    seconds: float = 0.0
    attention: dict[str, str] = dataclasses.field(default_factory=dict)

    def timing(self, results: Sequence[RowResult]) -> Timing:
        output = [len(result.token_ids) for result in results]
        return Timing(
            compile_seconds=self.compile_seconds,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.seconds - self.prefill_seconds,
            prompt_tokens=sum(len(request.prompt) for request in self.requests),
            output_tokens=sum(output),
            decoded_tokens=sum(max(0, tokens - 1) for tokens in output),
            attention=self.attention,
        )


def _compile(engine: TimedEngine, progress: bool) -> float:
    start = time.perf_counter()
    keep_compiled_programs()
    with spinner("Compiling", enabled=progress):
        engine.compile()
    if isinstance(engine.plan.tree, Ladder) and engine.costs is None:
        with spinner("Calibrating", enabled=progress):
            engine.costs = calibrate(engine).ms
    return time.perf_counter() - start


def _check_draft(target: Target, draft: Draft, tree: Tree | Literal["auto"] | None) -> Tree:
    """Makes sure that they fit; returns the tree, or the head's default."""
    if not isinstance(draft, Draft):
        raise TypeError(f"draft must be what load_draft returns, got {draft!r}")
    if tree is None:
        tree = default_tree(draft)
    elif isinstance(tree, str) and tree == AUTO:
        platform = _device_of(target.model).platform
        tree = default_ladder(draft.config, platform, draft.num_speculative_tokens)
    if not isinstance(tree, Tree):
        raise TypeError(f"tree must be a TreeConfig, a StaticTree, a Ladder or {AUTO!r}, got {tree!r}")
    sizes: Mapping[str, tuple[int, int]] = {
        "hidden_size": (draft.config.target_hidden_size, target.config.hidden_size),
        "vocab_size": (draft.config.vocab_size, target.config.vocab_size),
    }
    for name, (made_for, given) in sizes.items():
        if made_for != given:
            raise ValueError(
                f"the draft head {draft.name} is for a target of {name} {made_for}, but {target.name} has {given}"
            )
    if draft.config.capture_layers[-1] > target.config.num_hidden_layers:
        raise ValueError(
            f"the draft head {draft.name} reads layer {draft.config.capture_layers[-1]} of its target, but {target.name} has "
            f"{target.config.num_hidden_layers} layers"
        )
    if tree.top_k > draft.config.draft_vocab_size:
        raise ValueError(
            f"tree top_k {tree.top_k} exceeds the {draft.config.draft_vocab_size} tokens that {draft.name} can draft"
        )
    return tree


def _device_of(model: nnx.Module) -> jax.Device:
    array = jax.tree.leaves(nnx.state(model))[0]
    return min(array.sharding.addressable_devices, key=lambda device: device.id)
