"""Layers that target and draft head share: linear maps, norms, attention and the gated MLP.

Every parameter names the logical axes of its dimensions (`eagle_jax.parallel.partition.AxisRules`).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.models.context import AttentionContext
from eagle_jax.models.matmul import multiply
from eagle_jax.models.rope import rotate
from eagle_jax.models.specs import LayerSpec
from eagle_jax.parallel.collectives import shard_index, sum_over_shards
from eagle_jax.parallel.partition import local_kv_heads
from eagle_jax.parallel.vocabulary import Vocabulary


class Linear(nnx.Module):
    """`y = x W^T + b`, with W stored `[out, in]` as checkpoints do, so that loading transposes nothing.

    The weight is an array or a packed one that brings its own product (`eagle_jax.models.matmul.PackedWeight`).

    Args:
      in_features: width of the inputs.
      out_features: width of the outputs.
      axes: logical axes of W: of its outputs, of its inputs.
      bias: whether there is a b.
      sum_over: over so many shards the inputs are split; each then has the columns of W for its own, and outputs are summed
        (`in_order`: see `sum_over_shards`).
      dtype: of the parameters.
      rngs: source of the random initial weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str, str],
        bias: bool = False,
        sum_over: int = 1,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.sum_over, self.in_order = sum_over, False
        scale = in_features**-0.5
        weight = scale * jax.random.normal(rngs.params(), (out_features, in_features), dtype)
        self.weight = nnx.Param(weight, axes=axes)
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype), axes=axes[:1]) if bias else None

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """Maps `[..., in]` to `[..., out]`, in x's dtype or another; of split inputs all or the shard's own may be given."""
        weight = self.weight.get_value()
        if self.sum_over > 1 and x.shape[-1] != weight.shape[1]:
            x = jax.lax.dynamic_slice_in_dim(x, shard_index() * weight.shape[1], weight.shape[1], axis=-1)
        y = sum_over_shards(multiply(x, weight, out_dtype), self.sum_over, self.in_order)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32; the weight multiplies after the cast, as in transformers."""

    def __init__(self, features: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((features,), dtype), axes=("embed",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises `[..., features]`."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return self.weight[...] * wide.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with fused q/k/v; over what is the context's business.

    Split over `shards` devices, each runs its own heads (`heads` and `kv_heads` of the module are those of one shard).

    Args:
      spec: the layer.
      index: its number.
      in_features: width of the inputs.
      out_features: width of the outputs.
      shards: devices that share the heads.
      dtype: of the parameters.
      rngs: source of the random initial weights.
    """

    def __init__(
        self,
        spec: LayerSpec,
        index: int,
        *,
        in_features: int,
        out_features: int,
        shards: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.index, self.window, self.head_dim = index, spec.window, spec.head_dim
        self.heads, self.kv_heads = spec.heads // shards, local_kv_heads(spec.kv.heads, shards)
        rows = (self.heads + 2 * self.kv_heads) * spec.head_dim * shards
        self.qkv = Linear(in_features, rows, axes=("qkv", "embed"), bias=spec.qkv_bias, dtype=dtype, rngs=rngs)
        inner = spec.heads * spec.head_dim
        self.out = Linear(
            inner, out_features, axes=("embed", "heads"), bias=spec.out_bias, sum_over=shards, dtype=dtype, rngs=rngs
        )
        self.q_norm = RMSNorm(spec.head_dim, eps=spec.norm_eps, dtype=dtype) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, eps=spec.norm_eps, dtype=dtype) if spec.qk_norm else None

    def __call__(
        self, x: jax.Array, phases: tuple[jax.Array, jax.Array], context: AttentionContext
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Attends from T rows of every slot.

        Args:
          x: `[B, T, in]`.
          phases: cosine and sine of the rows' positions (`RopeConfig.phases`).
          context: runs the attention itself.

        Returns:
          `[B, T, out]`, and what the context keeps.
        """
        qkv = self.qkv(x).reshape(*x.shape[:2], -1, self.head_dim)
        queries, keys, values = jnp.split(qkv, (self.heads, self.heads + self.kv_heads), axis=2)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = rotate(queries, *phases), rotate(keys, *phases)
        mixed, kept = context.attend(self.index, queries, keys, values, scale=self.head_dim**-0.5, window=self.window)
        return self.out(mixed.reshape(*mixed.shape[:2], -1)), kept


class MLP(nnx.Module):
    """SiLU-gated MLP with fused gate and up projections, its width split over `shards` devices."""

    def __init__(self, features: int, spec: LayerSpec, *, shards: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        inner, bias = spec.mlp_width, spec.mlp_bias
        self.gate_up = Linear(features, 2 * inner, axes=("gate_up", "embed"), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(inner, features, axes=("embed", "mlp"), bias=bias, sum_over=shards, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[B, T, H]` to `[B, T, H]`."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


ATTENTION_KINDS = {"grouped": Attention}
MLP_KINDS = {"gated": MLP}


class Block(nnx.Module):
    """Attention, then the MLP, each added to the residual stream; what attention reads is up to the caller.

    Args:
      spec: the layer.
      index: its number.
      width: of the residual stream.
      in_features: width of what attention reads; None is `width`.
      shards: devices that share the parameters.
      dtype: of the parameters.
      rngs: source of the random initial weights.
    """

    def __init__(
        self,
        spec: LayerSpec,
        index: int,
        width: int,
        *,
        in_features: int | None = None,
        shards: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.attention = ATTENTION_KINDS[spec.attention](
            spec, index, in_features=in_features or width, out_features=width, shards=shards, dtype=dtype, rngs=rngs
        )
        self.post_norm = RMSNorm(width, eps=spec.norm_eps, dtype=dtype)
        self.mlp = MLP_KINDS[spec.mlp](width, spec, shards=shards, dtype=dtype, rngs=rngs)

    def __call__(
        self, residual: jax.Array, inputs: jax.Array, phases: tuple[jax.Array, jax.Array], context: AttentionContext
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Runs the layer on `[B, T, H]`; returns its output and what the context keeps of it."""
        mixed, kept = self.attention(inputs, phases, context)
        x = residual + mixed
        return x + self.mlp(self.post_norm(x)), kept


class Embedding(nnx.Module):
    """Token embeddings `[V, H]`; tied targets read it as their output head too. Rows may be split over `shards` devices."""

    def __init__(self, vocab_size: int, features: int, *, shards: int = 1, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.vocabulary = Vocabulary(vocab_size, shards)
        rows = self.vocabulary.padded_size
        table = jax.random.normal(rngs.params(), (rows, features), dtype)
        self.weight = nnx.Param(table, axes=("vocab", "embed"))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Looks up int32 ids `[B, T]`: `[B, T, H]`; ids outside the vocabulary get the nearest one's."""
        vocabulary = self.vocabulary
        if vocabulary.shards == 1:
            return jnp.take(self.weight[...], tokens, axis=0, mode="clip")
        rows = vocabulary.places(jnp.clip(tokens, 0, vocabulary.size - 1))
        found = jnp.take(self.weight[...], rows, axis=0, mode="clip")
        return sum_over_shards(jnp.where((rows < vocabulary.width)[..., None], found, 0), vocabulary.shards)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """As an output head: float32 products `[..., V]` with rows `[..., H]`."""
        return multiply(hidden, self.weight.get_value(), jnp.float32)
