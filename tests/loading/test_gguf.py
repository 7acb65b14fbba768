"""GGUF: values as the gguf package gives them, a Llama's names, row order and configuration, and broken files."""

import gguf
import numpy as np
import pytest
import torch
from checkpoint_files import hugging_face_llama, hugging_face_logits, logits
from gguf_files import KINDS, gguf_keys, gguf_tensors, write_gguf

from eagle_jax.loading import CheckpointError, load_target
from eagle_jax.loading.gguf import GGUFSource
from eagle_jax.loading.gguf_target import ROPE_FACTORS, gguf_name, hugging_face_name
from eagle_jax.loading.target import plan_target


@pytest.fixture(scope="module")
def model():
    return hugging_face_llama(num_hidden_layers=2, hidden_size=64, vocab_size=96, rope_theta=100000.0)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_slices_are_those_of_the_gguf_package(tmp_path, kind):
    value = np.random.default_rng(0).standard_normal((37, 96)).astype(np.float32)
    path = write_gguf(tmp_path / "x.gguf", {"a": np.ones(3, np.float32), "x": value}, {}, kind)
    expected = next(t for t in gguf.GGUFReader(path).tensors if t.name == "x")
    expected = gguf.quants.dequantize(expected.data, expected.tensor_type)
    source = GGUFSource(path)
    assert source.shape("x") == (37, 96)
    assert source.storage("x") in (kind, {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind))
    for slices in ((), (slice(3, 20),), (slice(5, 6), slice(7, 50)), (slice(None), slice(64, 96))):
        read = source.read("x", slices)
        assert read.dtype == source.dtype("x")
        np.testing.assert_array_equal(read.astype(np.float32), expected[slices])


def test_metadata_are_those_of_the_gguf_package(tmp_path):
    keys = {"a.text": "naïve", "a.float": 0.5, "a.int": 7, "a.list": [1, 2, 3], "a.words": ["x", "yz", ""]}
    path = write_gguf(tmp_path / "x.gguf", {"a": np.ones(3, np.float32)}, keys)
    metadata = GGUFSource(path).metadata
    theirs = {
        name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if not name.startswith("GGUF.")
    }
    assert metadata == theirs
    assert keys.items() <= metadata.items()


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_logits_equal_hugging_face_with_the_same_values(tmp_path, model, kind):
    target = load_target(write_gguf(tmp_path / "m.gguf", gguf_tensors(model), gguf_keys(model.config), kind))
    reference = hugging_face_llama(num_hidden_layers=2, hidden_size=64, vocab_size=96, rope_theta=100000.0)
    rounded = {}
    for name, value in model.state_dict().items():
        stored = value.numpy()
        if value.ndim > 1:
            stored = gguf.quants.dequantize(gguf.quants.quantize(stored, KINDS[kind]), KINDS[kind])
        rounded[name] = torch.tensor(stored)
    reference.load_state_dict(rounded)
    ids = np.random.default_rng(0).integers(0, 96, 120).tolist()
    expected = hugging_face_logits(reference, ids)
    assert abs(logits(target, ids) - expected).max() < 2e-5 * abs(expected).max()


def test_biases_head_width_and_tied_embeddings(tmp_path):
    model = hugging_face_llama(
        num_hidden_layers=1, hidden_size=48, head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    )
    keys = gguf_keys(model.config) | {"llama.attention.key_length": 16, "llama.attention.value_length": 16}
    target = load_target(write_gguf(tmp_path / "m.gguf", gguf_tensors(model), keys))
    assert target.config.tie_word_embeddings
    ids = list(range(90))
    expected = hugging_face_logits(model, ids)
    assert abs(logits(target, ids) - expected).max() < 2e-5 * abs(expected).max()


@pytest.mark.parametrize("original", [64, 8192])
def test_llama3_factors_give_back_their_settings(tmp_path, original):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    shape = {"num_hidden_layers": 1, "hidden_size": 64, "head_dim": 64, "num_attention_heads": 2}
    model = hugging_face_llama(max_position_embeddings=131072, rope_parameters=scaling, **shape)
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 7.9
    tensors = gguf_tensors(model) | {ROPE_FACTORS: factors}
    keys = gguf_keys(model.config) | {"llama.attention.key_length": 64, "llama.attention.value_length": 64}
    target = load_target(write_gguf(tmp_path / "m.gguf", tensors, keys))
    assert (target.config.rope.rope_type, target.config.rope.factor) == ("llama3", 8.0)
    np.testing.assert_allclose(
        target.config.rope.inverse_frequencies(64), model.model.rotary_emb.inv_freq.numpy(), rtol=2e-6
    )


