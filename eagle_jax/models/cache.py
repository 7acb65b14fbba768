"""Key/value caches: committed rows in fixed buffers, new rows beside them until they are accepted."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from eagle_jax.models.specs import KVSpec
from eagle_jax.parallel.partition import local_kv_heads
from pallas_kernels.cache_write import write_rows
from pallas_kernels.tree_attention import key_and_value_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVRows:
    """Rotated keys and values of rows that are not in the cache yet: what a forward returns."""

    keys: tuple[jax.Array, ...]
    """One `[B, Hkv, T, Dh]` a layer."""
    values: tuple[jax.Array, ...]
    """One `[B, Hkv, T, Dh]` a layer."""
    packed: tuple[jax.Array, ...] = ()
    """One `[B, Hkv, R, Dh]` a layer with the same keys and values in it (`pallas_kernels.tree_attention.pack`), or none at all. A
    commit reads these: attention on GPUs made them, and keys and values of their own would be two kernels more a layer."""

    @staticmethod
    def of(layers: Sequence[tuple[jax.Array, ...]]) -> "KVRows":
        """From keys and values of each layer, or keys, values and the array they are packed in."""
        return KVRows(*zip(*layers, strict=True))

    def layer(self, index: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one layer."""
        return self.keys[index], self.values[index]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Committed keys and values. Which rows count is said by the lengths kept beside it, never by the cache itself."""

    keys: tuple[jax.Array, ...]
    """One `[B, Hkv, S, Dh]` a layer."""
    values: tuple[jax.Array, ...]
    """One `[B, Hkv, S, Dh]` a layer."""

    @staticmethod
    def zeros(layers: Sequence[KVSpec], slots: int, capacity: int, dtype: jnp.dtype, shards: int = 1) -> "KVCache":
        """An empty cache: of each layer a buffer for keys and one for values, of one of the devices that share the heads."""

        def make(heads: int, width: int) -> jax.Array:
            return jnp.zeros((slots, local_kv_heads(heads, shards), capacity, width), dtype)

        return KVCache(
            tuple(make(spec.heads, spec.key_width) for spec in layers),
            tuple(make(spec.heads, spec.value_width) for spec in layers),
        )

    def layer(self, index: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one layer."""
        return self.keys[index], self.values[index]

    def slot(self, slot: jax.Array) -> "KVCache":
        """The cache of one slot, `[1, Hkv, S, Dh]` a layer; `slot` is an int32 scalar."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=0), self)

    def write(self, rows: KVRows, start: jax.Array, path: jax.Array | None = None) -> "KVCache":
        """Writes A rows of every slot at rows `start[b]..start[b]+A-1`, in place when the cache is donated.

        `start` is int32 `[B]`; `path` is int32 `[B, A]` and says which of the T rows, None: all of them. A window that sticks out
        of its buffer is moved, which would overwrite committed rows, so buffers are allocated with room for a whole window behind
        the last row that can be committed (`eagle_jax.decoding.state.cache_capacity`).
        """
        layers, buffers = len(self.keys), (*self.keys, *self.values)
        if rows.packed:
            tokens = rows.keys[0].shape[2]
            begins = [key_and_value_rows(array.shape[2], tokens) for array in rows.packed]
            first = [keys for keys, _ in begins] + [values for _, values in begins]
            written = write_rows(buffers, rows.packed * 2, path, start, first=first, tokens=tokens)
        else:
            written = write_rows(buffers, (*rows.keys, *rows.values), path, start)
        return KVCache(tuple(written[:layers]), tuple(written[layers:]))

    def write_slot(self, rows: KVRows, slot: jax.Array, start: jax.Array) -> "KVCache":
        """Writes rows `[1, Hkv, T, Dh]` of one slot at row `start`; both are int32 scalars. The room rule of `write` holds."""

        def put(buffer: jax.Array, update: jax.Array) -> jax.Array:
            zero = jnp.zeros((), slot.dtype)
            return jax.lax.dynamic_update_slice(buffer, update.astype(buffer.dtype), (slot, zero, start, zero))

        return KVCache(tuple(map(put, self.keys, rows.keys)), tuple(map(put, self.values, rows.values)))


def ordered_after(start: jax.Array, result: jax.Array) -> jax.Array:
    """`start`, int32, as a number that XLA knows only once `result`, an int32 of at least 0, has been computed.

    New keys and values do not depend on what attention reads from the cache. A write of them could go first, so XLA would copy
    every buffer to keep the old rows; a write at a position that depends on the forward's result updates the buffers in place.
    """
    return jnp.minimum(start, start + result)
