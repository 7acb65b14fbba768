"""Configuration of a draft head: its geometry and every variant flag met in published EAGLE heads, as data."""

import dataclasses
from typing import Literal

from eagle_jax.models.rope import RopeConfig

DraftMethod = Literal["eagle", "eagle3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What a draft head computes. Built by `eagle_jax.loading` from a checkpoint's tensors and config.json."""

    method: DraftMethod
    hidden_size: int
    """Width of the head, h."""
    target_hidden_size: int
    """Width of one captured hidden state of the target, H."""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Vocabulary of the target, V: what the head embeds."""
    draft_vocab_size: int
    """Vocabulary of the head's logits, Vd; smaller than V when the checkpoint maps it (`d2t`)."""
    capture_layers: tuple[int, ...]
    """Hidden states of the target that make the feature; k is the input of decoder layer k (transformers' `hidden_states[k]`)."""
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    qkv_bias: bool = False
    own_embedding: bool = False
    """The checkpoint has its own token embedding; otherwise the target's is used."""
    norm_before_residual: bool = False
    """The residual of layer 0 starts from the normed feature (speculators)."""
    norm_before_fc: bool = False
    """One RMSNorm over the concatenated features before `fc` (EAGLE-3.1)."""
    fc_norm: bool = False
    """One RMSNorm for each captured hidden state before `fc` (EAGLE-3.1)."""
    norm_output: bool = False
    """The normed output is fed back, not the raw one (EAGLE-3.1)."""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"the draft head's num_attention_heads {self.num_attention_heads} is no multiple of its num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        if self.hidden_size != self.target_hidden_size and not self.own_embedding:
            raise ValueError(
                f"the head's hidden_size {self.hidden_size} differs from the target's {self.target_hidden_size}, so it needs its "
                "own embed_tokens.weight, which the checkpoint lacks"
            )
        if list(self.capture_layers) != sorted(set(self.capture_layers)):
            raise ValueError(f"capture_layers {self.capture_layers} must be distinct and ascending")

    @property
    def feature_size(self) -> int:
        """Width of the feature vector of one token, `n * H`."""
        return len(self.capture_layers) * self.target_hidden_size


def default_capture_layers(num_hidden_layers: int) -> tuple[int, ...]:
    """EAGLE-3's layers for a target of that depth: the inputs of layers 2, N // 2 and N - 3.

    Raises:
      ValueError: the target is so shallow that two of them coincide.
    """
    layers = (2, num_hidden_layers // 2, num_hidden_layers - 3)
    if not 2 < layers[1] < layers[2]:
        raise ValueError(
            f"EAGLE-3's default capture layers {layers} are not distinct for a target of {num_hidden_layers} layers; name "
            "them in the head's config.json (eagle_aux_hidden_state_layer_ids)"
        )
    return layers
