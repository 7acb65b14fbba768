"""Losses of a draft head, computed over chunks of tokens together with their gradient.

Everything here is aligned on the position s whose distribution is to be matched: the target's state of s is the truth for the
draft row t = s - 1 - k of every step k, so one chunk needs the target's logits once for all steps. The gradient is taken chunk
by chunk in the forward pass: logits are never kept and never computed twice, and memory grows with the chunk, not with the
batch, times the vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

LossKind = Literal["cross_entropy", "lk_hybrid"]
LOSSES: tuple[LossKind, ...] = ("cross_entropy", "lk_hybrid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What a head is trained for."""

    kind: LossKind = "cross_entropy"
    """"cross_entropy" with the target's distribution over the draft vocabulary, or "lk_hybrid", which mixes it with the chance of
    rejection (https://arxiv.org/abs/2602.23881)."""
    eta: float = 3.0
    """Of "lk_hybrid": the cross-entropy has the weight exp(-eta * alpha), alpha being the chance of acceptance."""
    token_weight: float = 1.0
    """Of the loss above."""
    feature_weight: float = 0.0
    """Of the smooth L1 distance to the target's next feature (EAGLE-1)."""

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(map(repr, LOSSES))}, not {self.kind!r}")
        for name in ("eta", "token_weight", "feature_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)!r}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Truth:
    """What a draft row is compared with, for C positions of B rows."""

    logits: jax.Array
    """Of the target over the draft vocabulary, float32 `[B, C, Vd]`."""
    probabilities: jax.Array
    """Their softmax."""
    log_total: jax.Array
    """Log-sum-exp of the target's logits over its whole vocabulary, `[B, C]`."""
    best: jax.Array
    """The target's likeliest token, a target id, int32 `[B, C]`."""
    in_vocabulary: jax.Array
    """Whether the head can draft it, bool `[B, C]`."""
    features: jax.Array
    """The target's states after its final norm, `[B, C, H]`."""
    next_tokens: jax.Array
    """The token that follows in the text, int32 `[B, C]`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """How each draft row did, `[K, B, T]`, aligned on s."""

    right: jax.Array
    """The head's likeliest token is the target's, bool."""
    follows: jax.Array
    """The head's likeliest token is the one that follows in the text, bool."""
    acceptance: jax.Array
    """alpha: the chance that a token drawn from the head is accepted, the sum of min(p, q) over the vocabulary, float32."""
    cross_entropy: jax.Array
    """With the target's distribution over the draft vocabulary, float32; 0 where the target's likeliest token is not in it."""


def row_loss(
    logits: jax.Array, rows: jax.Array, truth: Truth, vocabulary: jax.Array, config: LossConfig
) -> tuple[jax.Array, Scores]:
    """Loss `[B, C]` of the rows of one step, and how they did.

    Args:
      logits: of the head, float32 `[B, C, Vd]`.
      rows: what the head put out, `[B, C, h]`.
      truth: what they are compared with.
      vocabulary: target ids of the draft vocabulary, int32 `[Vd]`.
      config: the loss.
    """
    log_total = jax.nn.logsumexp(logits, axis=-1)
    cross_entropy = log_total - (truth.probabilities * logits).sum(-1)
    # A token that cannot be drafted is a rejection, so the target's mass is not renormalised here.
    shared = jnp.minimum(jnp.exp(truth.logits - truth.log_total[..., None]), jnp.exp(logits - log_total[..., None]))
    acceptance = shared.sum(-1)
    token = cross_entropy
    if config.kind == "lk_hybrid":
        weight = jnp.exp(-config.eta * jax.lax.stop_gradient(acceptance))
        token = weight * cross_entropy + (1 - weight) * (1 - acceptance)
    loss = config.token_weight * jnp.where(truth.in_vocabulary, token, 0)
    if config.feature_weight:
        distance = jnp.abs(rows.astype(jnp.float32) - truth.features.astype(jnp.float32))
        smooth = jnp.where(distance < 1, 0.5 * jnp.square(distance), distance - 0.5)
        loss = loss + config.feature_weight * smooth.mean(-1)
    drafted = vocabulary[jnp.argmax(logits, axis=-1)]
    return loss, Scores(
        right=drafted == truth.best,
        follows=drafted == truth.next_tokens,
        acceptance=acceptance,
        cross_entropy=jnp.where(truth.in_vocabulary, cross_entropy, 0),
    )


def chunk_size(length: int, rows: int, tokens: int) -> int:
    """The largest divisor of `length` that makes chunks of at most `tokens` tokens out of `rows` rows, at least 1."""
    wanted = max(1, tokens // rows)
    return max(size for size in range(1, min(wanted, length) + 1) if length % size == 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Fixed:
    """Arrays of `chunked_loss` that no gradient goes into."""

    frozen: Any
    vocabulary: jax.Array
    states: jax.Array
    next_tokens: jax.Array
    weights: jax.Array


def chunked_loss(
    draft_logits: Callable[[Any, Any, jax.Array], jax.Array],
    target_truth: Callable[[Any, jax.Array, jax.Array], Truth],
    config: LossConfig,
    chunk: int,
    frozen: Any,
    vocabulary: jax.Array,
    parameters: Any,
    outputs: jax.Array,
    states: jax.Array,
    next_tokens: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, Scores]:
    """The weighted sum of `row_loss` over all rows and steps, differentiable in `parameters` and `outputs`.

    Args:
      draft_logits: parameters of the output side, `frozen` and outputs `[B, C, h]` to logits `[B, C, Vd]`.
      target_truth: `frozen`, states `[B, C, H]` and next tokens `[B, C]` of the target to the truth.
      config: the loss.
      chunk: C, a divisor of T.
      frozen: arrays that the functions above read; they take no arrays from anywhere else, and no gradient goes into these.
      vocabulary: int32 `[Vd]`.
      parameters: of the output side; a pytree.
      outputs: of the head, aligned on s, `[K, B, T, h]`.
      states: of the target after its final norm, `[B, T, H]`.
      next_tokens: int32 `[B, T]`.
      weights: of each row's loss, float32 `[K, B, T]`.
    """
    steps, length = outputs.shape[0], outputs.shape[2]

    def split(x: jax.Array, axis: int) -> jax.Array:
        parts = x.reshape(*x.shape[:axis], length // chunk, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(parts, axis, 0)

    def join(x: jax.Array, axis: int) -> jax.Array:
        parts = jnp.moveaxis(x, 0, axis)
        return parts.reshape(*parts.shape[:axis], length, *parts.shape[axis + 2 :])

    def one_step(
        parameters: Any, rows: jax.Array, fixed: _Fixed, truth: Truth, weights: jax.Array
    ) -> tuple[jax.Array, Scores]:
        logits = draft_logits(parameters, fixed.frozen, rows)
        loss, scores = row_loss(logits, rows, truth, fixed.vocabulary, config)
        return (weights * loss).sum(), scores

    def run(
        parameters: Any, outputs: jax.Array, fixed: _Fixed, differentiate: bool
    ) -> tuple[jax.Array, Scores, Any, jax.Array]:
        def visit(carry: tuple[jax.Array, Any], inputs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
            loss, gradient = carry
            rows, states, next_tokens, weights = inputs
            truth = target_truth(fixed.frozen, states, next_tokens)
            kept, to_rows = [], []
            for step in range(steps):
                if differentiate:
                    (value, scores), (to_parameters, to_row) = jax.value_and_grad(
                        one_step, argnums=(0, 1), has_aux=True
                    )(parameters, rows[step], fixed, truth, weights[step])
                    gradient = jax.tree.map(lambda total, new: total + new.astype(total.dtype), gradient, to_parameters)
                    to_rows.append(to_row)
                else:
                    value, scores = one_step(parameters, rows[step], fixed, truth, weights[step])
                loss = loss + value
                kept.append(scores)
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *kept)
            return (loss, gradient), (stacked, jnp.stack(to_rows) if differentiate else None)

        wide = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), parameters) if differentiate else None
        inputs = (split(outputs, 2), split(fixed.states, 1), split(fixed.next_tokens, 1), split(fixed.weights, 2))
        (loss, gradient), (scores, to_outputs) = jax.lax.scan(visit, (jnp.zeros(()), wide), inputs)
        scores = jax.tree.map(lambda x: join(x, 2), scores)
        return loss, scores, gradient, join(to_outputs, 2) if differentiate else outputs

    @jax.custom_vjp
    def total(parameters: Any, outputs: jax.Array, fixed: _Fixed) -> tuple[jax.Array, Scores]:
        loss, scores, _, _ = run(parameters, outputs, fixed, False)
        return loss, scores

    def forward(parameters: Any, outputs: jax.Array, fixed: _Fixed) -> tuple[tuple[jax.Array, Scores], Any]:
        loss, scores, gradient, to_outputs = run(parameters, outputs, fixed, True)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, parameters)
        return (loss, scores), (gradient, to_outputs)

    def backward(saved: Any, gradient: tuple[jax.Array, Scores]) -> tuple[Any, jax.Array, None]:
        to_parameters, to_outputs = jax.tree.map(lambda g: (gradient[0] * g).astype(g.dtype), saved)
        return to_parameters, to_outputs, None

    total.defvjp(forward, backward)
    return total(parameters, outputs, _Fixed(frozen, vocabulary, states, next_tokens, weights))
