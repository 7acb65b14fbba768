"""The target of every family: a decoder that returns logits for the rows asked for, its new cache rows, and captured features."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.models.cache import KVCache, KVRows
from eagle_jax.models.config import LlamaConfig
from eagle_jax.models.layers import MLP, Attention, Embedding, Linear, RMSNorm, sliding_window
from eagle_jax.models.matmul import matmul
from eagle_jax.parallel.partition import check_divisible, local_kv_heads
from eagle_jax.parallel.vocabulary import Vocabulary
from pallas_kernels.tree_attention import Implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOutput:
    """What one forward of a target over T new tokens a slot gives."""

    hidden: jax.Array
    """Output of the last layer after the final norm, `[B, T, H]`: the input of the output head."""
    features: jax.Array
    """Captured hidden states side by side, `[B, T, n * H]` (`[B, T, 0]` without capture layers)."""
    rows: KVRows
    """Keys and values of the T tokens, to be committed by the caller."""


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: LlamaConfig, *, shards: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(
            config.hidden_size,
            config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            shards=shards,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        inner, bias = config.intermediate_size, config.mlp_bias
        self.mlp = MLP(config.hidden_size, inner, bias=bias, shards=shards, dtype=dtype, rngs=rngs)


class Llama(nnx.Module):
    """A decoder of the Llama family (https://arxiv.org/abs/2302.13971) or a relative of it, layers unrolled.

    Mistral, Qwen2 and Qwen3 differ from Llama by what `LlamaConfig` says of biases, norms and sliding windows, nothing else.

    Args:
      config: the model's configuration.
      dtype: dtype of weights, activations and cache.
      rngs: source of the random initial weights.
      shards: devices that share the weights (`eagle_jax.parallel.partition`). With several, the module computes inside
        `jax.shard_map` alone, where each device sees its own part of every parameter, of the logits and of the cache.

    Raises:
      ValueError: a number of heads or a width that does not divide over the shards.
    """

    def __init__(self, config: LlamaConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, shards: int = 1):
        check_divisible(config, shards, whose="the target")
        self.config, self.shards = config, shards
        self.embed = Embedding(config.vocab_size, config.hidden_size, shards=shards, dtype=dtype, rngs=rngs)
        layers = [DecoderLayer(config, shards=shards, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)]
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        rows = self.vocabulary.padded_size
        self.lm_head = None if tied else Linear(config.hidden_size, rows, dtype=dtype, rngs=rngs)

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of weights, activations and cache."""
        return self.embed.weight.dtype

    @property
    def vocabulary(self) -> Vocabulary:
        """What of the vocabulary a device has logits of."""
        return self.embed.vocabulary

    def sum_in_order(self) -> None:
        """Makes sums over shards the same, bit for bit, wherever a row stands among the others."""
        for layer in self.layers:
            layer.attention.out.in_order = layer.mlp.down.in_order = True

    def empty_cache(self, slots: int, capacity: int) -> KVCache:
        """A cache for `slots` sequences of up to `capacity` rows: of one shard, if there are several."""
        config = self.config
        kv_heads = local_kv_heads(config.num_key_value_heads, self.shards)
        return KVCache.zeros(config.num_hidden_layers, slots, kv_heads, capacity, config.head_dim, self.dtype)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        lengths: jax.Array,
        *,
        tail_mask: jax.Array | None = None,
        capture_layers: tuple[int, ...] = (),
        prompt_lengths: jax.Array | None = None,
        attention: Implementation | None = None,
    ) -> ForwardOutput:
        """Runs T new tokens of every slot behind its committed rows. The cache is read, not written.

        Args:
          tokens: int32 `[B, T]`.
          positions: position of each token in its sequence, int32 `[B, T]`.
          cache: committed rows, as `empty_cache` makes it.
          lengths: number of committed rows, int32 `[B]`.
          tail_mask: bool `[B, T, T]`, which new rows each new row sees; None means causal.
          capture_layers: which hidden states become features: k is the input of layer k, `num_hidden_layers` the output after
            the final norm, so k is the index into transformers' `hidden_states`.
          prompt_lengths: int32 `[B]`, read by dynamic rotary scaling alone (`RopeConfig.phases`).
          attention: forces a backend of tree attention.
        """
        config = self.config
        phases = config.rope.phases(positions, config.head_dim, prompt_lengths)
        views = {
            size: (None, tail_mask) if size is None else sliding_window(size, positions, positions, tail_mask)
            for size in {None, *config.sliding_windows}
        }
        x = self.embed(tokens)  # [B, T, H]
        captured: dict[int, jax.Array] = {}
        rows = []
        for i, layer in enumerate(self.layers):
            captured[i] = x
            prefix_start, seen = views[config.sliding_windows[i] if config.sliding_windows else None]
            with jax.named_scope(f"layer_{i}"):
                mixed, new = layer.attention(
                    layer.input_norm(x),
                    phases,
                    cache.layer(i),
                    lengths,
                    tail_mask=seen,
                    prefix_start=prefix_start,
                    implementation=attention,
                )
                x = x + mixed
                x = x + layer.mlp(layer.post_norm(x))
            rows.append(new)
        x = self.norm(x)
        captured[config.num_hidden_layers] = x
        features = [captured[k] for k in capture_layers]
        return ForwardOutput(
            hidden=x,
            features=jnp.concatenate(features, axis=-1) if features else x[..., :0],
            rows=KVRows.of(rows),
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits `[B, R, V]` of rows `[B, R, H]` of `ForwardOutput.hidden`; gather the rows that are read first.

        Over shards, the columns of one of them (`vocabulary`).
        """
        weight = self.embed.weight[...] if self.lm_head is None else self.lm_head.weight[...]
        return self.vocabulary.hide_padding(matmul(hidden, weight, out_dtype=jnp.float32))
