"""The EAGLE-1/2 draft head (https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2406.16858): one architecture, same files."""

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.models.cache import KVRows
from eagle_jax.models.context import AttentionContext
from eagle_jax.models.draft_layer import DraftModule
from eagle_jax.models.eagle_config import DraftConfig
from eagle_jax.models.layers import Block, Linear, RMSNorm


class EagleLayer(Block):
    """A decoder layer; as published, the first one has no norm before its attention."""

    def __init__(self, config: DraftConfig, index: int, *, shards: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        width = config.hidden_size
        super().__init__(config.layers[index], index, width, shards=shards, dtype=dtype, rngs=rngs)
        normed = index > 0 or config.first_input_norm
        self.input_norm = RMSNorm(width, eps=config.rms_norm_eps, dtype=dtype) if normed else None


class EagleHead(DraftModule):
    """Predicts the target's next last hidden state (after the final norm) from the current one and the next token.

    Same calling convention as `Eagle3Head`. `fc` runs in every step on [embedding; hidden], so `fuse` passes features through;
    as published, the output is read by the target's own output head, without a norm.

    Args:
      config: geometry and variant flags; `capture_layers` is the one state after the target's final norm.
      dtype: dtype of weights, activations and cache.
      rngs: source of the random initial weights.
      shards: devices that share the weights; see `Eagle3Head`.
    """

    def __init__(self, config: DraftConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, shards: int = 1):
        super().__init__(config, shards=shards, dtype=dtype, rngs=rngs)
        width = config.hidden_size
        if config.feature_size != width:
            raise ValueError(
                f"an EAGLE-1/2 head reads one hidden state of its own width {width}, got {config.feature_size}"
            )

        def norm(wanted: bool) -> RMSNorm | None:
            return RMSNorm(width, eps=config.rms_norm_eps, dtype=dtype) if wanted else None

        self.embedding_norm, self.hidden_norm = norm(config.embedding_norm), norm(config.hidden_norm)
        self.fc = Linear(
            2 * width, width, axes=("embed", "fused"), bias=config.fc_bias, sum_over=shards, dtype=dtype, rngs=rngs
        )
        layers = [EagleLayer(config, i, shards=shards, dtype=dtype, rngs=rngs) for i in range(config.num_hidden_layers)]
        self.layers = nnx.List(layers)
        self.norm = norm(config.final_norm or config.head_norm)
        self._end(dtype=dtype, rngs=rngs)

    @property
    def feeds_back_normed(self) -> bool:
        """Whether the output is normed before it is fed back."""
        return self.config.final_norm

    def fuse(self, features: jax.Array) -> jax.Array:
        """Features `[..., H]` in the head's dtype."""
        return features.astype(self.dtype)

    def __call__(self, embeddings: jax.Array, hidden: jax.Array, context: AttentionContext) -> tuple[jax.Array, KVRows]:
        """Runs T rows of every slot behind its committed draft rows; see `Eagle3Head.__call__`."""
        config = self.config
        phases = config.rope.phases(context.positions, config.head_dim, None)
        if self.embedding_norm is not None:
            embeddings = self.embedding_norm(embeddings)
        if self.hidden_norm is not None:
            hidden = self.hidden_norm(hidden)
        x = self.fc(jnp.concatenate([embeddings, hidden], axis=-1))  # [B, T, h]
        rows = []
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"draft_layer_{i}"):
                x, new = layer(x, x if layer.input_norm is None else layer.input_norm(x), phases, context)
            rows.append(new)
        return self.output(x), KVRows.of(rows)
