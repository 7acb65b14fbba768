"""One training step and one evaluation step, each a single program: the frozen target's forward, the head's steps, the loss."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from eagle_jax.models import DraftConfig, Llama
from eagle_jax.models.matmul import matmul
from eagle_jax.training.attention import PackedImplementation
from eagle_jax.training.batch import PackedBatch
from eagle_jax.training.contexts import PackedContext, run_draft, shift_left, shift_right
from eagle_jax.training.head import OUTPUT_SIDE, HeadTemplate, Parameters
from eagle_jax.training.losses import LossConfig, Scores, Truth, chunk_size, chunked_loss
from eagle_jax.training.sharding import TrainingMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What a compiled step depends on, besides the models."""

    steps: int
    """Steps of training-time test, K."""
    decay: float = 0.8
    """The loss of step k has the weight decay ** k."""
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    compute_dtype: str = "float32"
    """dtype of the head's activations and of the weights it computes with; the trained arrays are float32."""
    attention: PackedImplementation = "xla"
    """Of the target."""
    loss_chunk: int = 4096
    """Tokens whose logits are alive at once."""
    remat: bool = False
    """Compute each draft step again in the backward pass."""
    feature_noise: float = 0.0
    """Uniform noise of up to this is added to the features."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """Arrays that training reads and never changes."""

    target: Any
    """The target's parameters, an `nnx.State`."""
    vocabulary: Any
    """Target ids of the draft vocabulary, int32 `[Vd]`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes."""

    parameters: Parameters
    """Float32."""
    optimizer: Any
    """The state of the optimiser."""
    step: Any
    """Steps done, int32 scalar. It says everything about the data: the batches follow from it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metrics:
    """Sums over a batch, float32; arrays `[K]` have one entry a step of training-time test."""

    loss: jax.Array
    gradient_norm: jax.Array
    supervised: jax.Array
    """Rows with a loss, `[K]`."""
    cross_entropy: jax.Array
    """`[K]`."""
    drafts: jax.Array
    """Rows that can be a draft in decoding, `[K]`: the token before the first drafted one is the target's own too."""
    right: jax.Array
    """Of these, those whose likeliest token is the target's, `[K]`."""
    right_so_far: jax.Array
    """Of these, those of which that is true of all steps before, too, `[K]`."""
    acceptance: jax.Array
    """Sum of alpha over `drafts`, `[K]`."""
    tokens: jax.Array
    """Tokens that are no padding."""


EvaluationStep = Callable[[Parameters, Frozen, PackedBatch], tuple[Metrics, jax.Array]]
"""Metrics, and of each position how many drafts from there equal the text, int32 `[B, T]`."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """The steps of one run, jitted."""

    train: jax.stages.Wrapped
    """A state, `Frozen` and a batch to the next state and `Metrics`; consumes the state."""
    evaluate: jax.stages.Wrapped
    """An `EvaluationStep`."""


def make_programs(
    target: Any,
    template: HeadTemplate,
    config: StepConfig,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    evaluation_steps: int | None = None,
    mesh: TrainingMesh | None = None,
) -> Programs:
    """Builds the steps.

    Args:
      target: graph definition of the target (`nnx.split`).
      template: the head.
      config: the step.
      optimizer: of the head's parameters.
      seed: of the noise.
      evaluation_steps: steps of training-time test in evaluations; None takes as many as in training.
      mesh: where the state stays; None leaves that to the compiler.
    """

    def train(state: TrainState, frozen: Frozen, batch: PackedBatch) -> tuple[TrainState, Metrics]:
        model: Llama = nnx.merge(target, frozen.target)
        noise = jax.random.fold_in(jax.random.key(seed), state.step) if config.feature_noise else None

        def loss(parameters: Parameters) -> tuple[jax.Array, Metrics]:
            total, scores, masks = _forward(model, template, config, config.steps, parameters, frozen, batch, noise)
            return total, _metrics(total, scores, masks, batch)

        gradient, metrics = jax.grad(loss, has_aux=True)(state.parameters)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.parameters)
        done = TrainState(
            parameters=optax.apply_updates(state.parameters, updates),
            optimizer=optimizer_state,
            step=state.step + 1,
        )
        if mesh is not None and mesh.mesh is not None:
            # Left alone, the compiler may choose another placement, and the next step would be another program.
            done = jax.lax.with_sharding_constraint(done, mesh.tree(done))
        return done, dataclasses.replace(metrics, gradient_norm=_norm(gradient))

    def evaluate(parameters: Parameters, frozen: Frozen, batch: PackedBatch) -> tuple[Metrics, jax.Array]:
        model: Llama = nnx.merge(target, frozen.target)
        steps = config.steps if evaluation_steps is None else evaluation_steps
        total, scores, masks = _forward(model, template, config, steps, parameters, frozen, batch, None)
        follows = jnp.stack(
            [shift_left(scores.follows[k] & masks.drafts[k], k + 1) for k in range(steps)]
        )  # [K, B, T], by the row that drafts
        return _metrics(total, scores, masks, batch), jnp.cumprod(follows.astype(jnp.int32), axis=0).sum(0)

    return Programs(jax.jit(train, donate_argnums=0), jax.jit(evaluate))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Masks:
    """Which rows count, bool `[K, B, T]`, aligned on s."""

    supervised: jax.Array
    """The token after s is the assistant's, and the row t = s - 1 - k is in its document."""
    drafts: jax.Array
    """And so is the token after t: such a row exists in decoding, where the first token of an answer is never drafted."""


