"""Rotary position embeddings: every scaling type of Llama-family configs, computed from positions without a table.

Frequencies follow the definitions of Hugging Face transformers (`modeling_rope_utils`): default, linear, dynamic (NTK),
llama3 and yarn (https://arxiv.org/abs/2309.00071). Positions may lie beyond `max_position_embeddings`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary settings of a model; what a type does not use keeps its default."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    """Trained context: where llama3 and yarn split the bands, and beyond which dynamic scaling starts."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Factor on cos and sin (yarn)."""
    truncate: bool = True

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "RopeConfig":
        """Reads the rotary settings of a config.json.

        Understands transformers 4 (`rope_theta` beside `rope_scaling`, its type under `rope_type` or `type`) and transformers 5
        (`rope_parameters`). Both may be present if they agree.

        Raises:
          ValueError: an unknown type or key, a missing key, or two layouts that contradict each other.
        """
        old, new = config.get("rope_scaling"), config.get("rope_parameters")
        if (
            old
            and new
            and _normal(old) != {k: v for k, v in _normal(new).items() if k != "rope_theta" or k in _normal(old)}
        ):
            raise ValueError(
                f"config.json has rope_scaling {old} and rope_parameters {new}, which contradict each other"
            )
        settings = _normal(new or old or {})
        thetas = {float(v) for v in (settings.pop("rope_theta", None), config.get("rope_theta")) if v is not None}
        if len(thetas) > 1:
            raise ValueError(f"config.json gives two values of rope_theta: {sorted(thetas)}")
        rope_type = settings.pop("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
        partial = settings.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
        if partial not in (None, 1.0):
            raise ValueError(f"partial_rotary_factor {partial} is not supported: Llama rotates whole heads")
        # transformers writes the original length for every type once a model carries it; only the types below read it.
        known = _KEYS[rope_type] | {"original_max_position_embeddings"}
        if unknown := set(settings) - known:
            raise ValueError(
                f"rope type {rope_type!r} has unknown settings {sorted(unknown)}; known are {sorted(known)}"
            )
        settings = {k: v for k, v in settings.items() if v is not None and k in _KEYS[rope_type]}
        required = {"linear": ["factor"], "dynamic": ["factor"], "yarn": ["factor"], "llama3": sorted(_KEYS["llama3"])}
        if missing := [k for k in required.get(rope_type, []) if k not in settings]:
            raise ValueError(f"rope type {rope_type!r} needs {', '.join(missing)} in its settings")
        original = settings.pop("original_max_position_embeddings", None)
        if rope_type in ("dynamic", "yarn") and original is None:
            original = config.get("max_position_embeddings")
            if original is None:
                raise ValueError(f"rope type {rope_type!r} needs max_position_embeddings in config.json")
        if rope_type == "yarn":
            settings["attention_factor"] = _yarn_attention_factor(settings)
            settings.pop("mscale", None)
            settings.pop("mscale_all_dim", None)
        return RopeConfig(
            rope_type=rope_type,
            theta=thetas.pop() if thetas else 10000.0,
            original_max_position_embeddings=int(original or 0),
            **settings,
        )

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Angle per position of each pair of channels, float32 `[head_dim / 2]`, for every type but dynamic."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        base = 1.0 / self.theta**exponents
        if self.rope_type == "linear":
            base = base / self.factor
        elif self.rope_type == "llama3":
            # Long wavelengths are stretched by the factor, short ones kept, those between interpolated.
            turns = self.original_max_position_embeddings * base / (2 * math.pi)
            smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            smooth = np.clip(smooth, 0.0, 1.0)
            base = (1 - smooth) * base / self.factor + smooth * base
        elif self.rope_type == "yarn":
            low, high = (self._yarn_channel(turns, head_dim) for turns in (self.beta_fast, self.beta_slow))
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            ramp = np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
            base = ramp * base / self.factor + (1 - ramp) * base
        return base.astype(np.float32)

    def _yarn_channel(self, turns: float, head_dim: int) -> float:
        """The channel pair that makes `turns` rotations over the original context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(self.theta))

    def phases(
        self, positions: jax.Array, head_dim: int, prompt_lengths: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine of every position, float32 `[B, T, Dh / 2]`.

        Args:
          positions: int32 `[B, T]`.
          head_dim: Dh.
          prompt_lengths: int32 `[B]`; only dynamic scaling reads it. There the base of a token depends on the length of the
            sequence at the time the token was first run, as in transformers' `generate`: the prompt's length for its tokens, the
            own position + 1 for generated ones. So a tree node gets the phase it would get in plain decoding.

        Raises:
          ValueError: dynamic scaling without `prompt_lengths`.
        """
        position = positions.astype(jnp.float32)[..., None]
        if self.rope_type != "dynamic":
            angles = position * self.inverse_frequencies(head_dim)
        else:
            if prompt_lengths is None:
                raise ValueError("prompt_lengths is required for rope type 'dynamic'")
            original = self.original_max_position_embeddings
            seen = jnp.maximum(jnp.maximum(prompt_lengths[:, None], positions + 1), original).astype(jnp.float32)
            stretch = self.factor * seen / original - (self.factor - 1)
            theta = self.theta * stretch ** (head_dim / (head_dim - 2))  # [B, T]
            exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
            angles = position * theta[..., None] ** -exponents
        return self.attention_factor * jnp.cos(angles), self.attention_factor * jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates `[B, T, heads, Dh]` by phases `[B, T, Dh / 2]`, pairing channel i with i + Dh/2 (half-split convention)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _normal(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the type under `rope_type`, whichever of its two names the file uses."""
    out = dict(settings)
    legacy = out.pop("type", None)
    if legacy is not None and out.setdefault("rope_type", legacy) != legacy:
        raise ValueError(f"rope settings {settings} name two types")
    return out


def _yarn_attention_factor(settings: Mapping[str, Any]) -> float:
    """Temperature of yarn on cos and sin: explicit, or from mscale (DeepSeek), or the paper's 0.1 ln(factor) + 1."""
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    factor = float(settings["factor"])

    def temperature(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return temperature(settings["mscale"]) / temperature(settings["mscale_all_dim"])
    return temperature()
