"""The target of every family: a decoder that returns hidden states, those of layers in between too, and its new cache rows."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.models.cache import KVCache, KVRows
from eagle_jax.models.config import LlamaConfig
from eagle_jax.models.context import AttentionContext
from eagle_jax.models.layers import Block, Embedding, Linear, RMSNorm
from eagle_jax.models.specs import LayerSpec
from eagle_jax.parallel.partition import check_divisible
from eagle_jax.parallel.vocabulary import Vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOutput:
    """What one forward of a target over T new tokens a slot gives."""

    hidden: jax.Array
    """Output of the last layer after the final norm, `[B, T, H]`: the input of the output head."""
    aux: jax.Array
    """Auxiliary hidden states side by side, `[B, T, n * H]` (`[B, T, 0]` without `aux_layers`)."""
    rows: KVRows
    """What the context keeps of the T tokens, such as keys and values to be committed."""


class DecoderLayer(Block):
    """Pre-norm attention and MLP."""

    def __init__(self, spec: LayerSpec, index: int, width: int, *, shards: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(spec, index, width, shards=shards, dtype=dtype, rngs=rngs)
        self.input_norm = RMSNorm(width, eps=spec.norm_eps, dtype=dtype)


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
        layers = [
            DecoderLayer(spec, i, config.hidden_size, shards=shards, dtype=dtype, rngs=rngs)
            for i, spec in enumerate(config.layers)
        ]
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        rows = self.vocabulary.padded_size
        self.lm_head = (
            None if tied else Linear(config.hidden_size, rows, axes=("vocab", "embed"), dtype=dtype, rngs=rngs)
        )

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
        return KVCache.zeros([spec.kv for spec in self.config.layers], slots, capacity, self.dtype, self.shards)

    def __call__(
        self,
        tokens: jax.Array,
        context: AttentionContext,
        *,
        aux_layers: tuple[int, ...] = (),
        prompt_lengths: jax.Array | None = None,
    ) -> ForwardOutput:
        """Runs T tokens of every slot.

        Args:
          tokens: int32 `[B, T]`.
          context: gives the tokens' positions and runs their attention: behind the rows of a cache (`CacheContext`), or within
            the documents of a training batch.
          aux_layers: which hidden states are returned too: k is the input of layer k, `num_hidden_layers` the output after the
            final norm, so k is the index into transformers' `hidden_states`.
          prompt_lengths: int32 `[B]`, read by dynamic rotary scaling alone (`RopeConfig.phases`).
        """
        specs = self.config.layers
        phases = {
            spec.rope: spec.rope.phases(context.positions, spec.head_dim, prompt_lengths)
            for spec in dict.fromkeys(specs)
        }
        x = self.embed(tokens)  # [B, T, H]
        inputs: list[jax.Array] = []
        kept = []
        for i, (spec, layer) in enumerate(zip(specs, self.layers, strict=True)):
            inputs.append(x)
            with jax.named_scope(f"layer_{i}"):
                x, rows = layer(x, layer.input_norm(x), phases[spec.rope], context)
            kept.append(rows)
        inputs.append(self.norm(x))
        aux = [inputs[k] for k in aux_layers]
        return ForwardOutput(
            hidden=inputs[-1],
            aux=jnp.concatenate(aux, axis=-1) if aux else x[..., :0],
            rows=KVRows.of(kept),
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits `[B, R, V]` of rows `[B, R, H]` of `ForwardOutput.hidden`; gather the rows that are read first.

        Over shards, the columns of one of them (`vocabulary`).
        """
        logits = self.embed.logits(hidden) if self.lm_head is None else self.lm_head(hidden, jnp.float32)
        return self.vocabulary.hide_padding(logits)
