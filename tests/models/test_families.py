"""The registry of families: what config.json leaves out is what transformers takes it for, and what nothing reads raises."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers

from eagle_jax.loading.gguf_target import _KEYS
from eagle_jax.models import LlamaConfig
from eagle_jax.models.config import _RELEVANT
from eagle_jax.models.families import FAMILIES, find_family, gguf_family
from eagle_jax.models.rope import ROPE_TYPES
from eagle_jax.text.gguf_tokenizer import _SPLIT_RULES

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 30,  # more than Qwen's default max_window_layers of 28
    "num_attention_heads": 32,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def read(family: str, **changes: Any) -> LlamaConfig:
    config = SIZES | {"model_type": family} | changes
    return LlamaConfig.from_dict({k: v for k, v in config.items() if v is not ...})


def theirs(family: str, **changes: Any) -> Any:
    return transformers.AutoConfig.for_model(family, **(SIZES | changes))


def windows_of(config: Any) -> tuple[int | None, ...]:
    """The window of each layer by transformers' reckoning; empty if there is none."""
    size = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or [SLIDING] * config.num_hidden_layers
    return tuple(size if kind == SLIDING else None for kind in types) if size is not None and SLIDING in types else ()


@pytest.mark.parametrize("family", [family.model_type for family in FAMILIES])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"sliding_window": None},
        {"sliding_window": 100},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 3},
        {"use_sliding_window": True, "max_window_layers": 30},
        {"use_sliding_window": True, "layer_types": [SLIDING, FULL, FULL] * 10},
        {"use_sliding_window": False, "max_window_layers": 3},
        {"layer_types": [FULL] * 30},
        {"attention_bias": True, "head_dim": 16},
    ],
    ids=str,
)
def test_defaults_and_windows_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    known = next(f for f in FAMILIES if f.model_type == family)
    silent = {k for k, v in changes.items() if v in (None, False) or k == "head_dim" or k.startswith("num_")}
    foreign = changes.keys() - known.own_keys - silent
    if foreign == {"layer_types"} and family == "llama":  # true of every Llama, though transformers does not read it
        foreign = set()
    if foreign:
        with pytest.raises(ValueError, match=r"which a model of type .* does not read"):
            read(family, **changes)
        return
    ours, reference = read(family, **changes), theirs(family, **changes)
    for key in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "model_type"):
        assert getattr(ours, key) == getattr(reference, key), key
    assert ours.head_dim == (getattr(reference, "head_dim", None) or 64 // 32)
    assert ours.rope.theta == reference.rope_parameters["rope_theta"] == 10000.0
    assert ours.sliding_windows == windows_of(reference)
    if family != "qwen2":  # whose biases are no question of its configuration
        assert ours.qkv_bias == ours.out_bias == bool(getattr(reference, "attention_bias", False))


@pytest.mark.parametrize("family", [family.model_type for family in FAMILIES])
def test_what_transformers_saves_is_read(tmp_path: Any, family: str) -> None:
    theirs(family).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    config = LlamaConfig.from_dict(written)
    assert config.sliding_windows == ((4096,) * 30 if family == "mistral" else ())
    # Published files name both; one is enough, and two that contradict each other are an error.
    architecture = next(f.architecture for f in FAMILIES if f.model_type == family)
    alone = {k: v for k, v in written.items() if k != "model_type"} | {"architectures": [architecture]}
    assert LlamaConfig.from_dict(alone) == config
    other = "Qwen2ForCausalLM" if family == "qwen3" else "Qwen3ForCausalLM"
    with pytest.raises(ValueError, match=rf"model_type '{family}' and architectures \['{other}'\], which contradict"):
        LlamaConfig.from_dict(written | {"architectures": [other]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, r"model_type 'gemma2' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": ...}, "neither model_type nor architectures"),
        ({"model_type": ..., "architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM'.* supported are LlamaFor"),
        (
            {"model_type": "llama", "sliding_window": 64},
            r"sliding_window 64, which a model of type 'llama' does not read",
        ),
        ({"model_type": "mistral", "use_sliding_window": True}, "'mistral' does not read"),
        ({"model_type": "mistral", "layer_types": [FULL] * 30}, "layer_types .* 'mistral' does not read"),
        ({"model_type": "mistral", "mlp_bias": True}, "mlp_bias True, which a model of type 'mistral' does not read"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias True"),
        (
            {"use_sliding_window": True, "sliding_window": None, "layer_types": [SLIDING] * 30},
            "needs an integer sliding_w",
        ),
        ({"layer_types": [SLIDING] * 30}, "use_sliding_window False"),
        ({"layer_types": [FULL] * 29}, "layer_types .* for each of 30 layers"),
        ({"layer_types": ["chunked_attention"] * 30}, "layer_types .* for each of 30 layers"),
        ({"model_type": "mistral", "sliding_window": 0}, "must be at least 1"),
        ({"num_key_value_heads": ..., "num_attention_heads": 16}, "num_attention_heads 16 .* num_key_value_heads 32"),
        ({"use_mrope": True}, "use_mrope True, which is not supported"),
        ({"rope_interleaved": True}, "rope_interleaved True, which is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention True"),
        ({"compression_config": {"format": "pack-quantized"}}, "quantised .* as its compression_config says"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\), as its quantization_config says"),
        ({"dual_chunk_attention_config": {}}, "does not know: .'dual_chunk_attention_config'"),
    ],
    ids=str,
)
def test_refusals_name_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read("qwen3", **changes)


def test_a_key_of_another_family_can_be_declared_harmless() -> None:
    config = SIZES | {"model_type": "llama", "sliding_window": 64}
    assert LlamaConfig.from_dict(config, ignore_keys=["sliding_window"]).sliding_windows == ()
    assert (
        LlamaConfig.from_dict(config | {"rope_interleaved": False}, ignore_keys=["sliding_window"]).model_type
        == "llama"
    )


def test_the_page_about_targets_names_what_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "targets.md").read_text(encoding="utf-8")
    words = [name for f in FAMILIES for name in (f.model_type, f.architecture, f.gguf_architecture)]
    missing = [
        w
        for w in {*words, *_RELEVANT, *ROPE_TYPES, *_KEYS, *_SPLIT_RULES} - {"llama3", "llama-v3"}
        if f"`{w}`" not in page
    ]
    assert not missing
    kinds = [kind.name for kind in gguf.quants._type_traits]
    assert not [kind for kind in kinds if kind not in page]


def test_one_setting_of_a_block_can_be_declared_harmless() -> None:
    """DeepSeek-R1-0528-Qwen3-8B has this one, which transformers ignores and vLLM multiplies onto the attention factor."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    with pytest.raises(ValueError, match=r"unknown settings \['attn_factor'\]"):
        read("qwen3", rope_scaling=yarn | {"attn_factor": 0.878})
    config = SIZES | {"model_type": "qwen3", "rope_scaling": yarn | {"attn_factor": 0.878}}
    ignoring = LlamaConfig.from_dict(config, ignore_keys=["rope_scaling.attn_factor"])
    assert ignoring == read("qwen3", rope_scaling=yarn)


def test_the_registry_has_each_name_once() -> None:
    assert [find_family({"model_type": f.model_type}) for f in FAMILIES] == list(FAMILIES)
    assert [find_family({"architectures": [f.architecture]}) for f in FAMILIES] == list(FAMILIES)
    assert {gguf_family(f.gguf_architecture).model_type for f in FAMILIES} == {"llama", "qwen2", "qwen3"}
    for family in FAMILIES:
        assert getattr(transformers, family.architecture).config_class.model_type == family.model_type
