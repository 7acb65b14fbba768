"""A batch of packed conversations."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """B rows of T tokens, each row several documents one behind the other and padding at its end."""

    tokens: Any
    """int32 `[B, T]`."""
    segments: Any
    """Which document of its row a token belongs to, from 1; 0 is padding. int32 `[B, T]`."""
    positions: Any
    """Position in the document, int32 `[B, T]`."""
    assistant: Any
    """Tokens that the target wrote, the ones that drafts are made for, bool `[B, T]`."""
