"""The EAGLE-3 draft head (https://arxiv.org/abs/2503.01840), with the variants found in published checkpoints."""

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.models.cache import KVCache, KVRows
from eagle_jax.models.eagle_config import DraftConfig
from eagle_jax.models.layers import MLP, Attention, Embedding, Linear, RMSNorm
from eagle_jax.models.matmul import matmul


class VocabularyMap(nnx.Variable):
    """Target id of each draft id, int32 `[Vd]`."""


class DraftLayer(nnx.Module):
    """One layer of the head. The first takes [embedding; feature], twice the width; the others are ordinary pre-norm layers."""

    def __init__(self, config: DraftConfig, *, first: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.hidden_norm = RMSNorm(width, eps=eps, dtype=dtype) if first else None
        self.attention = Attention(
            2 * width if first else width,
            width,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.mlp = MLP(width, config.intermediate_size, dtype=dtype, rngs=rngs)


class Eagle3Head(nnx.Module):
    """Predicts the next feature and token of a target from its captured hidden states and the token that follows.

    Row p of the head takes the target's feature of token p with the embedding of token p + 1, at rotary position p, and predicts
    token p + 2. Deeper draft steps feed the head's own output back in place of the feature.

    Args:
      config: geometry and variant flags.
      dtype: dtype of weights, activations and cache.
      rngs: source of the random initial weights.
    """

    def __init__(self, config: DraftConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        states = len(config.capture_layers)
        self.embed = Embedding(config.vocab_size, width, dtype=dtype, rngs=rngs) if config.own_embedding else None
        self.feature_norm = RMSNorm(config.feature_size, eps=eps, dtype=dtype) if config.norm_before_fc else None
        norms = [
            RMSNorm(config.target_hidden_size, eps=eps, dtype=dtype) for _ in range(states if config.fc_norm else 0)
        ]
        self.fc_norms = nnx.List(norms)
        self.fc = Linear(config.feature_size, width, dtype=dtype, rngs=rngs)
        layers = [DraftLayer(config, first=i == 0, dtype=dtype, rngs=rngs) for i in range(config.num_hidden_layers)]
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.lm_head = Linear(width, config.draft_vocab_size, dtype=dtype, rngs=rngs)
        mapped = config.draft_vocab_size < config.vocab_size
        self.vocabulary = VocabularyMap(jnp.arange(config.draft_vocab_size, dtype=jnp.int32)) if mapped else None

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of weights, activations and cache."""
        return self.fc.weight.dtype

    def empty_cache(self, slots: int, capacity: int) -> KVCache:
        """A draft cache for `slots` sequences of up to `capacity` rows."""
        config = self.config
        return KVCache.zeros(
            config.num_hidden_layers, slots, config.num_key_value_heads, capacity, config.head_dim, self.dtype
        )

    def fuse(self, features: jax.Array) -> jax.Array:
        """Maps the target's features `[..., n * H]` to the head's width `[..., h]`."""
        x = features.astype(self.dtype)
        if self.feature_norm is not None:
            x = self.feature_norm(x)
        if self.config.fc_norm:
            parts = jnp.split(x, len(self.config.capture_layers), axis=-1)
            x = jnp.concatenate([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], axis=-1)
        return self.fc(x)

    def __call__(
        self,
        embeddings: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        lengths: jax.Array,
        *,
        tail: KVRows | None = None,
        tail_offset: jax.Array | int = 0,
        tail_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, KVRows]:
        """Runs T rows of every slot behind its committed draft rows.

        Args:
          embeddings: embedding of the token after each row's, `[B, T, h]`.
          hidden: fused feature, or the head's own output of the row before, `[B, T, h]`.
          positions: rotary positions, int32 `[B, T]`.
          cache: committed draft rows.
          lengths: number of committed draft rows, int32 `[B]`.
          tail: uncommitted draft rows in buffers of M rows, into which the T new rows are written; None means that the new rows
            are the whole tail.
          tail_offset: first of the T rows in `tail`, an int32 scalar.
          tail_mask: bool `[B, T, M]`, which tail rows each row sees; None means causal, without `tail`.

        Returns:
          The output `[B, T, h]`, which is fed back and goes into `logits`, and the tail with the new rows.
        """
        config = self.config
        cos, sin = config.rope.phases(positions, config.head_dim, None)
        x = hidden
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"draft_layer_{i}"):
                if layer.hidden_norm is not None:
                    normed = layer.hidden_norm(x)
                    inputs = jnp.concatenate([layer.input_norm(embeddings), normed], axis=-1)  # [B, T, 2h]
                    x = normed if config.norm_before_residual else x
                else:
                    inputs = layer.input_norm(x)
                queries, new_keys, new_values = layer.attention.project(inputs, cos, sin)
                if tail is not None:
                    new_keys = jax.lax.dynamic_update_slice_in_dim(tail.keys[i], new_keys, tail_offset, axis=2)
                    new_values = jax.lax.dynamic_update_slice_in_dim(tail.values[i], new_values, tail_offset, axis=2)
                x = x + layer.attention.attend(
                    queries, cache.keys[i], cache.values[i], lengths, new_keys, new_values, tail_mask
                )
                x = x + layer.mlp(layer.post_norm(x))
            keys.append(new_keys)
            values.append(new_values)
        return (self.norm(x) if config.norm_output else x), KVRows(tuple(keys), tuple(values))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits over the draft vocabulary, `[B, R, Vd]`, of outputs `[B, R, h]`."""
        normed = hidden if self.config.norm_output else self.norm(hidden)
        return matmul(normed, self.lm_head.weight[...], out_dtype=jnp.float32)

    def target_ids(self, draft_ids: jax.Array) -> jax.Array:
        """Target ids of draft ids, int32 of any shape."""
        return draft_ids if self.vocabulary is None else self.vocabulary[...][draft_ids]
