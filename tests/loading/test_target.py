"""Targets in the Hugging Face layout: equal to transformers, strict about every tensor, and light on memory."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from checkpoint_files import (
    assert_same_parameters,
    edit_config,
    edit_tensors,
    hugging_face_llama,
    hugging_face_logits,
    logits,
    parameters,
)

from eagle_jax.loading import CheckpointError, load_target

# Loads every folder given on the command line in its dtype and saves the raw bytes of every parameter, without torch.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
import numpy as np
from flax import nnx
from eagle_jax.loading import load_target
for folder, dtype in zip(sys.argv[1::2], sys.argv[2::2]):
    state = nnx.to_flat_state(nnx.state(load_target(folder, dtype=dtype).model))
    np.savez(folder + "/loaded.npz", **{".".join(map(str, p)): np.asarray(v[...]).view(np.uint8) for p, v in state})
assert not any(name.split(".")[0] in ("torch", "transformers") for name, module in sys.modules.items() if module)
"""


def expected_bytes(tensors, layers, dtype):
    """What each parameter must be, as bytes, from the tensors of transformers."""

    def stack(*names):
        return torch.cat([tensors[name] for name in names]).to(dtype).contiguous().view(torch.uint8).numpy()

    out = {"embed.weight": stack("model.embed_tokens.weight"), "norm.weight": stack("model.norm.weight")}
    out["lm_head.weight"] = stack("lm_head.weight")
    for i in range(layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        qkv = [f"{theirs}.self_attn.{p}_proj.weight" for p in "qkv"]
        out[f"{ours}.attention.qkv.weight"] = stack(*qkv)
        out[f"{ours}.attention.out.weight"] = stack(f"{theirs}.self_attn.o_proj.weight")
        out[f"{ours}.mlp.gate_up.weight"] = stack(f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        out[f"{ours}.mlp.down.weight"] = stack(f"{theirs}.mlp.down_proj.weight")
        out[f"{ours}.input_norm.weight"] = stack(f"{theirs}.input_layernorm.weight")
        out[f"{ours}.post_norm.weight"] = stack(f"{theirs}.post_attention_layernorm.weight")
    return out


def test_bit_equal_to_torch_where_torch_cannot_be_imported(tmp_path):
    model = hugging_face_llama(num_hidden_layers=2)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    cases = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "sharded": torch.bfloat16}
    for name, dtype in cases.items():
        shards = {"max_shard_size": "16KB"} if name == "sharded" else {}
        model.to(dtype).save_pretrained(tmp_path / name, **shards)
        model.float().load_state_dict(tensors)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) >= 3
    model.to(torch.float32).save_pretrained(tmp_path / "mixed")
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    mixed = {name: value.to(kinds[i % 4]) for i, (name, value) in enumerate(sorted(tensors.items()))}
    edit_tensors(tmp_path / "mixed", lambda _: mixed)
    folders = [(tmp_path / name, str(dtype).removeprefix("torch.")) for name, dtype in cases.items()]
    folders.append((tmp_path / "mixed", "float32"))
    arguments = [str(part) for pair in folders for part in pair]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for folder, dtype in folders:
        source = mixed if folder.name == "mixed" else tensors
        wanted = expected_bytes({n: t.to(getattr(torch, dtype)) for n, t in source.items()}, 2, getattr(torch, dtype))
        with np.load(folder / "loaded.npz") as loaded:
            assert set(loaded) == set(wanted)
            for path, value in wanted.items():
                np.testing.assert_array_equal(loaded[path], value, err_msg=f"{folder.name}: {path}")


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_key_value_heads": 1, "head_dim": 12},
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True, "rope_theta": 500000.0},
    ],
    ids=lambda overrides: "+".join(overrides) or "plain",
)
def test_logits_equal_hugging_face(tmp_path, overrides):
    model = hugging_face_llama(num_hidden_layers=3, **overrides)
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path)
    ids = np.random.default_rng(0).integers(0, 97, 150).tolist()
    expected = hugging_face_logits(model, ids)
    assert abs(logits(target, ids) - expected).max() < 2e-5 * abs(expected).max()
    assert target.path == tmp_path
    assert target.tokenizer is None
    assert target.name == str(tmp_path)


def test_a_config_without_key_value_heads_has_one_per_head(tmp_path):
    hugging_face_llama(num_key_value_heads=4, num_hidden_layers=1).save_pretrained(tmp_path)
    edit_config(tmp_path, drop=["num_key_value_heads", "head_dim"])
    assert load_target(tmp_path).config.num_key_value_heads == 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    hugging_face_llama(num_hidden_layers=2).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the same small checkpoint that a test may break."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_dtypes(saved):
    assert load_target(saved).model.dtype == np.float32  # "auto" on CPU
    assert load_target(saved, dtype="bfloat16").model.dtype.name == "bfloat16"
    assert load_target(saved, dtype=np.float16).model.dtype == np.float16
    with pytest.raises(ValueError, match="dtype must be 'auto' or one of float32, bfloat16, float16, not 'int8'"):
        load_target(saved, dtype="int8")
    with pytest.raises(ValueError, match="not None"):
        load_target(saved, dtype=None)


