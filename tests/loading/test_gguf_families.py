"""GGUF targets of every family and in every quantisation that the gguf package can undo."""

import math

import gguf
import numpy as np
import pytest
import torch
import transformers
from checkpoint_files import hugging_face_llama, hugging_face_logits, logits
from gguf_files import SCALES, gguf_keys, gguf_tensors, random_blocks, write_gguf

from eagle_jax.loading import CheckpointError, load_target
from eagle_jax.loading.gguf import GGUFSource
from eagle_jax.loading.target import plan_target

SMALL = {"num_hidden_layers": 2, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("family", "architecture", "settings", "keys"),
    [
        ("Mistral", "llama", {"sliding_window": 7, "head_dim": 16}, {"llama.attention.sliding_window": 7}),
        ("Qwen2", "qwen2", {}, {}),
        (
            "Qwen3",
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention"],
                "attention_bias": True,
                "head_dim": 16,
                "tie_word_embeddings": True,
            },
            {"qwen3.attention.sliding_window": 9, "qwen3.attention.sliding_window_pattern": [False, True]},
        ),
    ],
    ids=["mistral", "qwen2", "qwen3 with a window in one layer"],
)
def test_logits_equal_hugging_face(tmp_path, family, architecture, settings, keys):
    model = hugging_face_llama(family=family, **SMALL, **settings)
    changes = {f"{architecture}.rope.freq_base": model.config.rope_parameters["rope_theta"]} | keys
    path = write_gguf(
        tmp_path / "m.gguf",
        gguf_tensors(model, architecture),
        gguf_keys(model.config, architecture, **changes),
        architecture=architecture,
    )
    target = load_target(path)
    assert target.config.model_type == architecture  # a Mistral calls itself a Llama there
    ids = np.random.default_rng(0).integers(0, 97, 120).tolist()
    expected = hugging_face_logits(model, ids)
    assert abs(logits(target, ids) - expected).max() < 2e-5 * abs(expected).max()


@pytest.mark.parametrize("kind", SCALES)
def test_values_and_slices_of_every_quantisation(tmp_path, kind):
    packed = random_blocks(kind, (5, 512), 0.1, np.random.default_rng(0))
    path = write_gguf(tmp_path / "x.gguf", {"x": (kind, packed)}, {})
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    assert 0.05 < np.abs(expected).mean() < 0.2
    source = GGUFSource(path)
    assert (source.storage("x"), source.shape("x"), source.dtype("x")) == (kind, (5, 512), np.float32)
    for slices in ((), (slice(1, 4),), (slice(2, 3), slice(7, 300))):
        np.testing.assert_array_equal(source.read("x", slices), expected[slices])


@pytest.mark.parametrize("kind", ["IQ1_M", "MXFP4", "NVFP4"])
def test_values_of_quantisations_whose_scales_are_no_half_floats(tmp_path, kind):
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    packed = np.random.default_rng(0).integers(0, 256, (3, 4 * size), dtype=np.uint8)
    path = write_gguf(tmp_path / "x.gguf", {"x": (kind, packed)}, {})
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(GGUFSource(path).read("x"), expected)  # some are no numbers


def test_a_file_of_many_quantisations_is_what_transformers_makes_of_it(tmp_path):
    """As in real files, tensors of one file differ in kind; transformers undoes them, and the order of q and k, its own way."""
    model = hugging_face_llama(
        num_hidden_layers=2, hidden_size=256, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4
    )
    kinds, rng, tensors = list(SCALES), np.random.default_rng(1), {}
    for i, (name, value) in enumerate(gguf_tensors(model).items()):
        kind = kinds[i % len(kinds)]
        tensors[name] = value if value.ndim == 1 else (kind, random_blocks(kind, value.shape, 0.05, rng))
    write_gguf(tmp_path / "m.gguf", tensors, gguf_keys(model.config))
    target = load_target(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).eval()
    assert len({GGUFSource(tmp_path / "m.gguf").storage(name) for name in tensors}) > 10
    ids = np.random.default_rng(0).integers(0, 97, 60).tolist()
    expected = hugging_face_logits(reference, ids)
    assert expected.std() > 0.1
    assert abs(logits(target, ids) - expected).max() < 1e-4 * abs(expected).max()


def test_a_quantisation_that_nobody_can_undo_is_named(tmp_path):
    packed = np.zeros((2, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_K][1]), np.uint8)
    path = write_gguf(tmp_path / "x.gguf", {"x": ("Q8_K", packed)}, {})
    with pytest.raises(CheckpointError, match="uses tensor type Q8_K, which the gguf package cannot dequantise"):
        GGUFSource(path)


def test_yarn_settings(tmp_path):
    model = hugging_face_llama(family="Qwen2", num_hidden_layers=1)
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "finetuned": True}
    path = tmp_path / "m.gguf"

    def rope(**more):
        keys = {f"qwen2.rope.scaling.{key}": value for key, value in (yarn | more).items()}
        write_gguf(path, gguf_tensors(model, "qwen2"), gguf_keys(model.config, "qwen2", **keys), architecture="qwen2")
        return plan_target(path).config.rope

    plain = rope()
    assert (plain.rope_type, plain.factor, plain.original_max_position_embeddings) == ("yarn", 4.0, 128)
    assert (plain.beta_fast, plain.beta_slow) == (32, 1)
    assert plain.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    tuned = rope(yarn_beta_fast=16.0, yarn_beta_slow=2.0, attn_factor=0.5)
    assert (tuned.beta_fast, tuned.beta_slow) == (16, 2)
    assert tuned.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    with pytest.raises(CheckpointError, match=r"does not know: \['qwen2.rope.scaling.yarn_ext_factor'\]"):
        rope(yarn_ext_factor=0.0)


@pytest.mark.parametrize(
    ("changes", "drop", "message"),
    [
        (
            {"qwen3.attention.sliding_window": 9, "qwen3.attention.sliding_window_pattern": 6},
            None,
            "_pattern 6; .* 1 layers",
        ),
        ({"qwen3.attention.sliding_window_pattern": [True, True]}, None, r"pattern \[True, True\]; .* 1 layers"),
        ({"qwen3.expert_count": 8}, None, r"does not know: \['qwen3.expert_count'\]"),
        ({"qwen3.block_count": None}, None, "lacks qwen3.block_count"),
        ({}, "blk.0.attn_q_norm.weight", r"missing: blk.0.attn_q_norm.weight of shape \(8,\)"),
        ({"qwen3.attention.key_length": 16}, None, r"blk.0.attn_q.weight has shape \(32, 32\); .* makes it \(64, 32\)"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named_as_in_the_file(tmp_path, changes, drop, message):
    model = hugging_face_llama(family="Qwen3", num_hidden_layers=1, head_dim=8)
    tensors = gguf_tensors(model, "qwen3")
    tensors.pop(drop, None)
    keys = gguf_keys(model.config, "qwen3", **changes)
    if "qwen3.attention.key_length" in changes:
        keys["qwen3.attention.value_length"] = 16
    path = write_gguf(tmp_path / "m.gguf", tensors, keys, architecture="qwen3")
    with pytest.raises(CheckpointError, match=message):
        load_target(path)
