"""The registry of target families: what each one calls itself, which keys it reads, and what it takes for granted.

All of them are the same decoder (`eagle_jax.models.llama`); they differ in biases, norms of queries and keys, sliding windows,
and in what transformers assumes where config.json is silent.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What sets the models of one `model_type` apart."""

    model_type: str
    """`model_type` of config.json."""
    architecture: str
    """Entry of `architectures` in config.json."""
    gguf_architecture: str
    """`general.architecture` of a GGUF file."""
    own_keys: frozenset[str] = frozenset()
    """Keys of config.json that this family reads and not every family does."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of keys that config.json may leave out, where they differ from Llama's."""
    qkv_bias: bool | None = None
    """Whether q, k and v have biases; None: `attention_bias` says so."""
    out_bias: bool | None = None
    """Whether the attention's output has a bias; None: `attention_bias` says so."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normed before they are rotated."""


_WINDOWS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}

FAMILIES = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        gguf_architecture="llama",
        own_keys=frozenset({"attention_bias", "mlp_bias"}),
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        gguf_architecture="llama",  # converters write Mistral as a Llama
        own_keys=frozenset({"sliding_window"}),
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        qkv_bias=False,
        out_bias=False,
    ),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        gguf_architecture="qwen2",
        own_keys=_WINDOWS,
        defaults=_QWEN_DEFAULTS,
        qkv_bias=True,
        out_bias=False,
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        gguf_architecture="qwen3",
        own_keys=_WINDOWS | {"attention_bias"},
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
        qk_norm=True,
    ),
)
"""Every family; Llama first, which is what a GGUF file of the architecture "llama" is read as."""

OWN_KEYS = frozenset().union(*(family.own_keys for family in FAMILIES))
"""Keys of config.json that some family reads and another does not."""


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a parsed config.json, by `model_type`, or by `architectures` where it has none.

    Raises:
      ValueError: an unknown `model_type` or architecture, neither of them, or two that contradict each other.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures")
    known = ", ".join(family.model_type for family in FAMILIES)
    if model_type is None:
        if not architectures:
            raise ValueError(f"config.json has neither model_type nor architectures; supported model_types are {known}")
        found = [family for family in FAMILIES if [family.architecture] == list(architectures)]
        if not found:
            supported = ", ".join(family.architecture for family in FAMILIES)
            raise ValueError(f"architectures {architectures!r} is not supported; supported are {supported}")
        return found[0]
    found = [family for family in FAMILIES if family.model_type == model_type]
    if not found:
        raise ValueError(f"model_type {model_type!r} is not supported; supported are {known}")
    others = {family.architecture for family in FAMILIES} - {found[0].architecture}
    if contradicting := others.intersection(architectures or ()):
        raise ValueError(
            f"config.json has model_type {model_type!r} and architectures {sorted(contradicting)}, which contradict each other"
        )
    return found[0]


def gguf_family(architecture: object) -> Family:
    """The family of a GGUF file's `general.architecture`.

    Raises:
      ValueError: an architecture that is not supported.
    """
    for family in FAMILIES:
        if family.gguf_architecture == architecture:
            return family
    known = ", ".join(dict.fromkeys(family.gguf_architecture for family in FAMILIES))
    raise ValueError(f"general.architecture {architecture!r} is not supported; supported are {known}")
