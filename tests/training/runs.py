"""A tiny target, what it says, and training runs on that."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
from support.tiny import llama_config, random_llama

from eagle_jax import generate
from eagle_jax.loading import Target
from eagle_jax.training.config import HeadConfig, TrainingConfig
from eagle_jax.training.conversations import Conversation
from eagle_jax.training.losses import LossConfig
from eagle_jax.training.optimizers import OptimizerConfig

PROMPT = [5, 9, 11, 3]
TOKENS = 60
"""Of an answer."""


@functools.cache
def target() -> Target:
    config = llama_config(vocab_size=97)
    return Target(
        model=random_llama(config, 1),
        config=config,
        tokenizer=None,
        name="tiny",
        path=Path("tiny"),
        generation_config={},
    )


@functools.cache
def answer() -> list[int]:
    return generate(target(), [{"prompt_token_ids": PROMPT}], max_new_tokens=TOKENS).token_ids[0]


def conversation() -> Conversation:
    tokens = np.array([*PROMPT, *answer()], np.int32)
    return Conversation(tokens, np.arange(len(tokens)) >= len(PROMPT), "the text", 0.0)


def config(method: str = "eagle3.1", **changes: Any) -> TrainingConfig:
    three = method != "eagle"
    settings: dict[str, Any] = {
        "head": HeadConfig(
            method=method,  # type: ignore[arg-type]
            draft_vocab_size=64 if three else None,
            capture_layers=(0, 1, 2) if three else None,
        ),
        "steps": 3,
        "evaluation_depth": 3,
        "total_steps": 3,
        "sequence_length": len(PROMPT) + TOKENS,
        "batch_rows": 1,
        "held_out": 0,
        "evaluate_every": 100,
        "optimizer": OptimizerConfig(learning_rate=4e-3),
        "loss": LossConfig(feature_weight=0.0 if three else 1.0),
    }
    return TrainingConfig(**(settings | changes))


def silent(line: str) -> None:
    """Takes the lines of a run."""
