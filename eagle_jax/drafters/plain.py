"""Plain decoding, as a drafter."""

import dataclasses

from eagle_jax.drafters.base import Drafter, DraftView, Memory
from eagle_jax.drafters.tree import DraftTree


@dataclasses.dataclass(frozen=True)
class PlainDrafter(Drafter):
    """Drafts nothing and keeps nothing."""

    num_nodes: int = 1
    max_depth: int = 0

    def init(self, slots: int, capacity: int) -> Memory:
        """Empty."""
        del slots, capacity
        return ()

    def propose(self, memory: Memory, view: DraftView) -> tuple[DraftTree, Memory]:
        """The root alone."""
        return DraftTree.only_root(view.roots), memory
