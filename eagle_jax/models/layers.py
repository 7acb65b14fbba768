"""Layers that target and draft head share: linear maps, norms, attention and the gated MLP."""

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.models.matmul import matmul
from eagle_jax.models.rope import rotate
from eagle_jax.parallel.collectives import shard_index, sum_over_shards
from eagle_jax.parallel.partition import local_kv_heads
from eagle_jax.parallel.vocabulary import Vocabulary
from pallas_kernels.tree_attention import Implementation, pack, tree_attention


class Linear(nnx.Module):
    """`y = x W^T + b`, with W stored `[out, in]` as checkpoints do, so that loading transposes nothing.

    `sum_over`: over so many shards the inputs are split; each then has the columns of W for its own, and outputs are summed
    (`in_order`: see `sum_over_shards`).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        sum_over: int = 1,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.sum_over, self.in_order = sum_over, False
        scale = in_features**-0.5
        self.weight = nnx.Param(scale * jax.random.normal(rngs.params(), (out_features, in_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., in]` to `[..., out]`; of split inputs either all or the shard's own may be given."""
        weight = self.weight[...]
        if self.sum_over > 1 and x.shape[-1] != weight.shape[1]:
            x = jax.lax.dynamic_slice_in_dim(x, shard_index() * weight.shape[1], weight.shape[1], axis=-1)
        y = sum_over_shards(matmul(x, weight), self.sum_over, self.in_order)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32; the weight multiplies after the cast, as in transformers."""

    def __init__(self, features: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises `[..., features]`."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return self.weight[...] * wide.astype(x.dtype)


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


class Attention(nnx.Module):
    """Grouped-query attention over a committed prefix and a tail, with fused q/k/v.

    Split over `shards` devices, each runs its own heads (`heads` and `kv_heads` of the module are those of one shard).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        shards: int = 1,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """`qk_norm_eps`: each head's queries and keys are normed with that epsilon before they are rotated; None: not at all."""
        self.heads, self.kv_heads, self.head_dim = heads // shards, local_kv_heads(kv_heads, shards), head_dim
        rows = (self.heads + 2 * self.kv_heads) * head_dim * shards
        self.qkv = Linear(in_features, rows, bias=qkv_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(heads * head_dim, out_features, bias=out_bias, sum_over=shards, dtype=dtype, rngs=rngs)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps, dtype=dtype)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps, dtype=dtype)

    def __call__(
        self,
        x: jax.Array,
        phases: tuple[jax.Array, jax.Array],
        cache: tuple[jax.Array, jax.Array],
        lengths: jax.Array,
        *,
        tail: tuple[jax.Array, jax.Array] | None = None,
        tail_offset: jax.Array | int = 0,
        tail_mask: jax.Array | None = None,
        prefix_start: jax.Array | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Attends from T new rows of every slot to its committed rows and to the tail.

        Args:
          x: `[B, T, in]`.
          phases: cosine and sine of the rows' positions (`RopeConfig.phases`).
          cache: committed keys and values, `[B, Hkv, S, Dh]` each.
          lengths: number of committed rows, int32 `[B]`.
          tail: keys and values of uncommitted rows, `[B, Hkv, M, Dh]` each, into which the new rows are written; None means that
            the new rows are the whole tail.
          tail_offset: first of the T rows in `tail`, an int32 scalar.
          tail_mask: bool `[B, T, M]`, the tail rows that each new row sees; None means causal, without `tail`.
          prefix_start: first committed row that each new row sees, int32 `[B, T]`; None means 0.
          implementation: forces a backend of tree attention.

        Returns:
          `[B, T, out]`, and keys and values of the tail with the new rows in it; without `tail`, also the array that they are
          packed in (`KVRows.packed`).
        """
        queries, keys, values = self.project(x, phases)
        keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)  # [B, Hkv, T, Dh]
        if tail is not None:
            keys = jax.lax.dynamic_update_slice_in_dim(tail[0], keys, tail_offset, axis=2)
            values = jax.lax.dynamic_update_slice_in_dim(tail[1], values, tail_offset, axis=2)
        mixed = tree_attention(
            queries,
            *cache,
            lengths,
            keys,
            values,
            tail_mask,
            scale=self.head_dim**-0.5,
            prefix_start=prefix_start,
            implementation=implementation,
        )
        return self.join(mixed), (keys, values) if tail is not None else (keys, values, pack(queries, keys, values))

    def project(self, x: jax.Array, phases: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries `[B, T, Hq, Dh]` and keys `[B, T, Hkv, Dh]`, and values of their shape, of rows `[B, T, in]`."""
        qkv = self.qkv(x).reshape(*x.shape[:2], -1, self.head_dim)
        queries, keys, values = jnp.split(qkv, (self.heads, self.heads + self.kv_heads), axis=2)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        return rotate(queries, *phases), rotate(keys, *phases), values

    def join(self, mixed: jax.Array) -> jax.Array:
        """The output `[B, T, out]` of what the heads read, `[B, T, Hq, Dh]`."""
        return self.out(mixed.reshape(*mixed.shape[:2], -1))


class MLP(nnx.Module):
    """SiLU-gated MLP with fused gate and up projections, its width split over `shards` devices."""

    def __init__(
        self, features: int, hidden: int, *, bias: bool = False, shards: int = 1, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.gate_up = Linear(features, 2 * hidden, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(hidden, features, bias=bias, sum_over=shards, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[B, T, H]` to `[B, T, H]`."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Embedding(nnx.Module):
    """Token embeddings `[V, H]`; tied targets read it as their output head too. Rows may be split over `shards` devices."""

    def __init__(self, vocab_size: int, features: int, *, shards: int = 1, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.vocabulary = Vocabulary(vocab_size, shards)
        rows = self.vocabulary.padded_size
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (rows, features), dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Looks up int32 ids `[B, T]`: `[B, T, H]`; ids outside the vocabulary get the nearest one's."""
        vocabulary = self.vocabulary
        if vocabulary.shards == 1:
            return jnp.take(self.weight[...], tokens, axis=0, mode="clip")
        rows = vocabulary.places(jnp.clip(tokens, 0, vocabulary.size - 1))
        found = jnp.take(self.weight[...], rows, axis=0, mode="clip")
        return sum_over_shards(jnp.where((rows < vocabulary.width)[..., None], found, 0), vocabulary.shards)
