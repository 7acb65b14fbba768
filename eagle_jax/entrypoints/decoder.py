"""The one implementation behind `LLM` and the plain functions: prompts become requests, which drain an engine of the call."""

import contextlib
import dataclasses
import itertools
import time
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from eagle_jax.decoding.adaptive import AdaptiveSpeculation
from eagle_jax.decoding.rules import Drafts
from eagle_jax.engine.calibration import Calibration, calibrate
from eagle_jax.engine.compilation_cache import keep_compiled_programs
from eagle_jax.engine.config import SMALLEST_CAPACITY, EngineConfig, device_of
from eagle_jax.engine.core import EngineCore, StepTimes
from eagle_jax.engine.memory import Footprint, check_memory
from eagle_jax.engine.outputs import OutputProcessor
from eagle_jax.engine.pool import EnginePool
from eagle_jax.engine.request import Request, check_params
from eagle_jax.engine.seeds import SeedSource
from eagle_jax.entrypoints.progress import progress_bar, spinner
from eagle_jax.entrypoints.prompts import Prompt, PromptReader
from eagle_jax.loading import Draft, Target
from eagle_jax.metrics import Timing
from eagle_jax.outputs import Delta, RequestOutput
from eagle_jax.parallel.mesh import data_groups
from eagle_jax.sampling import SamplingMode, SamplingParams
from eagle_jax.speculative_config import AUTO
from pallas_kernels.tree_attention.blocked import block_of

SECONDS_PER_DISPATCH = 0.1
"""Time between two looks at the tokens of a stream; the first come sooner."""
SECONDS_PER_STOP_LOOK = 0.03
"""The same where a stop string may come and nobody reads: what is decoded behind it is lost."""

_pools: weakref.WeakKeyDictionary[nnx.Module, EnginePool] = weakref.WeakKeyDictionary()


