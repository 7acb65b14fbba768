"""What a training run is made of."""

import dataclasses
import math
from typing import Any, Literal

from eagle_jax.models import DraftConfig, LlamaConfig, RopeConfig
from eagle_jax.models.eagle_config import default_capture_layers
from eagle_jax.training.losses import LossConfig
from eagle_jax.training.optimizers import OptimizerConfig

Method = Literal["eagle3", "eagle3.1", "eagle"]
METHODS: tuple[Method, ...] = ("eagle3", "eagle3.1", "eagle")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The head to be trained; None takes what the target or the method suggests."""

    method: Method = "eagle3.1"
    """"eagle3.1" is EAGLE-3 with a norm of each captured state before `fc` and with the normed output fed back; "eagle" is
    EAGLE-1/2, which predicts features and reads them with the target's output head."""
    draft_vocab_size: int | None = None
    """Vd; None drafts the whole vocabulary. Not for "eagle"."""
    capture_layers: tuple[int, ...] | None = None
    """Inputs of these layers make the feature. None: EAGLE-3's three, or, for "eagle", the last state."""
    num_hidden_layers: int = 1
    intermediate_size: int | None = None
    rope_theta: float | None = None
    """Base of the head's rotary embedding; None takes the target's. It is written into the exported config.json."""

    def build(self, target: LlamaConfig) -> DraftConfig:
        """The head's configuration for a target.

        Raises:
          ValueError: a setting that does not fit the method or the target.
        """
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, not {self.method!r}")
        layers, one = target.num_hidden_layers, self.method == "eagle"
        if one and (self.draft_vocab_size is not None or self.capture_layers is not None):
            raise ValueError(
                "draft_vocab_size and capture_layers are of EAGLE-3: a head of method 'eagle' reads the last state and drafts "
                "the target's whole vocabulary"
            )
        capture = self.capture_layers or ((layers,) if one else default_capture_layers(layers))
        if not one and not all(0 <= layer <= layers for layer in capture):
            raise ValueError(
                f"capture_layers {capture} must lie in 0..{layers}, the layers of the target and its output"
            )
        size = self.draft_vocab_size or target.vocab_size
        if not 1 <= size <= target.vocab_size:
            raise ValueError(f"draft_vocab_size must be 1 to the target's vocab_size {target.vocab_size}, not {size}")
        return DraftConfig(
            method="eagle" if one else "eagle3",
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=self.intermediate_size or target.intermediate_size,
            num_attention_heads=target.num_attention_heads,
            num_key_value_heads=target.num_key_value_heads,
            head_dim=target.head_dim,
            vocab_size=target.vocab_size,
            draft_vocab_size=size,
            capture_layers=capture,
            num_hidden_layers=self.num_hidden_layers,
            rms_norm_eps=target.rms_norm_eps,
            rope=RopeConfig(theta=float(self.rope_theta or target.rope.theta)),
            own_lm_head=not one,
            fc_bias=one,
            fc_norm=self.method == "eagle3.1",
            norm_output=self.method == "eagle3.1",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExistingHead:
    """A head to be trained further; its shape and its draft vocabulary stay what they are."""

    path: str
    """A folder with config.json and weights, the name of a shipped head, or a repository of the model hub."""
    method: Literal["eagle3", "eagle"] = "eagle3"
    """What it must be: "eagle3" (3.1 included) or "eagle", EAGLE-1/2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything that decides what a run computes."""

    head: HeadConfig | ExistingHead = dataclasses.field(default_factory=HeadConfig)
    steps: int = 7
    """Steps of training-time test; 1 for EAGLE-1 as published."""
    decay: float = 0.8
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    init_from_embedding: bool = True
    """Start a new head's output head from the target's rows (`eagle_jax.training.head.initial_parameters`)."""
    feature_noise: float = 0.0
    sequence_length: int = 1024
    """Tokens of a packed row, T; longer conversations are cut."""
    batch_rows: int = 32
    """Packed rows of a batch, B."""
    total_steps: int | None = None
    """Steps of the optimiser; None follows from `train_tokens` or `epochs`."""
    train_tokens: int | None = None
    """Tokens of the run, padding included."""
    epochs: float | None = None
    """Passes over the data."""
    held_out: int = 200
    """Conversations that are kept out of training for evaluation; 0 evaluates on (up to 200 of) those that are trained on."""
    evaluation_depth: int = 7
    """Drafts of a round in evaluations."""
    evaluate_every: int = 500
    """Steps between evaluations."""
    patience: int | None = None
    """Stop when the accepted length has not improved for so many evaluations; None never stops early."""
    seed: int = 0
    compute_dtype: str = "auto"
    """"float32" or "bfloat16"; auto takes the target's."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Of the target; auto takes cuDNN's where it can do it."""
    loss_chunk: int = 4096
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "sequence_length", "batch_rows", "evaluation_depth", "evaluate_every", "loss_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        for name in ("total_steps", "train_tokens", "patience"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value!r}")
        if self.epochs is not None and not self.epochs > 0:
            raise ValueError(f"epochs must be greater than 0, not {self.epochs!r}")
        if sum(x is not None for x in (self.total_steps, self.train_tokens, self.epochs)) != 1:
            raise ValueError("give exactly one of total_steps, train_tokens and epochs: how long to train")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be greater than 0 and at most 1, not {self.decay!r}")
        if self.held_out < 0 or self.feature_noise < 0:
            raise ValueError("held_out and feature_noise must be at least 0")
        if self.compute_dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"compute_dtype must be auto, float32 or bfloat16, not {self.compute_dtype!r}")
        if self.attention not in ("auto", "xla", "cudnn"):
            raise ValueError(f"attention must be auto, xla or cudnn, not {self.attention!r}")
        if self.loss.feature_weight and self.head.method != "eagle":
            raise ValueError(
                "feature_weight is of method 'eagle': the output of an EAGLE-3 head is no feature of the target"
            )

    def count_steps(self, batches_per_epoch: int) -> int:
        """Steps of the optimiser."""
        if self.total_steps is not None:
            return self.total_steps
        if self.train_tokens is not None:
            return max(1, math.ceil(self.train_tokens / (self.batch_rows * self.sequence_length)))
        assert self.epochs is not None
        return max(1, round(self.epochs * batches_per_epoch))

    def as_json(self) -> dict[str, Any]:
        """Plain values, for files."""
        return dataclasses.asdict(self)