def test_values_beyond_float16_are_refused(copy):
    def edit(tensors):
        tensors["model.norm.weight"][3] = 1e5

    edit_tensors(copy, edit)
    with pytest.raises(CheckpointError, match=r"model.norm.weight has values up to 100000, beyond float16"):
        load_target(copy, dtype="float16")


def test_progress_counts_every_byte_once(saved, capsys):
    seen = []
    load_target(saved, progress=lambda name, done, total: seen.append((name, done, total)))
    names, done, totals = zip(*seen, strict=True)
    assert len(set(names)) == len(names) == 2 * 9 + 3
    assert done[-1] == totals[-1] == sum(t.numel() * 4 for t in hugging_face_llama(num_hidden_layers=2).parameters())
    load_target(saved, progress=True)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="progress must be"):
        load_target(saved, progress="yes")


Q = "model.layers.1.self_attn.q_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def drop(tensors):
    del tensors[Q]


def add(tensors):
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)


def extra_layer(tensors):
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(64, 32)


def rename(tensors):
    tensors["model.layers.1.attn.q_proj.weight"] = tensors.pop(Q)


def transpose(tensors):
    tensors[UP] = tensors[UP].T


def reshape(tensors):
    tensors["model.embed_tokens.weight"] = torch.zeros(96, 32)


def integers(tensors):
    tensors[UP] = tensors[UP].to(torch.int8)


def float8(tensors):
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("edit", "messages"),
    [
        (drop, [rf"missing: {Q} of shape \(32, 32\)"]),
        (add, [r"unexpected: model.layers.0.self_attn.q_norm.weight of shape \(8,\)"]),
        (extra_layer, [r"unexpected: model.layers.2.mlp.up_proj.weight of shape \(64, 32\)"]),
        (
            rename,
            [
                rf"missing: {Q} of shape \(32, 32\)",
                r"unexpected: model.layers.1.attn.q_proj.weight of shape \(32, 32\)",
            ],
        ),
        (transpose, [rf"{UP} has shape \(32, 64\), its transpose; the configuration makes it \(64, 32\)"]),
        (reshape, [r"model.embed_tokens.weight has shape \(96, 32\); the configuration makes it \(97, 32\)"]),
        (integers, [rf"{UP} is stored as int8; weights must be"]),
        (float8, [rf"{UP} is stored as float8_e4m3fn; weights must be"]),
    ],
)
def test_tensors_that_do_not_fit_are_named_with_both_shapes(copy, edit, messages):
    edit_tensors(copy, edit)
    with pytest.raises(CheckpointError) as caught:
        load_target(copy)
    for message in messages:
        caught.match(message)


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            {"vocab_size": 96},
            [r"model.embed_tokens.weight has shape \(97, 32\); .* makes it \(96, 32\)", "lm_head.weight"],
        ),
        ({"intermediate_size": 48}, [rf"{UP} has shape \(64, 32\); the configuration makes it \(48, 32\)"]),
        ({"num_key_value_heads": 1}, [r"0.self_attn.k_proj.weight has shape \(16, 32\); .* makes it \(8, 32\)"]),
        ({"head_dim": 16}, [rf"{Q} has shape \(32, 32\); the configuration makes it \(64, 32\)"]),
        ({"num_hidden_layers": 3}, [r"missing: model.layers.2.mlp.down_proj.weight of shape \(32, 64\)"]),
        ({"num_hidden_layers": 1}, [rf"unexpected: {Q} of shape \(32, 32\), which nothing reads"]),
        ({"attention_bias": True}, [r"missing: model.layers.0.self_attn.o_proj.bias of shape \(32,\)"]),
        ({"mlp_bias": True}, [r"missing: model.layers.0.mlp.up_proj.bias of shape \(64,\)"]),
        ({"model_type": "qwen2"}, [r"missing: model.layers.0.self_attn.q_proj.bias of shape \(32,\)"]),
        ({"model_type": "qwen3"}, [r"missing: model.layers.1.self_attn.k_norm.weight of shape \(8,\)"]),
        ({"model_type": "gpt2"}, ["model_type 'gpt2' is not supported; supported are llama, mistral, qwen2, qwen3"]),
    ],
    ids=str,
)
def test_a_wrong_config_is_named_by_what_it_contradicts(copy, changes, messages):
    edit_config(copy, drop=["architectures"] + ["mlp_bias"] * ("model_type" in changes), **changes)
    with pytest.raises(CheckpointError) as caught:
        load_target(copy)
    for message in messages:
        caught.match(message)


