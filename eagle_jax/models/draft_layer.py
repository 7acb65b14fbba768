"""What EAGLE heads of every generation share: their calling convention, and rows that attend within it."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.models.cache import KVCache, KVRows
from eagle_jax.models.eagle_config import DraftConfig
from eagle_jax.models.layers import MLP, Attention, RMSNorm, sliding_window


class VocabularyMap(nnx.Variable):
    """Target id of each draft id, int32 `[Vd]`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftContext:
    """What T new draft rows of every slot attend to."""

    positions: jax.Array
    """Rotary positions of the new rows, int32 `[B, T]`."""
    cache: KVCache
    """Committed draft rows."""
    lengths: jax.Array
    """Number of committed draft rows, int32 `[B]`."""
    tail: KVRows | None = None
    """Uncommitted draft rows in buffers of M rows, into which the new rows are written; None: the new rows are the whole tail."""
    tail_offset: jax.Array | int = 0
    """First of the T rows in `tail`, int32 scalar."""
    tail_mask: jax.Array | None = None
    """bool `[B, T, M]`, the tail rows that each new row sees; None means causal, without `tail`."""
    tail_positions: jax.Array | None = None
    """Rotary positions of the tail rows, int32 `[B, M]`; read by sliding windows. None: those of the new rows."""

    def window(self, size: int | None) -> tuple[jax.Array | None, jax.Array | None]:
        """`prefix_start [B, T]` and tail mask of a layer that sees `size` tokens back, itself included (None: everything)."""
        if size is None:
            return None, self.tail_mask
        tail_positions = self.positions if self.tail_positions is None else self.tail_positions
        return sliding_window(size, self.positions, tail_positions, self.tail_mask)


class DraftLayer(nnx.Module):
    """Attention over `attention_inputs`, then the MLP, each added to the residual stream."""

    def __init__(self, config: DraftConfig, index: int, *, in_features: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        width = config.hidden_size
        self.attention = Attention(
            in_features,
            width,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_norm = RMSNorm(width, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(width, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.index = index
        self.sliding_window = config.sliding_windows[index] if config.sliding_windows else None

    def __call__(
        self,
        residual: jax.Array,
        attention_inputs: jax.Array,
        phases: tuple[jax.Array, jax.Array],
        context: DraftContext,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Runs the layer on `[B, T, h]`; returns its output and keys and values of the tail with the new rows."""
        prefix_start, tail_mask = context.window(self.sliding_window)
        with jax.named_scope(f"draft_layer_{self.index}"):
            mixed, rows = self.attention(
                attention_inputs,
                phases,
                context.cache.layer(self.index),
                context.lengths,
                tail=None if context.tail is None else context.tail.layer(self.index),
                tail_offset=context.tail_offset,
                tail_mask=tail_mask,
                prefix_start=prefix_start,
            )
            x = residual + mixed
            return x + self.mlp(self.post_norm(x)), rows


def empty_draft_cache(config: DraftConfig, slots: int, capacity: int, dtype: jnp.dtype) -> KVCache:
    """A draft cache for `slots` sequences of up to `capacity` rows."""
    return KVCache.zeros(config.num_hidden_layers, slots, config.num_key_value_heads, capacity, config.head_dim, dtype)
