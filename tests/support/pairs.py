"""Two pairs of target and head: the golden ones, whose drafts are often accepted, and tiny ones that compile in no time."""

import dataclasses
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from eagle_jax import Draft, Target
from eagle_jax.engine.config import EngineConfig
from eagle_jax.entrypoints.decoder import Decoder
from eagle_jax.models import DraftConfig, Eagle3Head, Llama, LlamaConfig
from eagle_jax.outputs import RequestOutput
from support import golden
from support.letters import letters_tokenizer

PROMPTS = [[5, 6, 7, 8], [1, 300], list(range(20, 60)), [77] * 9]
"""For the golden target; four, so that all calls run in four slots."""


def golden_pair() -> tuple[Target, Draft]:
    """The golden target with a tokenizer, and its head."""
    target = dataclasses.replace(golden.target("target_A"), tokenizer=letters_tokenizer())
    return target, golden.draft("head_A_e3", "target_A")


TINY_PROMPTS = [[1, 2, 3], [1, 0], [4] * 9, [6, 5]]
"""For the tiny target; four as well."""


def tiny_pair(vocab_size: int = 7, **changes) -> tuple[Target, Draft]:
    """Two layers, a context of 256, no tokenizer, no end-of-sequence id, and so few tokens that a random head is often right."""
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
    }
    config = LlamaConfig(**(settings | changes))
    head = DraftConfig(
        method="eagle3",
        hidden_size=32,
        target_hidden_size=32,
        intermediate_size=40,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        capture_layers=(0, 1, 2),
    )
    model = Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(3))
    path = Path("tiny")
    return (
        Target(model=model, config=config, tokenizer=None, name="tiny target", path=path, generation_config={}),
        Draft(
            head=Eagle3Head(head, dtype=jnp.float32, rngs=nnx.Rngs(4)),
            config=head,
            name="tiny head",
            path=path,
            notes=(),
        ),
    )


def decoder_of(target: Target, draft: Draft | None = None, tree: Any = None, **settings: Any) -> Decoder:
    """What `LLM` and the plain functions decode with; `settings` are those of `EngineConfig.resolve`."""
    return Decoder(target, draft, EngineConfig.resolve(target, draft, tree=tree, **settings))


def completions(outputs: Sequence[RequestOutput]) -> list[types.SimpleNamespace]:
    """The only continuation of each output, with the output's `metrics`."""
    return [types.SimpleNamespace(**vars(output.outputs[0]), metrics=output.metrics) for output in outputs]
