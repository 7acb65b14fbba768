"""What rows of training attend to, packed documents and the steps of training-time test, and these steps."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle_jax.models import DraftHead, KVRows, Llama
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


@dataclasses.dataclass(frozen=True)
class PackedContext:
    """Rows of packed documents, each of which attends within itself (`eagle_jax.models.context.AttentionContext`)."""

    batch: PackedBatch
    implementation: PackedImplementation = "xla"

    @property
    def positions(self) -> jax.Array:
        """Rotary positions of the rows, int32 `[B, T]`."""
        return self.batch.positions

    def attend(
        self, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array, *, scale: float, window: int | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Attends causally within documents; keeps keys and values as they are."""
        del layer
        attend = cudnn_packed_attention if self.implementation == "cudnn" else packed_attention
        segments, positions = self.batch.segments, self.batch.positions
        return attend(queries, keys, values, segments, positions, scale=scale, window=window), (keys, values)


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What the rows of one step of training-time test attend to (`eagle_jax.models.context.AttentionContext`)."""

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
        self, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array, *, scale: float, window: int | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Attends to step 0 up to the own row, and to the own row alone of the steps since."""
        step = self.step
        rows = (*(earlier.layer(layer) for earlier in self.earlier), (keys, values))

        def mix(queries: jax.Array, rows: tuple[tuple[jax.Array, jax.Array], ...]) -> jax.Array:
            return packed_attention(
                queries,
                *rows[0],
                self.batch.segments,
                self.batch.positions,
                scale=scale,
                window=window,
                step=step,
                diagonals=rows[1:],
            )

        # Scores are T x T: computed again in the backward pass, never kept.
        return jax.checkpoint(mix)(queries, rows), (keys, values)


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
      features: `[B, T, n * H]`, as the target gives them (`ForwardOutput.aux`).
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
