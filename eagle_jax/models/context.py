"""Where rows come from and where keys go: a context runs the attention of every layer, the modules do everything else."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from eagle_jax.models.cache import KVCache, KVRows
from pallas_kernels.tree_attention import Implementation, pack, tree_attention


class AttentionContext(Protocol):
    """What T rows of every slot attend to: `CacheContext` in decoding, packed documents in training."""

    @property
    def positions(self) -> jax.Array:
        """Rotary positions of the rows, int32 `[B, T]`."""

    def attend(
        self, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array, *, scale: float, window: int | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The attention of a layer.

        Args:
          layer: its number.
          queries: rotated, `[B, T, Hq, Dh]`.
          keys: rotated, `[B, T, Hkv, Dh]`.
          values: `[B, T, Hkv, Dh]`.
          scale: factor on the scores.
          window: tokens that a row looks back, its own included; None is everything.

        Returns:
          What the heads read, `[B, T, Hq, Dh]`, and what is kept of the layer (`KVRows.of`).
        """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheContext:
    """Rows behind the committed rows of a cache, which is read and not written."""

    positions: jax.Array
    """Rotary positions of the new rows, int32 `[B, T]`."""
    cache: KVCache
    """Committed rows; row p is at position p."""
    lengths: jax.Array
    """Number of committed rows, int32 `[B]`."""
    tail: KVRows | None = None
    """Uncommitted rows in buffers of M rows, into which the new rows are written; None: the new rows are the whole tail."""
    tail_offset: jax.Array | int = 0
    """First of the T rows in `tail`, int32 scalar."""
    tail_mask: jax.Array | None = None
    """bool `[B, T, M]`, the tail rows that each new row sees; None means causal, without `tail`."""
    tail_positions: jax.Array | None = None
    """Rotary positions of the tail rows, int32 `[B, M]`; read by sliding windows. None: those of the new rows."""
    implementation: Implementation | None = dataclasses.field(default=None, metadata={"static": True})
    """Forces a backend of tree attention."""

    def attend(
        self, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array, *, scale: float, window: int | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """See `AttentionContext`. Keys and values of the tail are kept, `[B, Hkv, M, Dh]`; without `tail`, also the array that
        they are packed in (`KVRows.packed`)."""
        keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)  # [B, Hkv, T, Dh]
        if self.tail is not None:
            earlier = self.tail.layer(layer)
            keys = jax.lax.dynamic_update_slice_in_dim(earlier[0], keys, self.tail_offset, axis=2)
            values = jax.lax.dynamic_update_slice_in_dim(earlier[1], values, self.tail_offset, axis=2)
        prefix_start, tail_mask = None, self.tail_mask
        if window is not None:
            tail_positions = self.positions if self.tail_positions is None else self.tail_positions
            prefix_start, tail_mask = sliding_window(window, self.positions, tail_positions, self.tail_mask)
        mixed = tree_attention(
            queries,
            *self.cache.layer(layer),
            self.lengths,
            keys,
            values,
            tail_mask,
            scale=scale,
            prefix_start=prefix_start,
            implementation=self.implementation,
        )
        return mixed, (keys, values) if self.tail is not None else (keys, values, pack(queries, keys, values))


def sliding_window(
    size: int, positions: jax.Array, tail_positions: jax.Array, tail_mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """What rows see that look back `size` tokens, their own included.

    Args:
      size: the window.
      positions: positions of the T rows, int32 `[B, T]`; row p of the committed prefix is at position p.
      tail_positions: positions of the M rows of the tail, int32 `[B, M]`.
      tail_mask: bool `[B, T, M]`, what each row sees of the tail without a window; None means everything up to its position.

    Returns:
      The first row of the prefix that each row sees, int32 `[B, T]`, and its mask over the tail, bool `[B, T, M]`.
    """
    distance = positions[:, :, None] - tail_positions[:, None]  # [B, T, M]
    seen = distance >= 0 if tail_mask is None else tail_mask
    return jnp.maximum(positions - size + 1, 0), seen & (distance < size)