class Decoder:
    """A target, a draft head or none, and a configuration: makes requests and engines.

    Args:
      target: the target.
      draft: the draft head; None exactly when `config` has no tree.
      config: see `EngineConfig.resolve`.
    """

    def __init__(self, target: Target, draft: Draft | None, config: EngineConfig):
        self.target, self.draft, self.config = target, draft, config
        self._seeds = SeedSource(config.seed, shared=jax.process_count() > 1)
        self._groups = data_groups(target.mesh)
        self._pool = _pools.setdefault(target.model, EnginePool())
        self._numbers = itertools.count()

    def read(self, prompts: Any, *, chat: bool = False, **chat_options: Any) -> list[Prompt]:
        """Reads prompts; see `PromptReader`, whose further fields are `chat_options`."""
        vocab_size = self.target.config.vocab_size
        return PromptReader(tokenizer=self.target.tokenizer, vocab_size=vocab_size, chat=chat, **chat_options).read(
            prompts
        )

    def request(self, prompt: Prompt, params: SamplingParams, *, index: int = 0, **fields: Any) -> Request:
        """The request of a prompt; its seed is drawn where the parameters give none.

        Args:
          prompt: the prompt.
          params: how it is continued.
          index: place of the prompt in its call.
          **fields: further fields of `Request`; without `request_id` it is a number.

        Raises:
          ValueError: a prompt that leaves no room for output, or parameters that the model cannot honour.
        """
        config, length = self.config, len(prompt.token_ids)
        if length >= config.max_model_len:
            raise ValueError(
                f"prompt {index} has {length} tokens, which leaves no room for output: prompt and output together have at most "
                f"max_model_len {config.max_model_len} tokens"
            )
        check_params(params, self.target.config, has_tokenizer=self.target.tokenizer is not None)
        if params.seed is None and not params.greedy:
            params = dataclasses.replace(params, seed=self._seeds.draw())
        room = config.max_model_len - length
        return Request(
            prompt_token_ids=prompt.token_ids,
            prompt=prompt.text,
            max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            params=params,
            eos_token_ids=self.target.config.eos_token_ids,
            index=index,
            **{"request_id": str(next(self._numbers)), "least_mode": self.mode_of(params), **fields},
        )

    def run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        progress: bool,
        speculate: bool = True,
        least_prompts: int = 1,
        least_tokens: int = 1,
    ) -> tuple[list[RequestOutput], Timing]:
        """Continues prompts to their ends; outputs in the order of the prompts.

        Without `speculate`, which takes a shape-invariant configuration, the same program accepts no draft. With `least_prompts`
        and `least_tokens` (prompt and output) the program is the one of a call that has so many, so that calls of different sizes
        run under the same conditions.

        Raises:
          ValueError: as `request`, before anything runs.
          InsufficientMemoryError: the caches do not fit.
          FloatingPointError: the target's logits have no finite value somewhere.
        """
        if not speculate and not self.config.shape_invariant:
            raise ValueError("speculate=False needs shape_invariant=True, whose program can decode plainly")
        fields: dict[str, Any] = {} if speculate else {"accept_limit": 0}
        if any(p.stop_strings for p in params):
            fields["seconds_per_dispatch"] = SECONDS_PER_STOP_LOOK
        call = _Call(self._requests(prompts, params, **fields), least_prompts, least_tokens)
        outputs: dict[int, RequestOutput] = {}
        with progress_bar("Generating", len(prompts), enabled=progress) as advance:
            for delta in self._drain(call, progress):
                if delta.output is not None:
                    outputs[delta.index] = delta.output
                    advance(1)
        results = [outputs[index] for index in range(len(prompts))]
        return results, call.timing(results)

    def stream(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, rounds_per_dispatch: int | None = None
    ) -> Generator[Delta, None, None]:
        """Continues prompts, and yields what is new: the first token as soon as the prompt is read, then after every
        `rounds_per_dispatch` rounds, or every `SECONDS_PER_DISPATCH` (`FIRST_ROUNDS` in several processes).

        Raises:
          ValueError: as `request`, and at once, not at the first delta.
          InsufficientMemoryError, FloatingPointError: as `run`.
        """
        fields: dict[str, Any] = {"seconds_per_dispatch": SECONDS_PER_DISPATCH}
        if rounds_per_dispatch is not None:
            if (
                isinstance(rounds_per_dispatch, bool)
                or not isinstance(rounds_per_dispatch, int)
                or rounds_per_dispatch < 1
            ):
                raise ValueError(f"rounds_per_dispatch must be an integer of at least 1, got {rounds_per_dispatch!r}")
            fields = {"rounds_per_dispatch": rounds_per_dispatch}
        return self._drain(_Call(self._requests(prompts, params, streaming=True, **fields)), progress=False)

    def compile(
        self, *, prompts: int, tokens: int, params: SamplingParams | None = None, progress: bool = False
    ) -> float:
        """Compiles what a call of so many prompts needs whose longest has so many tokens, output included; seconds it took."""
        mode = self.mode_of(SamplingParams() if params is None else params)
        with self._engine(self._config(prompts, tokens)) as engine:
            return self.prepare(engine, [mode], progress=progress)

    def calibrate(self, *, prompts: int, tokens: int, again: bool = False) -> Calibration:
        """Times of the candidates of a greedy call of so many prompts, the longest of so many tokens with its output.

        Args:
          prompts: in the call.
          tokens: of the longest sequence.
          again: measure even if that was done before.

        Raises:
          ValueError: there is no choice.
        """
        if not isinstance(self.config.tree, AdaptiveSpeculation):
            raise ValueError(
                f"only a choice of several trees can be calibrated: give tree {AUTO!r}, not {self.config.tree}"
            )
        mode = SamplingMode.GREEDY
        with self._engine(self._config(prompts, tokens)) as engine:
            engine.programs.compile(mode)
            calibration = calibrate(engine.programs, mode, again=again)
            engine.programs.costs[mode] = calibration.ms
        return calibration

    def check_memory(self, *, sequences: int, max_model_len: int | None) -> None:
        """Raises InsufficientMemoryError if so many sequences of `max_model_len` (None: the least capacity) do not fit."""
        length = min(SMALLEST_CAPACITY, self.config.max_model_len) if max_model_len is None else max_model_len
        self._check_memory(
            dataclasses.replace(self.config, max_num_seqs=sequences, max_model_len=length), SamplingMode.GREEDY
        )

    def make_engine(self, config: EngineConfig, mode: SamplingMode = SamplingMode.GREEDY) -> EngineCore:
        """A new engine; `mode` is the highest that its requests are expected to have.

        Raises:
          InsufficientMemoryError: its caches do not fit.
        """
        self._check_memory(config, mode)
        outputs = OutputProcessor(self.target.tokenizer, config.max_depth)
        head = None if self.draft is None else self.draft.head
        return EngineCore(self.target.model, head, config, outputs=outputs, mesh=self.target.mesh)

    def prepare(self, engine: EngineCore, modes: Sequence[SamplingMode], *, progress: bool = False) -> float:
        """Compiles what requests of some modes need, and calibrates it where there is a choice; seconds it took."""
        start = time.perf_counter()
        keep_compiled_programs()
        with spinner("Compiling", enabled=progress):
            for mode in modes:
                engine.programs.compile(mode)
        missing = [mode for mode in modes if mode not in engine.programs.costs]
        if isinstance(self.config.tree, AdaptiveSpeculation) and missing:
            with spinner("Calibrating", enabled=progress):
                for mode in missing:
                    engine.programs.costs[mode] = calibrate(engine.programs, mode).ms
        return time.perf_counter() - start

    def mode_of(self, params: SamplingParams) -> SamplingMode:
        """The least class of rounds that a request runs in: synthetic acceptance draws random numbers whatever it asks for."""
        synthetic = self.config.rule.name == "synthetic"
        return max(params.mode, SamplingMode.SAMPLING if synthetic else SamplingMode.GREEDY)

    def _requests(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], **fields: Any) -> list[Request]:
        """Those of a call: all run in rounds of one mode, so that the call needs the programs of one."""
        mode = max(self.mode_of(param) for param in params)
        return [
            self.request(prompt, param, index=index, least_mode=mode, **fields)
            for index, (prompt, param) in enumerate(zip(prompts, params, strict=True))
        ]

    def _drain(self, call: "_Call", progress: bool) -> Generator[Delta, None, None]:
        wanted = [request for request in call.requests if request.max_new_tokens > 0]
        empty = OutputProcessor(self.target.tokenizer, self.config.max_depth)
        for request in call.requests:
            if request.max_new_tokens == 0:  # takes no engine, which there may be no memory for
                empty.add(request)
                yield empty.end(request.request_id, "length")
        if not wanted:
            return
        longest = max(len(request.prompt_token_ids) + request.max_new_tokens for request in wanted)
        config = self._config(
            max(len(wanted), call.least_prompts),
            max(longest, call.least_tokens),
            max(len(request.stop_ids) for request in wanted),
        )
        with self._engine(config, mode := wanted[0].mode) as engine:
            call.compile_seconds = self.prepare(engine, [mode], progress=progress)
            call.attention, call.times = engine.programs.attention, engine.times
            engine.times.prefill = engine.times.decode = 0.0
            for delta in engine.run(wanted):
                if delta.error is not None:
                    raise delta.error
                yield delta

    def _config(self, prompts: int, tokens: int, stop_ids: int = 0) -> EngineConfig:
        return self.config.for_call(prompts=prompts, tokens=tokens, stop_ids=stop_ids, groups=self._groups)

    def _engine(
        self, config: EngineConfig, mode: SamplingMode = SamplingMode.GREEDY
    ) -> contextlib.AbstractContextManager[EngineCore]:
        # The arrays are part of the key: a module whose parameters were replaced since then needs another engine.
        arrays = tuple(map(id, self._weights()))
        return self._pool.engine(
            (dataclasses.replace(config, seed=None), self.target.tokenizer, arrays),
            lambda: self.make_engine(config, mode),
        )

    def _weights(self) -> list[jax.Array]:
        modules = [self.target.model] if self.draft is None else [self.target.model, self.draft.head]
        return [leaf for module in modules for leaf in jax.tree.leaves(nnx.state(module))]

    def _check_memory(self, config: EngineConfig, mode: SamplingMode) -> None:
        device, weights = device_of(self.target.model), self._weights()
        footprint = Footprint(
            target=self.target.config,
            draft=None if self.draft is None else self.draft.config,
            tree=config.tree,
            target_dtype=np.dtype(self.target.model.dtype),
            draft_dtype=None if self.draft is None else np.dtype(self.draft.head.dtype),
            slots=config.max_num_seqs,
            prefill_chunk=config.prefill_chunk,
            mode=mode,
            sampled_drafts=mode > SamplingMode.GREEDY and config.rule.drafts is Drafts.SAMPLED,
            shards=self.target.model.shards,
            draft_shards=1 if self.draft is None else self.draft.head.shards,
            groups=self._groups,
            attention_block=block_of(device.platform),
        )
        own = {id(array): array.addressable_shards[0].data.nbytes for array in weights}
        sharing = len(weights[0].sharding.addressable_devices)  # devices of this process
        check_memory(footprint, config.max_model_len, sum(own.values()), device, sharing)


@dataclasses.dataclass
class _Call:
    """What is known of a call while it runs."""

    requests: list[Request]
    least_prompts: int = 1
    least_tokens: int = 1
    compile_seconds: float = 0.0
    times: StepTimes = dataclasses.field(default_factory=StepTimes)
    attention: dict[str, str] = dataclasses.field(default_factory=dict)

    def timing(self, outputs: Sequence[RequestOutput]) -> Timing:
        tokens = [len(output.outputs[0].token_ids) for output in outputs]
        return Timing(
            compile_seconds=self.compile_seconds,
            prefill_seconds=self.times.prefill,
            decode_seconds=self.times.decode,
            prompt_tokens=sum(len(request.prompt_token_ids) for request in self.requests),
            output_tokens=sum(tokens),
            decoded_tokens=sum(max(0, count - 1) for count in tokens),
            attention=self.attention,
        )
