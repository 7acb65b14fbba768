"""The forward passes of training: the frozen target over packed documents, and the head's steps of training-time test."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle_jax.models import DraftHead, KVRows, Llama
from eagle_jax.models.draft_layer import DraftLayer
from eagle_jax.training.attention import PackedImplementation, cudnn_packed_attention, packed_attention
from eagle_jax.training.batch import PackedBatch


def shift_left(x: jax.Array, count: int) -> jax.Array:
    """`x [B, T, ...]` with row t + count at t; zeros come in at the end."""
    count = min(count, x.shape[1])
    return jnp.concatenate([x[:, count:], jnp.zeros_like(x[:, :count])], axis=1)


def shift_right(x: jax.Array, count: int) -> jax.Array:
    """`x [B, T, ...]` with row t - count at t; zeros come in at the start."""
    count = min(count, x.shape[1])
    return jnp.concatenate([jnp.zeros_like(x[:, :count]), x[:, : x.shape[1] - count]], axis=1)


def run_target(
    target: Llama, batch: PackedBatch, capture_layers: tuple[int, ...], implementation: PackedImplementation = "xla"
) -> tuple[jax.Array, jax.Array]:
    """Runs the target over packed documents.

    Returns:
      The states after the final norm, `[B, T, H]`, and the captured ones side by side, `[B, T, n * H]`.
    """
    config = target.config
    attend = cudnn_packed_attention if implementation == "cudnn" else packed_attention
    # Dynamic rotary scaling reads the length of the prompt; within the trained context, which training keeps to, it has none.
    phases = config.rope.phases(batch.positions, config.head_dim, jnp.zeros((batch.tokens.shape[0],), jnp.int32))
    x = target.embed(batch.tokens)  # [B, T, H]
    captured: dict[int, jax.Array] = {}
    for i, layer in enumerate(target.layers):
        captured[i] = x
        with jax.named_scope(f"layer_{i}"):
            queries, keys, values = layer.attention.project(layer.input_norm(x), phases)
            mixed = attend(
                queries,
                keys,
                values,
                batch.segments,
                batch.positions,
                scale=config.head_dim**-0.5,
                window=config.sliding_windows[i] if config.sliding_windows else None,
            )
            x = x + layer.attention.join(mixed)
            x = x + layer.mlp(layer.post_norm(x))
    x = target.norm(x)
    captured[config.num_hidden_layers] = x
    return x, jnp.concatenate([captured[k] for k in capture_layers], axis=-1)


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What the rows of one step of training-time test attend to (`eagle_jax.models.draft_layer.RowContext`)."""

    batch: PackedBatch
    earlier: tuple[KVRows, ...]
    """Keys and values of the steps before, `[B, T, Hkv, Dh]` a layer."""

    @property
    def step(self) -> int:
        """k."""
        return len(self.earlier)

    @property
    def positions(self) -> jax.Array:
        """Rotary positions of the rows, `positions + k`, int32 `[B, T]`."""
        return self.batch.positions + self.step

    def attend(
        self, layer: DraftLayer, inputs: jax.Array, phases: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Attends to step 0 up to the own row, and to the own row alone of the steps since."""
        attention, index, step = layer.attention, layer.index, self.step
        queries, keys, values = attention.project(inputs, phases)
        rows = (*(earlier.layer(index) for earlier in self.earlier), (keys, values))

        def mix(queries: jax.Array, rows: tuple[tuple[jax.Array, jax.Array], ...]) -> jax.Array:
            return packed_attention(
                queries,
                *rows[0],
                self.batch.segments,
                self.batch.positions,
                scale=attention.head_dim**-0.5,
                window=layer.sliding_window,
                step=step,
                diagonals=rows[1:],
            )

        # Scores are T x T: computed again in the backward pass, never kept.
        mixed = jax.checkpoint(mix)(queries, rows)
        return attention.join(mixed), (keys, values)


def run_draft(
    head: DraftHead,
    target: Llama,
    features: jax.Array,
    batch: PackedBatch,
    steps: int,
    *,
    remat: bool = False,
) -> list[jax.Array]:
    """Runs the head's steps of training-time test from every position.

    Row t of step 0 takes the target's feature of token t and the embedding of token t + 1, and predicts token t + 2. Row t of
    step k takes the head's own output at t of the step before and token t + 1 + k, and predicts token t + 2 + k. So row t is
    what the head computes when it drafts from t in decoding, given that the tokens it drafted so far were right.

    Args:
      head: the head.
      target: gives embeddings where the head has none.
      features: `[B, T, n * H]`, as `run_target` gives them.
      batch: the tokens.
      steps: K.
      remat: compute each step again in the backward pass instead of keeping what it computed.

    Returns:
      K outputs `[B, T, h]`, before the norm of the output head where there is one.
    """
    table = target.embed if head.embed is None else head.embed
    hidden = head.fuse(features)
    outputs: list[jax.Array] = []
    earlier: tuple[KVRows, ...] = ()
    for step in range(steps):

        def run(hidden: jax.Array, earlier: tuple[KVRows, ...], step: int = step) -> tuple[jax.Array, KVRows]:
            embeddings = table(shift_left(batch.tokens, 1 + step)).astype(head.dtype)
            return head(embeddings, hidden, StepContext(batch, earlier))

        with jax.named_scope(f"draft_step_{step}"):
            hidden, rows = (jax.checkpoint(run) if remat else run)(hidden, earlier)
        outputs.append(hidden)
        earlier = (*earlier, rows)
    return outputs
