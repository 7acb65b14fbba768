"""The two formats of a head's config.json, EAGLE's own and that of speculators, read into one: EAGLE's, with what it cannot say.

https://github.com/SafeAILab/EAGLE and most trainers write the keys of a decoder's config.json flat, some under `eagle_config`.
https://github.com/vllm-project/speculators nests the decoder's under `transformer_layer_config`, says what kind of head it is
(`speculators_model_type`), and names the target and the number of tokens to draft (`speculators_config`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from eagle_jax.loading.errors import CheckpointError, listed
from eagle_jax.models.config import IRRELEVANT_KEYS
from eagle_jax.models.eagle_config import DraftMethod

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

Format = Literal["eagle", "speculators"]

SPECULATORS_TYPES = ("eagle3", "eagle")

# Keys beside transformer_layer_config that mean the same as in a flat config.json.
_CARRIED = (
    "draft_vocab_size", "dtype", "fc_norm", "fusion_bias", "layernorms", "norm_before_fc", "norm_before_residual", "norm_output",
    "quantization_config", "target_hidden_size", "tie_word_embeddings", "torch_dtype", LAYER_IDS,
)  # fmt: skip
_SPECULATORS = frozenset({
    "speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_architecture",
    "transformer_layer_config", *_CARRIED,
    # About training, or fields of the configuration class that the format's own writer lets slip into the file.
    "attribute_map", "base_config_key", "base_model_ep_plan", "base_model_pp_plan", "base_model_tp_plan", "embed_requires_grad",
    "has_no_defaults_at_init", "is_composition", "keys_to_ignore_at_inference", "model_type", "sub_configs",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What a head's config.json says, in the layout of EAGLE's format."""

    values: Mapping[str, Any]
    format: Format
    method: DraftMethod | None
    """What the file says the head is; None where it does not say."""
    method_key: str
    """Where it says so, for messages."""
    verifier: str | None = None
    """Target that the head was made for: a repository or a path (speculators)."""
    num_speculative_tokens: int | None = None
    """Length of the chain to be drafted (speculators)."""
    guesses: tuple[str, ...] = ()
    """What the file leaves open, and how it is taken."""


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is in the speculators format."""
    return any(k in config for k in ("speculators_model_type", "speculators_config", "transformer_layer_config"))


def read_head_config(config: Mapping[str, Any]) -> HeadConfig:
    """Reads a parsed config.json in either format.

    Raises:
      CheckpointError: a kind of head that is not read, or a speculators file that lacks something or contradicts itself.
    """
    if is_speculators(config):
        return _read_speculators(config)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list | tuple) or not all(isinstance(a, str) for a in architectures):
        raise CheckpointError(f"architectures must be a list of names, not {architectures!r}")
    found: list[DraftMethod] = []
    for name in architectures:
        # "LlamaForCausalLM", which the official heads of every generation have, says nothing.
        if name.lower().startswith("peagle"):
            raise CheckpointError(f"architectures {name!r}: P-EAGLE heads, which draft in parallel, are not supported")
        if "eagle3" in name.lower():
            found.append("eagle3")
        elif name.lower().startswith("eagle"):
            found.append("eagle")
    return HeadConfig(
        values=config, format="eagle", method=found[0] if found else None, method_key=f"architectures {architectures}"
    )


def _read_speculators(config: Mapping[str, Any]) -> HeadConfig:
    kind = config.get("speculators_model_type")
    if kind is None:
        raise CheckpointError("config.json is in the speculators format, but lacks speculators_model_type")
    if kind not in SPECULATORS_TYPES:
        raise CheckpointError(
            f"speculators_model_type {kind!r} is not supported; supported are {', '.join(map(repr, SPECULATORS_TYPES))}"
        )
    if unknown := sorted({k for k in config if not k.startswith("_")} - _SPECULATORS - IRRELEVANT_KEYS):
        raise CheckpointError(f"the head's config.json has keys that this library does not know: {listed(unknown)}")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise CheckpointError(f"transformer_layer_config must be an object, the layers' configuration, not {layer!r}")
    if layer.get("model_type", "llama") not in ("llama", "qwen3"):
        raise CheckpointError(
            f"transformer_layer_config has model_type {layer['model_type']!r}; heads of 'llama' and 'qwen3' layers are supported"
        )
    shape = config.get("transformer_layer_architecture", "auto")
    if shape not in (None, "auto", "LlamaDecoderLayer", "LlamaForCausalLM"):
        raise CheckpointError(f"transformer_layer_architecture {shape!r} is not supported; 'LlamaDecoderLayer' is")
    carried = {key: config[key] for key in _CARRIED if config.get(key) is not None}
    for key in carried.keys() & layer.keys() - {"dtype", "torch_dtype", "tie_word_embeddings"}:
        if layer[key] is not None and layer[key] != carried[key]:
            raise CheckpointError(
                f"config.json contradicts itself: {key} is {carried[key]}, transformer_layer_config.{key} is {layer[key]}"
            )
    values = {key: value for key, value in layer.items() if key != "architectures"} | carried
    guesses = []
    if kind == "eagle3" and values.get("norm_before_residual") is None:
        # The class of the format has false, its trainer and vLLM have true: heads were measured with the latter.
        values["norm_before_residual"] = True
        guesses.append(
            "config.json does not say norm_before_residual; it is taken as true, as vLLM does for the speculators format. "
            "config_overrides={'norm_before_residual': False} changes that"
        )
    verifier, tokens = _read_proposal(config, kind)
    return HeadConfig(
        values=values,
        format="speculators",
        method=kind,
        method_key=f"speculators_model_type {kind!r}",
        verifier=verifier,
        num_speculative_tokens=tokens,
        guesses=tuple(guesses),
    )


def _read_proposal(config: Mapping[str, Any], kind: str) -> tuple[str | None, int | None]:
    """The target and the number of tokens to draft, out of `speculators_config`."""
    section = config.get("speculators_config")
    if section is None:
        return None, None
    if not isinstance(section, Mapping):
        raise CheckpointError(f"speculators_config must be an object, not {section!r}")
    if section.get("algorithm") not in (None, kind):
        raise CheckpointError(
            f"config.json contradicts itself: speculators_model_type is {kind!r}, speculators_config.algorithm is "
            f"{section['algorithm']!r}"
        )
    verifier = section.get("verifier") or {}
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if name is not None and not isinstance(name, str):
        raise CheckpointError(f"speculators_config.verifier.name_or_path must be a string, not {name!r}")
    methods = section.get("proposal_methods") or []
    if not isinstance(methods, list) or not all(isinstance(m, Mapping) for m in methods):
        raise CheckpointError(f"speculators_config.proposal_methods must be a list of objects, not {methods!r}")
    if not methods:
        return name or None, None
    wanted = section.get("default_proposal_method")
    chosen = [m for m in methods if wanted is None or m.get("proposal_type") == wanted]
    if not chosen:
        raise CheckpointError(
            f"default_proposal_method is {wanted!r}, but proposal_methods has "
            f"{listed(repr(m.get('proposal_type')) for m in methods)}"
        )
    method = chosen[0]
    # Only exact acceptance keeps the target's text.
    for key, exact in (("verifier_accept_k", 1), ("accept_tolerance", 0.0)):
        if method.get(key) not in (None, exact):
            raise CheckpointError(
                f"speculators_config asks for {key} {method[key]}, which would change the target's text; only {exact} is "
                "supported"
            )
    tokens = method.get("speculative_tokens")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise CheckpointError(f"speculative_tokens must be an integer of at least 1, not {tokens!r}")
    return name or None, tokens
