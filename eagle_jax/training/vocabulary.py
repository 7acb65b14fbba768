"""The draft vocabulary: the tokens that assistants write most often."""

from collections.abc import Sequence

import numpy as np

from eagle_jax.training.conversations import Conversation

_AT_ONCE = 4096
"""Conversations counted together: each count passes over the whole vocabulary."""


def count_tokens(conversations: Sequence[Conversation], vocab_size: int) -> np.ndarray:
    """How often the assistant wrote each token, int64 `[V]`."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(conversations), _AT_ONCE):
        part = np.concatenate([c.tokens[c.assistant] for c in conversations[start : start + _AT_ONCE]])
        counts += np.bincount(part, minlength=vocab_size)
    return counts


def choose_vocabulary(counts: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    """The `size` most frequent tokens; of equally frequent ones those with the lower id, also where tokens were never used.

    Args:
      counts: int `[V]`.
      size: Vd.

    Returns:
      Target ids, ascending int32 `[Vd]`, and the share of the counted tokens that they cover.

    Raises:
      ValueError: a size that the vocabulary does not have, or counts that are all zero.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"draft_vocab_size must be 1 to the target's vocab_size {len(counts)}, not {size}")
    if not counts.any():
        raise ValueError("no token was counted, so a draft vocabulary cannot be chosen")
    ids = np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)
    return ids, float(counts[ids].sum() / counts.sum())