def bias_as_row(tensors):
    tensors["model.layers.0.self_attn.v_proj.bias"] = tensors["model.layers.0.self_attn.v_proj.bias"][None]


def norm_of_all_heads(tensors):
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(32)


def norm_twice(tensors):
    tensors["model.layers.0.self_attn.qk_norm.weight"] = tensors.pop("model.layers.0.self_attn.q_norm.weight")


@pytest.mark.parametrize(
    ("family", "edit", "messages"),
    [
        ("Qwen2", bias_as_row, [r"0.self_attn.v_proj.bias has shape \(1, 16\); the configuration makes it \(16,\)"]),
        ("Qwen3", norm_of_all_heads, [r"q_norm.weight has shape \(32,\); the configuration makes it \(8,\)"]),
        (
            "Qwen3",
            norm_twice,
            [r"missing: .*0.self_attn.q_norm.weight of shape \(8,\)", r"unexpected: .*0.self_attn.qk_norm.weight"],
        ),
    ],
)
def test_what_only_some_families_have_is_checked_too(tmp_path, family, edit, messages):
    hugging_face_llama(family=family, num_hidden_layers=1, head_dim=8).save_pretrained(tmp_path)
    load_target(tmp_path)
    edit_tensors(tmp_path, edit)
    with pytest.raises(CheckpointError) as caught:
        load_target(tmp_path)
    for message in messages:
        caught.match(message)


def test_old_rotary_frequencies_are_known_not_to_matter(copy, saved):
    def edit(tensors):
        for i in range(2):
            tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit_tensors(copy, edit)
    assert_same_parameters(load_target(copy).model, load_target(saved).model)


def test_a_truncated_file_is_refused(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated"):
        load_target(copy)


def test_a_missing_config_is_named(copy):
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        load_target(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        load_target(copy)
    (copy / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, not a list"):
        load_target(copy)


def test_unknown_config_keys_raise_unless_ignored(copy):
    edit_config(copy, sliding_window_pattern=4)
    with pytest.raises(CheckpointError, match=r"ignore_config_keys=\['sliding_window_pattern'\]"):
        load_target(copy)
    load_target(copy, ignore_config_keys=("sliding_window_pattern",))


def test_quantised_checkpoints_are_refused(copy):
    edit_config(copy, quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match=r"quantised \(gptq\)"):
        load_target(copy)


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_and_untied_heads(copy, flag, head):
    def edit(tensors):
        if head == "absent":
            del tensors["lm_head.weight"]
        elif head == "equal":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(copy, edit)
    edit_config(copy, drop=["tie_word_embeddings"], **({} if flag is None else {"tie_word_embeddings": flag}))
    if flag and head == "different":
        with pytest.raises(
            CheckpointError, match=r"says tie_word_embeddings, but the checkpoint's lm_head.weight \(97, 32\)"
        ):
            load_target(copy)
    elif not flag and head == "absent":
        with pytest.raises(CheckpointError, match=r"missing: lm_head.weight of shape \(97, 32\)"):
            load_target(copy)
    else:
        paths = parameters(load_target(copy).model)
        assert ("lm_head.weight" in paths) == (not flag)


@pytest.mark.parametrize("layout", ["v4", "v5", "both"])
def test_rope_settings_of_both_config_layouts(copy, layout):
    old = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}}
    edit_config(copy, drop=["rope_parameters"])
    edit_config(copy, **{"v4": old, "v5": new, "both": old | new}[layout])
    rope = load_target(copy).config.rope
    assert (rope.rope_type, rope.theta, rope.factor) == ("linear", 500000.0, 4.0)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        (0, None, (0,)),
        ([5, 0, 7], None, (5, 0, 7)),
        (2, {"eos_token_id": [3, 4]}, (3, 4)),
        (2, {"temperature": 0.5}, (2,)),
        (None, {"eos_token_id": 0}, (0,)),
        (None, None, ()),
    ],
)
def test_end_of_sequence_ids(copy, config, generation, expected):
    edit_config(copy, eos_token_id=config)
    (copy / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (copy / "generation_config.json").write_text(json.dumps(generation))
    target = load_target(copy)
    assert target.config.eos_token_ids == expected
    assert target.generation_config == (generation or {})


def test_end_of_sequence_only_in_the_tokenizer(copy, monkeypatch):
    class Tokenizer:
        eos_token_id = 0

    monkeypatch.setattr("eagle_jax.text.tokenizer.Tokenizer.from_folder", lambda path: Tokenizer())
    edit_config(copy, eos_token_id=None)
    (copy / "generation_config.json").unlink(missing_ok=True)
    target = load_target(copy)
    assert target.config.eos_token_ids == target.model.config.eos_token_ids == (0,)
