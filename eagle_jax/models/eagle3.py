"""The EAGLE-3 draft head (https://arxiv.org/abs/2503.01840), with the variants found in published checkpoints."""

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.models.cache import KVRows
from eagle_jax.models.context import AttentionContext
from eagle_jax.models.draft_layer import DraftModule
from eagle_jax.models.eagle_config import DraftConfig
from eagle_jax.models.layers import Block, Linear, RMSNorm


class Eagle3Layer(Block):
    """The first layer takes [embedding; feature], twice the width, each normed; the others are ordinary pre-norm layers."""

    def __init__(self, config: DraftConfig, index: int, *, shards: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, eps = config.hidden_size, config.rms_norm_eps
        inputs, spec = width if index else 2 * width, config.layers[index]
        super().__init__(spec, index, width, in_features=inputs, shards=shards, dtype=dtype, rngs=rngs)
        self.input_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.hidden_norm = None if index else RMSNorm(width, eps=eps, dtype=dtype)


class Eagle3Head(DraftModule):
    """Predicts the next feature and token of a target from its captured hidden states and the token that follows.

    Row p of the head takes the target's feature of token p with the embedding of token p + 1, at rotary position p, and predicts
    token p + 2. Deeper draft steps feed the head's own output back in place of the feature.

    Args:
      config: geometry and variant flags.
      dtype: dtype of weights, activations and cache.
      rngs: source of the random initial weights.
      shards: devices that share the weights: 1, or as many as the target's. With 1 every device has the whole head.

    Raises:
      ValueError: a number of heads or a width that does not divide over the shards.
    """

    def __init__(self, config: DraftConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, shards: int = 1):
        super().__init__(config, shards=shards, dtype=dtype, rngs=rngs)
        width, eps = config.hidden_size, config.rms_norm_eps
        states = len(config.capture_layers)
        self.feature_norm = RMSNorm(config.feature_size, eps=eps, dtype=dtype) if config.norm_before_fc else None
        norms = [
            RMSNorm(config.target_hidden_size, eps=eps, dtype=dtype) for _ in range(states if config.fc_norm else 0)
        ]
        self.fc_norms = nnx.List(norms)
        features = config.feature_size
        fc_axes = ("embed", "fused")
        self.fc = (
            Linear(features, width, axes=fc_axes, sum_over=shards, dtype=dtype, rngs=rngs) if config.use_fc else None
        )
        layers = [
            Eagle3Layer(config, i, shards=shards, dtype=dtype, rngs=rngs) for i in range(config.num_hidden_layers)
        ]
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(width, eps=eps, dtype=dtype)
        self._end(dtype=dtype, rngs=rngs)

    @property
    def feeds_back_normed(self) -> bool:
        """Whether the output is normed before it is fed back (EAGLE-3.1)."""
        return self.config.norm_output

    def fuse(self, features: jax.Array) -> jax.Array:
        """Maps the target's features `[..., n * H]` to the head's width `[..., h]`."""
        x = features.astype(self.dtype)
        if self.feature_norm is not None:
            x = self.feature_norm(x)
        if self.config.fc_norm:
            parts = jnp.split(x, len(self.config.capture_layers), axis=-1)
            x = jnp.concatenate([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], axis=-1)
        return x if self.fc is None else self.fc(x)

    def __call__(self, embeddings: jax.Array, hidden: jax.Array, context: AttentionContext) -> tuple[jax.Array, KVRows]:
        """Runs T rows of every slot behind its committed draft rows.

        Args:
          embeddings: embedding of the token after each row's, `[B, T, h]`.
          hidden: fused feature, or the head's own output of the row before, `[B, T, h]`.
          context: positions, cache and tail.

        Returns:
          The output `[B, T, h]`, which is fed back and goes into `logits`, and the tail with the new rows.
        """
        config = self.config
        phases = config.rope.phases(context.positions, config.head_dim, None)
        x = hidden
        rows: list[tuple[jax.Array, ...]] = []
        for layer in self.layers:
            if layer.hidden_norm is None:
                inputs = layer.input_norm(x)
            else:
                normed = layer.hidden_norm(x)
                inputs = jnp.concatenate([layer.input_norm(embeddings), normed], axis=-1)  # [B, T, 2h]
                x = normed if config.norm_before_residual else x
            with jax.named_scope(f"draft_layer_{len(rows)}"):
                x, new = layer(x, inputs, phases, context)
            rows.append(new)
        return self.output(x), KVRows.of(rows)
