"""Which of vLLM's `LLM(...)` keywords mean something here, as data."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Required:
    """A keyword that would change results: only these values can be honoured."""

    values: tuple[Any, ...]
    advice: str = ""


WITHOUT_MEANING = (
    "async_scheduling",
    "block_size",
    "compilation_config",
    "cuda_graph_sizes",
    "disable_async_output_proc",
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "disable_log_stats",
    "distributed_executor_backend",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "long_prefill_token_threshold",
    "max_long_partial_prefills",
    "max_num_batched_tokens",
    "max_num_partial_prefills",
    "max_parallel_loading_workers",
    "max_seq_len_to_capture",
    "num_gpu_blocks_override",
    "preemption_mode",
    "swap_space",
    "worker_use_ray",
)
"""Settings of vLLM's scheduler, memory manager and CUDA graphs. They never change a result: accepted, with one notice."""

ONE_VALUE: Mapping[str, Required] = {
    "pipeline_parallel_size": Required((1,), "split the model by tensor_parallel_size"),
    "enable_expert_parallel": Required((False,)),
    "quantization": Required((None,), "give an unquantised or a GGUF checkpoint"),
    "kv_cache_dtype": Required(("auto",), "the cache has the dtype of the model"),
    "trust_remote_code": Required((False,), "no code is ever taken from a checkpoint"),
    "tokenizer_mode": Required(("auto",)),
    "load_format": Required(("auto",), "the format is seen from the files"),
    "runner": Required(("auto", "generate")),
    "task": Required((None, "auto", "generate")),
    "generation_config": Required(
        ("vllm",), "sampling defaults are never taken from the model, only its end-of-sequence ids are"
    ),
    "hf_overrides": Required((None, {})),
    "rope_scaling": Required((None, {}), "set it in the model's config.json"),
    "rope_theta": Required((None,), "set it in the model's config.json"),
    "cpu_offload_gb": Required((0,)),
    "enable_lora": Required((False,)),
    "logits_processors": Required((None, [])),
}
"""Accepted at the value that asks for nothing; another one raises."""


def check_vllm_keywords(keywords: Mapping[str, Any]) -> None:
    """Accepts what has no meaning here with one warning, and refuses everything else that cannot be honoured.

    Raises:
      TypeError: a keyword that is in neither table.
      ValueError: a value that would change results and cannot be honoured.
    """
    unknown = [name for name in keywords if name not in ONE_VALUE and name not in WITHOUT_MEANING]
    if unknown:
        raise TypeError(f"LLM() got an unexpected keyword argument {unknown[0]!r}")
    for name, required in ONE_VALUE.items():
        if name in keywords and not any(_same(keywords[name], value) for value in required.values):
            advice = f": {required.advice}" if required.advice else ""
            possible = " or ".join(map(repr, required.values))
            raise ValueError(f"{name} must be {possible}, got {keywords[name]!r}{advice}")
    if idle := [name for name in keywords if name in WITHOUT_MEANING]:
        warnings.warn(f"LLM() arguments without a meaning in eagle_jax, not used: {', '.join(idle)}", stacklevel=3)


def _same(value: Any, wanted: Any) -> bool:
    return value is wanted or (type(value) is type(wanted) and value == wanted)
