"""What a drafter is, and the one that drafts nothing."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from eagle_jax.decoding.state import DecodeState, DraftState
from eagle_jax.decoding.tree import DraftTree
from eagle_jax.models.cache import KVCache


class Drafter(Protocol):
    """Proposes a tree for every slot. Built inside the jitted step around the modules it reads; keeps its memory in the state."""

    @property
    def num_nodes(self) -> int:
        """Nodes of a tree, the root included: N."""
        ...

    @property
    def max_depth(self) -> int:
        """Most drafted tokens a round can accept: D."""
        ...

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that the drafter reads (`Llama.__call__`)."""
        ...

    def empty(self, slots: int, capacity: int) -> DraftState:
        """The drafter's memory before any prefill."""
        ...

    def prefill(
        self,
        draft: DraftState,
        slot: jax.Array,
        start: jax.Array,
        next_tokens: jax.Array,
        features: jax.Array,
        valid: jax.Array,
    ) -> DraftState:
        """Takes in one chunk of a slot's prompt.

        Args:
          draft: the memory of all slots.
          slot: the slot, int32 scalar.
          start: position of the chunk's first token, int32 scalar.
          next_tokens: the token after each of the chunk's C tokens, int32 `[1, C]`.
          features: target features of the chunk's tokens, `[1, C, F]`.
          valid: how many of the C tokens belong to the prompt, int32 scalar of at least 1. The last of them stays due: the token
            after it is not known before the target's logits are.
        """
        ...

    def propose(self, state: DecodeState) -> tuple[DraftTree, DraftState]:
        """Grows a tree on each slot's pending root."""
        ...


@dataclasses.dataclass(frozen=True)
class PlainDrafter:
    """Drafts nothing: the loop then decodes one token a round."""

    num_nodes: int = 1
    max_depth: int = 0
    capture_layers: tuple[int, ...] = ()
    """What the target captures all the same, for a drafter that will go on later."""

    def empty(self, slots: int, capacity: int) -> DraftState:
        """A memory without content."""
        del capacity
        return DraftState(KVCache((), ()), jnp.zeros((slots,), jnp.int32), jnp.zeros((slots, 1, 0), jnp.float32))

    def prefill(
        self,
        draft: DraftState,
        slot: jax.Array,
        start: jax.Array,
        next_tokens: jax.Array,
        features: jax.Array,
        valid: jax.Array,
    ) -> DraftState:
        """Keeps nothing of the prompt."""
        del slot, start, next_tokens, features, valid
        return draft

    def propose(self, state: DecodeState) -> tuple[DraftTree, DraftState]:
        """The root alone."""
        return DraftTree.only_root(state.roots), state.draft
