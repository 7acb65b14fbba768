"""Reading config.json: every layout, and every refusal with the name of what is wrong."""

from typing import Any

import numpy as np
import pytest
import transformers

from eagle_jax.models import LlamaConfig, RopeConfig

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(**changes: Any) -> LlamaConfig:
    settings = CONFIG | changes
    return LlamaConfig.from_dict({k: v for k, v in settings.items() if v is not ...})


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda s: s["rope_type"],
)
def test_layouts_agree(settings: dict[str, Any]) -> None:
    """transformers 4, its older name of the type, transformers 5, and both layouts in one file."""
    legacy = {"type" if k == "rope_type" else k: v for k, v in settings.items()}
    five = settings | {"rope_theta": 5e5}
    configs = [
        read(rope_theta=5e5, rope_scaling=settings),
        read(rope_theta=5e5, rope_scaling=legacy),
        read(rope_theta=5e5, rope_scaling=settings | legacy),
        read(rope_parameters=five),
        read(rope_theta=5e5, rope_scaling=legacy, rope_parameters=five),
    ]
    assert configs[0].rope.theta == 5e5
    assert configs[0].rope.rope_type == settings["rope_type"]
    assert all(c == configs[0] for c in configs)


def test_theta_and_scaling_have_defaults() -> None:
    assert read().rope == read(rope_scaling=None).rope == RopeConfig(theta=10000.0)
    assert read(rope_theta=1e6).rope.theta == 1e6
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).rope.theta == 1e6


def test_a_config_saved_by_transformers_round_trips(tmp_path: Any) -> None:
    import json

    written = transformers.LlamaConfig(
        **{k: v for k, v in CONFIG.items() if k != "model_type"}, num_key_value_heads=2, eos_token_id=[3, 0], dtype="bfloat16",
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    )  # fmt: skip
    written.save_pretrained(tmp_path)
    config = LlamaConfig.from_dict(json.loads((tmp_path / "config.json").read_text()))
    assert (config.num_key_value_heads, config.head_dim, config.eos_token_ids) == (2, 8, (3, 0))
    assert config.rope.theta == 5e5
    assert config.checkpoint_dtype == "bfloat16"


def test_what_is_absent() -> None:
    config = read()
    assert config.num_key_value_heads == 4
    assert config.head_dim == 8
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()
    assert config.rms_norm_eps == 1e-6
    assert read(num_key_value_heads=None, head_dim=None) == config


@pytest.mark.parametrize(
    ("config_eos", "generation", "ids"),
    [
        (2, {}, (2,)),
        (0, {}, (0,)),
        ([2, 5], {}, (2, 5)),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 0}, (0,)),
        (2, {"eos_token_id": None}, (2,)),
        (None, {"eos_token_id": 4}, (4,)),
        (None, {}, ()),
    ],
)
def test_end_of_sequence_ids(config_eos: Any, generation: dict[str, Any], ids: tuple[int, ...]) -> None:
    assert LlamaConfig.from_dict(CONFIG | {"eos_token_id": config_eos}, generation).eos_token_ids == ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": ...}, "lacks vocab_size"),
        ({"hidden_size": None, "num_hidden_layers": ...}, "lacks hidden_size, num_hidden_layers"),
        ({"sliding_window": 64}, "'sliding_window'"),
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised .gptq"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 .* num_key_value_heads 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0"),
        ({"num_attention_heads": 5}, "hidden_size 32 .* num_attention_heads 5"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"eos_token_id": "</s>"}, "eos_token_id '</s>'"),
        ({"eos_token_id": -1}, "eos_token_id -1"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'.*llama3"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "two types"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "'dynamic' needs factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' needs factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "needs high_freq_factor, low_freq_factor, original_max",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "unknown settings .'beta_fast'"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": ...},
            "max_position_embeddings",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "two values of rope_theta",
        ),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            },
            "contradict",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "0.25"),
    ],
    ids=str,
)
def test_refusals_name_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)


def test_unknown_keys_can_be_declared_harmless() -> None:
    assert LlamaConfig.from_dict(CONFIG | {"novel": 1}, ignore_keys=["novel"]) == LlamaConfig.from_dict(CONFIG)


def test_dynamic_phases_need_the_prompt_lengths() -> None:
    rope = RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=8)
    with pytest.raises(ValueError, match="prompt_lengths"):
        rope.phases(np.zeros((1, 1), np.int32), 8, None)
