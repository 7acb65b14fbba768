"""`LLM`: a target, optionally with a draft head, behind the interface that vLLM users know."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.decoding.rules import SEEDED
from eagle_jax.engine.config import LOGPROBS_MODES, EngineConfig
from eagle_jax.entrypoints.decoder import Decoder
from eagle_jax.entrypoints.keywords import params_of_each
from eagle_jax.entrypoints.progress import at_terminal
from eagle_jax.entrypoints.prompts import Prompt
from eagle_jax.entrypoints.speculators import find_target
from eagle_jax.entrypoints.vllm_keywords import check_vllm_keywords
from eagle_jax.loading import Draft, Target, load_draft, load_target, resolve
from eagle_jax.metrics import Counter, CumulativeCounters, Vector
from eagle_jax.outputs import Delta, RequestOutput
from eagle_jax.parallel import make_mesh
from eagle_jax.sampling import SamplingParams
from eagle_jax.sampling.params import check_seed
from eagle_jax.speculative_config import SpeculativeConfig
from eagle_jax.text import Tokenizer

_log = logging.getLogger(__name__)


class LLM:
    """A model that continues prompts, with EAGLE speculative decoding if a draft head is given.

    Keywords of vLLM's `LLM` and what becomes of them:

    - *work*: model, tokenizer, skip_tokenizer_init, dtype, revision, download_dir, max_model_len, max_num_seqs, seed,
      logprobs_mode, shape_invariant, speculative_config, use_tqdm_on_load, tensor_parallel_size, data_parallel_size, as described
      below;
    - *have no meaning*, change no result, and are accepted with one warning that names them: async_scheduling, block_size,
      compilation_config, cuda_graph_sizes, disable_async_output_proc, disable_cascade_attn, disable_custom_all_reduce,
      disable_log_stats, distributed_executor_backend, enable_chunked_prefill, enable_prefix_caching, enforce_eager,
      gpu_memory_utilization, long_prefill_token_threshold, max_long_partial_prefills, max_num_batched_tokens,
      max_num_partial_prefills, max_parallel_loading_workers, max_seq_len_to_capture, num_gpu_blocks_override, preemption_mode,
      swap_space, worker_use_ray;
    - *accepted at one value*, any other raises ValueError: pipeline_parallel_size=1, enable_expert_parallel=False,
      quantization=None, kv_cache_dtype="auto", trust_remote_code=False,
      tokenizer_mode="auto", load_format="auto", runner="auto" or "generate", task=None, "auto" or "generate",
      generation_config="vllm", hf_overrides=None, rope_scaling=None, rope_theta=None,
      cpu_offload_gb=0, enable_lora=False, logits_processors=None;
    - *all others* raise TypeError.

    For the number of compiled programs see `eagle_jax.entrypoints.functions`; `warmup` compiles them ahead.

    Args:
      model: folder, `.gguf` file or repository of the target; or what `load_target` returned, to which `dtype`, `revision`,
        `download_dir` and `ignore_config_keys` then do not apply.
      dtype: "auto" (float32 on CPU, float16 on NVIDIA GPUs before Ampere, bfloat16 on other accelerators), "float32", "bfloat16"
        or "float16".
      revision: branch, tag or commit of the target's repository.
      download_dir: where repositories are kept, instead of the hub's own cache.
      tokenizer: a folder or repository, or a `Tokenizer`, in place of the target's own.
      skip_tokenizer_init: use no tokenizer: prompts are token ids, and there are no texts.
      max_model_len: bound on prompt and output together; None takes what the model is made for. Memory is taken for what the
        calls need, not for this.
      max_num_seqs: most sequences decoded side by side, by all groups together (None: 8, and at least one a group); any number of
        prompts can be given. A call with fewer prompts uses the next power of two.
      seed: makes the seeds of requests that give none a reproducible sequence; None takes fresh ones. Outputs report them.
      logprobs_mode: whose log-probabilities are reported: "raw_logprobs", the model's own, or "processed_logprobs", those of the
        distribution that is sampled.
      shape_invariant: outputs do not depend, not by a bit, on whether drafts are accepted: those of `generate` are the same
        with and without `speculate`, also in bfloat16. See `eagle_jax.speculative_generate`; chains only.
      tensor_parallel_size: devices that share the weights. With several processes (`eagle_jax.parallel.join_processes`) they may
        be anybody's; every process then runs the same script and gets the same results. See docs/parallelism.md.
      data_parallel_size: groups of so many devices; each holds all weights and decodes its share of the `max_num_seqs` sequences.
      speculative_config: the draft head and its trees; see `SpeculativeConfig.from_dict`. A `model` that is a draft head in the
        speculators format needs none: it names its target, which is loaded as the model, and how many tokens to draft.
      prefill_chunk: prompt tokens run at once; None takes 64 on CPU and 256 on accelerators.
      ignore_config_keys: unknown keys of the target's config.json that are known not to matter.
      use_tqdm_on_load: draw progress bars while loading if standard error is a terminal.
      **vllm_keywords: further keywords of vLLM, according to the table.

    Raises:
      ValueError: an argument or a configuration that is not supported, a checkpoint that cannot be read (`CheckpointError`).
      TypeError: an unknown keyword.
      InsufficientMemoryError: not even one sequence of `max_model_len` (with `max_num_seqs`: so many), where that was given, fits
        into the device's memory. Without these the same is checked in each call that needs larger caches.
    """

    def __init__(
        self,
        model: str | Path | Target,
        *,
        dtype: object = "auto",
        revision: str | None = None,
        download_dir: str | Path | None = None,
        tokenizer: str | Path | Tokenizer | None = None,
        skip_tokenizer_init: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        seed: int | None = None,
        logprobs_mode: str = LOGPROBS_MODES[0],
        shape_invariant: bool = False,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        prefill_chunk: int | None = None,
        ignore_config_keys: Sequence[str] = (),
        use_tqdm_on_load: bool = True,
        **vllm_keywords: Any,
    ):
        check_vllm_keywords(vllm_keywords)
        mesh = None if isinstance(model, Target) else make_mesh(tensor_parallel_size, data_parallel_size)
        if seed is not None:
            check_seed(seed)
        if skip_tokenizer_init and tokenizer is not None:
            raise ValueError("skip_tokenizer_init and tokenizer exclude each other")
        if not isinstance(model, Target):
            model, speculative_config, revision = find_target(
                model, speculative_config, revision=revision, download_dir=download_dir
            )
        speculation = None if speculative_config is None else SpeculativeConfig.from_dict(speculative_config)
        progress = bool(use_tqdm_on_load) and at_terminal()
        if isinstance(model, Target):
            given = {
                "dtype": dtype != "auto",
                "revision": revision is not None,
                "ignore_config_keys": bool(ignore_config_keys),
                "tensor_parallel_size": tensor_parallel_size != 1,
                "data_parallel_size": data_parallel_size != 1,
            }
            if extra := [name for name, is_given in given.items() if is_given]:
                raise ValueError(
                    f"{', '.join(extra)} cannot be given with a model that is loaded; give them to load_target"
                )
            target = model
        else:
            target = load_target(
                model,
                dtype=dtype,
                revision=revision,
                download_dir=download_dir,
                ignore_config_keys=ignore_config_keys,
                mesh=mesh,
                progress=progress,
            )
        if skip_tokenizer_init:
            target = dataclasses.replace(target, tokenizer=None)
        elif tokenizer is not None:
            target = dataclasses.replace(target, tokenizer=_load_tokenizer(tokenizer, download_dir))
        draft = None if speculation is None else _load_draft(speculation, target, download_dir, progress)
        config = EngineConfig.resolve(
            target,
            draft,
            tree=None if speculation is None else speculation.tree,
            rule=SEEDED if speculation is None else speculation.rule,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            prefill_chunk=prefill_chunk,
            logprobs_mode=logprobs_mode,
            seed=seed,
            shape_invariant=shape_invariant,
        )
        self.decoder = Decoder(target, draft, config)
        if max_model_len is not None or max_num_seqs is not None:
            self.decoder.check_memory(sequences=max_num_seqs or 1, max_model_len=max_model_len)
        self._counters = CumulativeCounters(None if draft is None else config.max_depth)
        self._warned = False

    @property
    def target(self) -> Target:
        """The loaded target."""
        return self.decoder.target

    @property
    def draft(self) -> Draft | None:
        """The loaded draft head, if there is one."""
        return self.decoder.draft

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.decoder.config.max_model_len

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if there is one."""
        return self.decoder.target.tokenizer

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues prompts; results in the order of the prompts.

        Args:
          prompts: a prompt or a list of prompts: texts, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}`. A list of ids
            is one prompt. A list of chat messages goes through the chat template, as in `chat`.
          sampling_params: for all prompts, or one for each; None takes `SamplingParams()`.
          speculate: False accepts no draft, so decodes plainly; only with `shape_invariant=True`.
          use_tqdm: draw progress bars if standard error is a terminal.

        Raises:
          ValueError, TypeError, InsufficientMemoryError: as `eagle_jax.generate`, before anything is run.
        """
        return self._generate(self.decoder.read(prompts), sampling_params, use_tqdm, speculate)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers chats; results in the order of the chats.

        Args:
          messages: a list of messages `{"role": ..., "content": ...}`, or a list of such lists.
          sampling_params: as in `generate`.
          add_generation_prompt: end the rendered chat with the opening of the assistant's answer.
          chat_template_kwargs: further variables of the chat template.
          use_tqdm: as in `generate`.

        Raises:
          ValueError: as `generate`; there is no chat template, or it refuses the messages.
          TypeError: something that is no list of messages.
          InsufficientMemoryError: as `generate`.
        """
        chats = self._chats(messages)
        read = self.decoder.read(
            chats, add_generation_prompt=add_generation_prompt, template_variables=chat_template_kwargs
        )
        return self._generate(read, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rounds_per_dispatch: int | None = None,
    ) -> Iterator[Delta]:
        """Continues prompts and yields what is new about ten times a second; see `eagle_jax.stream_generate`.

        Args:
          prompts: as in `generate`.
          sampling_params: as in `generate`.
          rounds_per_dispatch: rounds between two looks at the tokens; None: as many as take about a tenth of a second, or four
            with several processes.

        Raises:
          ValueError, TypeError, InsufficientMemoryError: as `generate`; the first two at once, not at the first delta.
        """
        read = self.decoder.read(prompts)
        params = params_of_each(sampling_params, len(read))
        deltas = self.decoder.stream(read, params, rounds_per_dispatch=rounds_per_dispatch)

        def counted() -> Iterator[Delta]:
            with contextlib.closing(deltas):
                for delta in deltas:
                    if delta.output is not None:
                        self.count(delta.output)
                    yield delta

        return counted()

    def get_metrics(self) -> list[Counter | Vector]:
        """Counters over the life of this object, under vLLM's names; those of drafting only with a draft head.

        `vllm:prompt_tokens`, `vllm:generation_tokens`, `vllm:spec_decode_num_drafts`, `vllm:spec_decode_num_draft_tokens`,
        `vllm:spec_decode_num_accepted_tokens` and `vllm:spec_decode_num_accepted_tokens_per_pos`; see `eagle_jax.metrics`. When
        they say that head and target hardly belong together, a warning is logged once.
        """
        return self._counters.read()

    def warmup(
        self, *, num_prompts: int = 1, num_tokens: int = 256, sampling_params: SamplingParams | None = None
    ) -> float:
        """Compiles the programs of a call ahead, and calibrates them where `tree` is "auto".

        Args:
          num_prompts: prompts in the call.
          num_tokens: tokens of the longest prompt with its output.
          sampling_params: like those of the call: greedy, sampling, or with penalties or log-probabilities; None is greedy.

        Returns:
          Seconds it took, next to nothing if the programs were there.

        Raises:
          ValueError: a number below 1, or more tokens than `max_model_len`.
          InsufficientMemoryError: the caches do not fit.
        """
        for name, value in (("num_prompts", num_prompts), ("num_tokens", num_tokens)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if num_tokens > max(self.max_model_len, 256):
            raise ValueError(f"num_tokens {num_tokens} exceeds max_model_len {self.max_model_len}")
        return self.decoder.compile(prompts=num_prompts, tokens=num_tokens, params=sampling_params, progress=True)

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        speculate: bool = True,
    ) -> list[RequestOutput]:
        params = params_of_each(sampling_params, len(prompts))
        outputs, _ = self.decoder.run(prompts, params, progress=use_tqdm, speculate=speculate)
        for output in outputs:
            self.count(output, speculate)
        return outputs

    def count(self, output: RequestOutput, speculate: bool = True) -> None:
        """Adds an output that has ended to the counters of `get_metrics`."""
        # Rounds that were told to accept nothing say nothing about the head.
        metrics = output.metrics if speculate else None
        self._counters.add(metrics, len(output.prompt_token_ids), len(output.outputs[0].token_ids))
        if not self._warned and (text := self._counters.warning) is not None:
            self._warned = True
            assert self.draft is not None
            _log.warning("%s: %s", self.draft.name, text)

    @staticmethod
    def _chats(messages: Sequence[Any]) -> list[Any]:
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise TypeError(f"messages must be a list of messages, or a list of such lists, got {messages!r}")
        if not messages:
            raise ValueError("messages is empty")
        chats = [messages] if isinstance(messages[0], Mapping) else list(messages)
        for index, chat in enumerate(chats):
            if not chat or isinstance(chat, str) or not all(isinstance(m, Mapping) and "role" in m for m in chat):
                raise TypeError(
                    f"chat {index} must be a list of messages {{'role': ..., 'content': ...}}, got {chat!r}"
                )
        return chats


def _load_tokenizer(tokenizer: str | Path | Tokenizer, download_dir: str | Path | None) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    loaded = Tokenizer.from_folder(resolve(tokenizer, download_dir=download_dir))
    if loaded is None:
        raise ValueError(f"tokenizer {str(tokenizer)!r} holds no tokenizer.json")
    return loaded


def _load_draft(config: SpeculativeConfig, target: Target, download_dir: str | Path | None, progress: bool) -> Draft:
    if isinstance(config.model, Draft):
        return config.model
    return load_draft(
        config.model,
        target,
        revision=config.revision,
        download_dir=download_dir,
        method=config.method,
        rope_theta=config.rope_theta,
        layer_id_convention=config.layer_id_convention,
        config_overrides=config.config_overrides,
        tensor_parallel_size=config.draft_tensor_parallel_size,
        progress=progress,
    )
