"""EAGLE-1/2 heads: the golden ones, and what their tensors decide against what config.json says."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle_jax.loading import CheckpointError, Target, load_draft, load_target

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(GOLDEN / "target_A", dtype="float32")


def rewrite(folder: Path, tensors=lambda tensors: tensors, config=lambda config: config) -> Path:
    """A copy of head_A_e1 with its tensors or configuration changed."""
    shutil.copytree(GOLDEN / "head_A_e1", folder)
    save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(config(json.loads(path.read_text()))))
    return folder


def test_every_parameter_comes_from_its_tensor(target: Target) -> None:
    draft = load_draft(GOLDEN / "head_A_e1", target)
    stored = load_file(GOLDEN / "head_A_e1" / "model.safetensors")
    config, head = draft.config, draft.head
    assert (config.method, config.capture_layers, config.own_lm_head, config.fc_bias) == ("eagle", (8,), False, True)
    assert (config.num_key_value_heads, config.rope.theta, config.rms_norm_eps) == (4, 10000.0, 1e-6)
    assert head.layers[0].input_norm is None
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    for parameter, names in (
        (head.fc.weight, ["fc.weight"]),
        (head.fc.bias, ["fc.bias"]),
        (head.layers[0].attention.qkv.weight, [f"{attention}{p}_proj.weight" for p in "qkv"]),
        (head.layers[0].attention.out.weight, [f"{attention}o_proj.weight"]),
        (head.layers[0].mlp.gate_up.weight, [f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"]),
        (head.layers[0].mlp.down.weight, [f"{mlp}down_proj.weight"]),
        (head.layers[0].post_norm.weight, ["layers.0.post_attention_layernorm.weight"]),
    ):
        np.testing.assert_array_equal(parameter[...], np.concatenate([stored[name] for name in names]))


def test_the_bias_is_there_when_its_tensor_is(tmp_path: Path, target: Target) -> None:
    denied = load_draft(rewrite(tmp_path / "denied", config=lambda c: c | {"bias": False}), target)
    assert denied.head.fc.bias is not None
    assert any("bias False" in note for note in denied.notes)
    without = rewrite(tmp_path / "without", lambda t: {k: v for k, v in t.items() if k != "fc.bias"})
    assert load_draft(without, target).head.fc.bias is None


def test_norms_and_an_output_head_of_its_own_are_used_where_stored(tmp_path: Path, target: Target) -> None:
    extra = {
        "layers.0.input_layernorm.weight": np.full(64, 2, np.float32),
        "norm.weight": np.full(64, 3, np.float32),
        "lm_head.weight": np.full((512, 64), 4, np.float32),
    }
    head = load_draft(rewrite(tmp_path / "head", lambda t: t | extra), target).head
    assert float(head.layers[0].input_norm.weight[0]) == 2
    assert float(head.norm.weight[0]) == 3
    assert float(head.lm_head.weight[0, 0]) == 4


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda t: t | {"extra.weight": np.zeros(2, np.float32)}, "extra.weight"),
        (lambda t: {k: v for k, v in t.items() if k != "layers.0.mlp.up_proj.weight"}, "layers.0.mlp.up_proj.weight"),
        (lambda t: t | {"fc.bias": np.zeros(65, np.float32)}, r"fc.bias.*65"),
    ],
)
def test_tensors_that_do_not_match_raise_by_name(tmp_path: Path, target: Target, tensors, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_draft(rewrite(tmp_path / "head", tensors), target)


def test_a_head_of_another_target_raises_with_both_numbers(target: Target) -> None:
    with pytest.raises(CheckpointError, match="hidden size 96; this target's hidden_size is 64"):
        load_draft(GOLDEN / "head_B_e1", target)
