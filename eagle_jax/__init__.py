"""EAGLE speculative decoding for Llama-family models in JAX, on TPU, GPU and CPU.

`LLM` is the front that vLLM users know; `generate` and `speculative_generate` are the same as plain functions. Everything named
here is imported when it is first used: `import eagle_jax` alone loads no model code and touches no device.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` finds, for those who read types
    from eagle_jax.drafters.tree import StaticTree as StaticTree
    from eagle_jax.drafters.tree import TreeConfig as TreeConfig
    from eagle_jax.engine.memory import InsufficientMemoryError as InsufficientMemoryError
    from eagle_jax.entrypoints.async_llm import AsyncLLM as AsyncLLM
    from eagle_jax.entrypoints.functions import generate as generate
    from eagle_jax.entrypoints.functions import speculative_generate as speculative_generate
    from eagle_jax.entrypoints.functions import stream_generate as stream_generate
    from eagle_jax.entrypoints.llm import LLM as LLM
    from eagle_jax.loading import CheckpointError as CheckpointError
    from eagle_jax.loading import Draft as Draft
    from eagle_jax.loading import Target as Target
    from eagle_jax.loading import load_draft as load_draft
    from eagle_jax.loading import load_target as load_target
    from eagle_jax.metrics import AcceptanceMetrics as AcceptanceMetrics
    from eagle_jax.outputs import CompletionOutput as CompletionOutput
    from eagle_jax.outputs import Delta as Delta
    from eagle_jax.outputs import GenerationResult as GenerationResult
    from eagle_jax.outputs import RequestOutput as RequestOutput
    from eagle_jax.sampling import SamplingParams as SamplingParams
    from eagle_jax.speculative_config import SpeculativeConfig as SpeculativeConfig

__version__ = "0.1.0"

_HOME = {
    "AcceptanceMetrics": "eagle_jax.metrics",
    "AsyncLLM": "eagle_jax.entrypoints.async_llm",
    "CheckpointError": "eagle_jax.loading",
    "CompletionOutput": "eagle_jax.outputs",
    "Delta": "eagle_jax.outputs",
    "Draft": "eagle_jax.loading",
    "GenerationResult": "eagle_jax.outputs",
    "InsufficientMemoryError": "eagle_jax.engine.memory",
    "LLM": "eagle_jax.entrypoints.llm",
    "RequestOutput": "eagle_jax.outputs",
    "SamplingParams": "eagle_jax.sampling",
    "SpeculativeConfig": "eagle_jax.speculative_config",
    "StaticTree": "eagle_jax.drafters.tree",
    "Target": "eagle_jax.loading",
    "TreeConfig": "eagle_jax.drafters.tree",
    "generate": "eagle_jax.entrypoints.functions",
    "load_draft": "eagle_jax.loading",
    "load_target": "eagle_jax.loading",
    "speculative_generate": "eagle_jax.entrypoints.functions",
    "stream_generate": "eagle_jax.entrypoints.functions",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
