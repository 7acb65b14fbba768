"""What each layer of a model is, as data: modules, caches and the arithmetic of memory follow from it."""

import dataclasses
from typing import Any, Literal

from eagle_jax.models.rope import RopeConfig
from eagle_jax.parallel.partition import local_kv_heads

AttentionKind = Literal["grouped"]
"""Grouped-query attention, of which multi-head attention is the case of one query head a group."""
MlpKind = Literal["gated"]
"""SiLU-gated."""


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """What one layer keeps of a token."""

    heads: int
    """Hkv."""
    key_width: int
    """Values of a key."""
    value_width: int
    """Values of a value."""

    def values(self, shards: int = 1) -> int:
        """Numbers kept of a token on one of the devices that share the heads."""
        return local_kv_heads(self.heads, shards) * (self.key_width + self.value_width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer."""

    heads: int
    """Query heads: Hq."""
    head_dim: int
    """Dh."""
    kv: KVSpec
    mlp_width: int
    rope: RopeConfig
    norm_eps: float
    attention: AttentionKind = "grouped"
    mlp: MlpKind = "gated"
    window: int | None = None
    """Tokens that a row looks back, its own included; None is everything."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Each head's queries and keys are normed before they are rotated."""


def layer_specs(config: Any) -> tuple[LayerSpec, ...]:
    """The layers of a `LlamaConfig` or a `DraftConfig`, which differ by their windows alone, in the order in which they run."""
    layer = LayerSpec(
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        kv=KVSpec(config.num_key_value_heads, config.head_dim, config.head_dim),
        mlp_width=config.intermediate_size,
        rope=config.rope,
        norm_eps=config.rms_norm_eps,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.qk_norm,
    )
    windows = config.sliding_windows or (None,) * config.num_hidden_layers
    return tuple(dataclasses.replace(layer, window=window) for window in windows)
