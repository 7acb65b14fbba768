"""The bytes that a step must read from memory at least: what no program can be faster than."""

import dataclasses

import jax
from flax import nnx

from eagle_jax.loading.memory import cache_bytes_per_row
from eagle_jax.models import DraftHead, Llama


@dataclasses.dataclass(frozen=True)
class Floor:
    """Bytes read by the parts of a round, every weight once a pass, and the committed rows of the caches."""

    target: int
    """One forward of the target over any number of tokens."""
    extend: int
    """The head over the accepted tokens, the fusion of the target's features and its output head."""
    draft_step: int
    """The head over one level of the tree, its output head included."""

    @staticmethod
    def of(target: Llama, head: DraftHead | None, *, slots: int, length: int) -> "Floor":
        """For `slots` sequences of `length` committed tokens."""
        rows = slots * length
        lm_head = target.embed if target.lm_head is None else target.lm_head
        whole = _bytes(target) - (0 if target.lm_head is None else _bytes(target.embed))
        forward = whole + rows * cache_bytes_per_row(target.config, target.dtype)
        if head is None:
            return Floor(forward, 0, 0)
        config = head.config
        extend = _bytes(head) - (0 if head.embed is None else _bytes(head.embed))
        extend += 0 if config.own_lm_head else _bytes(lm_head)
        extend += rows * cache_bytes_per_row(config, head.dtype)
        # EAGLE-3 fuses the target's features once; the heads before it run `fc` over every row.
        fusion = _bytes(head.fc) if config.method == "eagle3" and head.fc is not None else 0
        return Floor(forward, extend, extend - fusion)


def _bytes(module: nnx.Module) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(module)))
