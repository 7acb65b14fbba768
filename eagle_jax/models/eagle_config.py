"""Configuration of a draft head: its geometry and every variant flag met in published EAGLE heads, as data."""

import dataclasses
from typing import Literal

from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.specs import LayerSpec, layer_specs

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
    out_bias: bool = False
    """Bias of the attention's output projection."""
    qk_norm: bool = False
    """Norms of each head's queries and keys before they are rotated (heads of Qwen3 layers)."""
    mlp_bias: bool = False
    own_embedding: bool = False
    """The checkpoint has its own token embedding; otherwise the target's is used."""
    own_lm_head: bool = True
    """The checkpoint has its own output head; otherwise the target's is used (usual for EAGLE-1/2)."""
    fc_bias: bool = False
    """Bias of `fc` (EAGLE-1/2)."""
    use_fc: bool = True
    """False for EAGLE-3 heads whose feature is one hidden state of their own width (`use_aux_hidden_state` false)."""
    embedding_norm: bool = False
    """An EAGLE-1/2 head norms the embedding before `fc` (HASS, speculators' `layernorms`)."""
    hidden_norm: bool = False
    """An EAGLE-1/2 head norms the feature, and its own output that takes the feature's place, before `fc`."""
    first_input_norm: bool = False
    """Layer 0 of an EAGLE-1/2 head has an input norm; as published it has none."""
    final_norm: bool = False
    """An EAGLE-1/2 head norms its output, which is both fed back and read by the output head; as published it does not."""
    head_norm: bool = False
    """An EAGLE-1/2 head has a norm before the output head alone; the raw output is fed back. EAGLE-3 always has one."""
    sliding_windows: tuple[int | None, ...] = ()
    """Attention window of each layer, in tokens, None for full attention; empty when no layer has one."""
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
        if self.sliding_windows and len(self.sliding_windows) != self.num_hidden_layers:
            raise ValueError(
                f"sliding_windows {self.sliding_windows} must have one entry for each of {self.num_hidden_layers} layers"
            )
        shares_head = self.draft_vocab_size == self.vocab_size and self.hidden_size == self.target_hidden_size
        if not self.own_lm_head and not shares_head:
            raise ValueError(
                f"a head of width {self.hidden_size} that drafts {self.draft_vocab_size} tokens needs its own lm_head.weight, "
                f"which the checkpoint lacks: the target's has width {self.target_hidden_size} and {self.vocab_size} tokens"
            )
        if self.final_norm and self.head_norm:
            raise ValueError("final_norm and head_norm exclude each other")
        if not self.use_fc and self.feature_size != self.hidden_size:
            raise ValueError(
                f"a head without fc reads one hidden state of its own width {self.hidden_size}, not capture_layers "
                f"{self.capture_layers} of width {self.target_hidden_size}"
            )
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
    def layers(self) -> tuple[LayerSpec, ...]:
        """Every layer, as data."""
        return layer_specs(self)

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