def make_masks(batch: PackedBatch, steps: int) -> Masks:
    """The rows that count."""
    following = shift_left(batch.segments, 1)
    written = shift_left(batch.assistant, 1) & (following > 0)
    supervised, drafts = [], []
    for k in range(steps):
        rows = written & (shift_right(batch.segments, k + 1) == following)
        supervised.append(rows)
        drafts.append(rows & shift_right(batch.assistant, k))
    return Masks(jnp.stack(supervised), jnp.stack(drafts))


def _forward(
    target: Llama,
    template: HeadTemplate,
    config: StepConfig,
    steps: int,
    parameters: Parameters,
    frozen: Frozen,
    batch: PackedBatch,
    noise: jax.Array | None,
) -> tuple[jax.Array, Scores, Masks]:
    with jax.named_scope("target"):
        # Dynamic rotary scaling reads the length of the prompt; within the trained context, which training keeps to, it has none.
        no_prompts = jnp.zeros((batch.tokens.shape[0],), jnp.int32)
        context = PackedContext(batch, config.attention)
        out = target(batch.tokens, context, aux_layers=template.config.capture_layers, prompt_lengths=no_prompts)
        states, features = out.hidden, out.aux
    if noise is not None:
        amplitude = config.feature_noise
        features = features + jax.random.uniform(noise, features.shape, features.dtype, -amplitude, amplitude)
    narrow = {path: value.astype(config.compute_dtype) for path, value in parameters.items()}
    head = template.build(narrow, frozen.vocabulary)
    with jax.named_scope("draft"):
        outputs = run_draft(head, target, features, batch, steps, remat=config.remat)
    aligned = jnp.stack([shift_right(rows, k + 1) for k, rows in enumerate(outputs)])  # [K, B, T, h]
    masks = make_masks(batch, steps)
    counts = masks.supervised.sum((1, 2))
    decay = config.decay ** jnp.arange(steps, dtype=jnp.float32)
    weights = masks.supervised * (decay / jnp.maximum(counts, 1))[:, None, None]
    lm_head = target.embed.weight[...] if target.lm_head is None else target.lm_head.weight[...]
    with jax.named_scope("loss"):
        loss, scores = chunked_loss(
            functools.partial(_draft_logits, template.config),
            _truth,
            config.loss,
            chunk_size(aligned.shape[2], aligned.shape[1], config.loss_chunk),
            _OutputSide(
                lm_head=lm_head,
                # Rows of the draft vocabulary alone: as cheap as picking their logits, and easy to split over devices.
                rows=lm_head[frozen.vocabulary] if len(frozen.vocabulary) < len(lm_head) else None,
                vocabulary=frozen.vocabulary,
            ),
            frozen.vocabulary,
            {path: value for path, value in narrow.items() if path.startswith(OUTPUT_SIDE)},
            aligned,
            states,
            shift_left(batch.tokens, 1),
            weights,
        )
    return loss, scores, masks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _OutputSide:
    """Of the target."""

    lm_head: jax.Array
    """`[V, H]`."""
    rows: jax.Array | None
    """Of the draft vocabulary, `[Vd, H]`; None where that is the target's."""
    vocabulary: jax.Array
    """int32 `[Vd]`."""


def _draft_logits(config: DraftConfig, parameters: Any, side: _OutputSide, rows: jax.Array) -> jax.Array:
    """Logits `[B, C, Vd]` of outputs of the head `[B, C, h]`."""
    weight = parameters["lm_head.weight"] if config.own_lm_head else side.lm_head.astype(rows.dtype)
    if "norm.weight" in parameters and not (config.norm_output or config.final_norm):  # `DraftModule.before_lm_head`
        rows = _rms_norm(rows, parameters["norm.weight"], config.rms_norm_eps)
    return matmul(rows, weight, out_dtype=jnp.float32)


def _truth(side: _OutputSide, states: jax.Array, next_tokens: jax.Array) -> Truth:
    """What the target says after its states `[B, C, H]`."""
    full = matmul(states, side.lm_head, out_dtype=jnp.float32)  # [B, C, V]
    log_total, best = jax.nn.logsumexp(full, axis=-1), jnp.argmax(full, axis=-1).astype(jnp.int32)
    logits = full if side.rows is None else matmul(states, side.rows, out_dtype=jnp.float32)
    places = jnp.searchsorted(side.vocabulary, best)
    return Truth(
        logits=logits,
        probabilities=jax.nn.softmax(logits, axis=-1),
        log_total=log_total,
        best=best,
        in_vocabulary=side.vocabulary[jnp.minimum(places, len(side.vocabulary) - 1)] == best,
        features=states,
        next_tokens=next_tokens,
    )


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """As `eagle_jax.models.layers.RMSNorm`, of a weight that is an argument."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(tree)))


def _metrics(loss: jax.Array, scores: Scores, masks: Masks, batch: PackedBatch) -> Metrics:
    steps = scores.right.shape[0]
    drafts = masks.drafts.astype(jnp.float32)
    right = scores.right & masks.drafts
    by_row = jnp.stack([shift_left(right[k], k + 1) for k in range(steps)])
    return Metrics(
        loss=loss,
        gradient_norm=jnp.zeros(()),
        supervised=masks.supervised.sum((1, 2)).astype(jnp.float32),
        cross_entropy=(scores.cross_entropy * masks.supervised).sum((1, 2)),
        drafts=drafts.sum((1, 2)),
        right=right.sum((1, 2)).astype(jnp.float32),
        right_so_far=jnp.cumprod(by_row.astype(jnp.float32), axis=0).sum((1, 2)),
        acceptance=(scores.acceptance * drafts).sum((1, 2)),
        tokens=(batch.segments > 0).sum().astype(jnp.float32),
    )