def test_other_factors_are_refused(tmp_path, model):
    tensors = gguf_tensors(model) | {ROPE_FACTORS: np.linspace(1, 3, 8).astype(np.float32)}
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight of shape \(8,\) that are not the llama3 factors"):
        plan_target(write_gguf(tmp_path / "m.gguf", tensors, gguf_keys(model.config)))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("default", 1.0)),
        ({"llama.rope.scaling.type": "none"}, ("default", 1.0)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, ("linear", 4.0)),
        ({"llama.rope.scale_linear": 2.0}, ("linear", 2.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
            },
            ("yarn", 4.0),
        ),
    ],
)
def test_rope_scaling_keys(tmp_path, model, keys, expected):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model), gguf_keys(model.config) | keys)
    rope = plan_target(path).config.rope
    assert (rope.rope_type, rope.factor, rope.theta) == (*expected, 100000.0)
    assert rope.original_max_position_embeddings == (128 if expected[0] == "yarn" else 0)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ({}, ()),
        ({"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 2, "eot_token_id": 5}, (2, 5)),
        ({"eos_token_id": 2, "eot_token_id": 2, "eom_token_id": 4}, (2, 4)),
    ],
)
def test_end_of_sequence_ids(tmp_path, model, tokens, expected):
    keys = gguf_keys(model.config) | {f"tokenizer.ggml.{name}": value for name, value in tokens.items()}
    assert plan_target(write_gguf(tmp_path / "m.gguf", gguf_tensors(model), keys)).config.eos_token_ids == expected


def test_names_and_configuration(tmp_path, model):
    plan = plan_target(write_gguf(tmp_path / "m.gguf", gguf_tensors(model), gguf_keys(model.config)))
    assert sorted(plan.source.names()) == sorted(model.state_dict())
    assert not plan.match.problems
    assert plan.config.rms_norm_eps == 1e-5
    assert plan.config.vocab_size == 96
    for name in model.state_dict():
        assert hugging_face_name(gguf_name(name)) == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, r"does not know: \['llama.expert_count'\]"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "needs factor"),
        ({"llama.vocab_size": 95}, "llama.vocab_size 95, where its other keys and tensors make it 96"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count 8, where .* make it 16"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "lacks llama.attention.layer_norm_rms_epsilon"),
        ({"llama.attention.head_count_kv": [2, 1]}, "a different llama.attention.head_count_kv in each layer"),
    ],
)
def test_keys_that_are_not_understood_are_named(tmp_path, model, changes, message):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model), gguf_keys(model.config, **changes))
    with pytest.raises(CheckpointError, match=message):
        plan_target(path)


def test_unknown_keys_can_be_ignored(tmp_path, model):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model), gguf_keys(model.config) | {"llama.note": 1})
    assert plan_target(path, ignore_config_keys=["llama.note"]).config.vocab_size == 96


def test_one_part_of_a_split_file_is_refused(tmp_path, model):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model), gguf_keys(model.config) | {"split.count": 3})
    with pytest.raises(CheckpointError, match="one of 3 parts; merge them"):
        plan_target(path)


def test_other_architectures_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"a": np.ones(3, np.float32)}, {}, architecture="gemma")
    with pytest.raises(
        CheckpointError, match=r"general.architecture 'gemma' is not supported; supported are llama, qwen2, qwen3"
    ):
        plan_target(path)


def test_missing_tensors_are_named_as_in_the_file(tmp_path, model):
    tensors = gguf_tensors(model)
    del tensors["blk.1.attn_q.weight"]
    tensors["blk.0.attn_q_norm.weight"] = np.ones(16, np.float32)
    with pytest.raises(CheckpointError, match=r"blk.1.attn_q.weight of shape \(64, 64\)") as caught:
        load_target(write_gguf(tmp_path / "m.gguf", tensors, gguf_keys(model.config)))
    caught.match(r"unexpected: blk.0.attn_q_norm.weight of shape \(16,\)")


def test_broken_files_are_refused(tmp_path, model):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model), gguf_keys(model.config), "Q8_0")
    whole = path.read_bytes()
    for data, message in (
        (whole[:-2000], "is truncated: tensor"),
        (whole[:200], "truncated or broken inside its GGUF header"),
        (whole[:10], "too short"),
        (b"XXXX" + whole[4:], "not a GGUF file"),
        (whole[:4] + b"\x09\0\0\0" + whole[8:], "GGUF version 9"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            GGUFSource(path)


def test_without_the_gguf_package_the_message_says_what_to_install(tmp_path, model, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model), gguf_keys(model.config), "Q8_0")
    plain = write_gguf(tmp_path / "plain.gguf", gguf_tensors(model), gguf_keys(model.config), "F16")
    for name in ("gguf", "gguf.constants", "gguf.quants"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(CheckpointError, match=r"pip install 'eagle-jax\[gguf\]'"):
        GGUFSource(path)
    GGUFSource(plain).read("blk.0.attn_q.weight")  # only quantised tensors need the package
