"""The EAGLE-1/2 draft head (https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2406.16858): one architecture, same files."""

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.models.cache import KVCache, KVRows
from eagle_jax.models.draft_layer import DraftContext, DraftLayer, VocabularyMap, empty_draft_cache
from eagle_jax.models.eagle_config import DraftConfig
from eagle_jax.models.layers import Embedding, Linear, RMSNorm
from eagle_jax.models.matmul import matmul


class EagleLayer(DraftLayer):
    """A decoder layer; as published, the first one has no norm before its attention."""

    def __init__(self, config: DraftConfig, index: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(config, index, in_features=config.hidden_size, dtype=dtype, rngs=rngs)
        normed = index > 0 or config.first_input_norm
        self.input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype) if normed else None


class EagleHead(nnx.Module):
    """Predicts the target's next last hidden state (after the final norm) from the current one and the next token.

    Same calling convention as `Eagle3Head`. `fc` runs in every step on [embedding; hidden], so `fuse` passes features through;
    the output is read by the target's own output head, without a norm.

    Args:
      config: geometry and variant flags; `capture_layers` is the one state after the target's final norm.
      dtype: dtype of weights, activations and cache.
      rngs: source of the random initial weights.
    """

    def __init__(self, config: DraftConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width = config.hidden_size
        if config.feature_size != width:
            raise ValueError(
                f"an EAGLE-1/2 head reads one hidden state of its own width {width}, got {config.feature_size}"
            )
        self.embed = Embedding(config.vocab_size, width, dtype=dtype, rngs=rngs) if config.own_embedding else None
        self.fc = Linear(2 * width, width, bias=config.fc_bias, dtype=dtype, rngs=rngs)
        layers = [EagleLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_hidden_layers)]
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(width, eps=config.rms_norm_eps, dtype=dtype) if config.final_norm else None
        own = config.own_lm_head
        self.lm_head = Linear(width, config.draft_vocab_size, dtype=dtype, rngs=rngs) if own else None
        mapped = config.draft_vocab_size < config.vocab_size
        self.vocabulary = VocabularyMap(jnp.arange(config.draft_vocab_size, dtype=jnp.int32)) if mapped else None

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of weights, activations and cache."""
        return self.fc.weight.dtype

    def empty_cache(self, slots: int, capacity: int) -> KVCache:
        """A draft cache for `slots` sequences of up to `capacity` rows."""
        return empty_draft_cache(self.config, slots, capacity, self.dtype)

    def fuse(self, features: jax.Array) -> jax.Array:
        """Features `[..., H]` in the head's dtype."""
        return features.astype(self.dtype)

    def __call__(self, embeddings: jax.Array, hidden: jax.Array, context: DraftContext) -> tuple[jax.Array, KVRows]:
        """Runs T rows of every slot behind its committed draft rows; see `Eagle3Head.__call__`."""
        config = self.config
        phases = config.rope.phases(context.positions, config.head_dim, None)
        x = self.fc(jnp.concatenate([embeddings, hidden], axis=-1))
        rows = []
        for layer in self.layers:
            x, new = layer(x, x if layer.input_norm is None else layer.input_norm(x), phases, context)
            rows.append(new)
        return (x if self.norm is None else self.norm(x)), KVRows.of(rows)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits `[B, R, Vd]` of the head's own output head.

        Raises:
          ValueError: the head has none (`DraftConfig.own_lm_head` is false): the target's is to be used.
        """
        if self.lm_head is None:
            raise ValueError("this head has no output head of its own; use the target's")
        return matmul(hidden, self.lm_head.weight[...], out_dtype=jnp.float32)

    def target_ids(self, draft_ids: jax.Array) -> jax.Array:
        """Target ids of draft ids, int32 of any shape."""
        return draft_ids if self.vocabulary is None else self.vocabulary[...][draft_ids]
