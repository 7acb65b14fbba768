"""Conversion between the formats of heads: nothing but names changes."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import assert_same_parameters
from published_heads import ROWS, fused, numbered, target_of, write, written
from safetensors.torch import load_file

from eagle_jax import load_draft
from eagle_jax.loading import CheckpointError, convert_head

BY_NAME = {row.repository: row for row in ROWS}
IDS = "eagle_aux_hidden_state_layer_ids"


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and first.contiguous().view(torch.uint8).equal(second.contiguous().view(torch.uint8))
    )


@pytest.mark.parametrize(
    "name",
    [
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
        "nebius/EAGLE3-gpt-oss-20b",
        "RedHatAI/gpt-oss-20b-speculator.eagle3",
        "speculators, EAGLE-3.1 of Qwen3 layers",
        "yuhuili/EAGLE-Vicuna-7B-v1.3",
        "yuhuili/EAGLE-Qwen2-7B-Instruct",
        "speculators, converted HASS head",
    ],
)
def test_a_round_trip_keeps_every_bit(tmp_path, name):
    row = BY_NAME[name]
    target, head = written(row, tmp_path / "original")
    original = load_draft(head.folder, target)
    convention = {"layer_id_convention": "input"} if row.method == "eagle3" else {}
    convert_head(head.folder, tmp_path / "eagle", to="eagle", **convention)
    there = convert_head(
        tmp_path / "eagle", tmp_path / "speculators", to="speculators", verifier="owner/target", **convention
    )
    convert_head(tmp_path / "speculators", tmp_path / "back", to="eagle")
    assert there.method == row.method
    for folder in ("eagle", "speculators", "back"):
        draft = load_draft(tmp_path / folder, target, **convention)
        assert draft.config == original.config, folder
        assert_same_parameters(draft.head, original.head)
    stored, back = (
        load_file(tmp_path / "eagle" / "model.safetensors"),
        load_file(tmp_path / "back" / "model.safetensors"),
    )
    assert stored.keys() == back.keys() == head.tensors.keys()
    for tensor_name, tensor in head.tensors.items():
        assert same_bits(stored[tensor_name], tensor), tensor_name
        assert same_bits(back[tensor_name], tensor), tensor_name
    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("eagle", "back")]
    assert {k: v for k, v in configs[0].items() if k != "architectures"} == {
        k: v for k, v in configs[1].items() if k != "architectures"
    }


def test_what_speculators_reads_is_written(tmp_path):
    row = BY_NAME["SpecForge, llama3-8B-eagle3"]
    head = write(row, tmp_path / "head")
    done = convert_head(
        head.folder, tmp_path / "out", to="speculators", verifier="owner/target", num_speculative_tokens=4
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["speculators_model_type"], config["draft_vocab_size"]) == ("eagle3", 40)
    assert [config[flag] for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")] == [
        False
    ] * 4
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["transformer_layer_config"]["rope_theta"] == 10000.0
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(numbered(head.tensors))
    assert (done.tensors, done.format) == (len(head.tensors), "speculators")


def test_fused_projections_are_written_apart(tmp_path):
    row = BY_NAME["yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"]
    head = write(row, tmp_path / "head")
    torch.save(fused(dict(head.tensors)), head.folder / "pytorch_model.bin")
    convert_head(head.folder, tmp_path / "out", to="eagle")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == head.tensors.keys()
    assert all(same_bits(stored[name], tensor) for name, tensor in head.tensors.items())


def test_layer_numbers_are_written_as_inputs(tmp_path):
    row = BY_NAME["nvidia/gpt-oss-120b-Eagle3"]
    head = write(row, tmp_path / "head")
    with pytest.raises(CheckpointError, match="whether these numbers are inputs or outputs of layers cannot be told"):
        convert_head(head.folder, tmp_path / "out", to="eagle")
    convert_head(head.folder, tmp_path / "out", to="speculators", verifier="t", layer_id_convention="output")
    assert json.loads((tmp_path / "out" / "config.json").read_text())[IDS] == [2, 18, 34]
    draft = load_draft(tmp_path / "out", target_of(row, head.target_hidden, head.vocab))
    assert draft.config.capture_layers == (2, 18, 34)
    assert not any("layers" in note for note in draft.notes)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "nvidia/gpt-oss-120b-Eagle3-v2",
            {"verifier": "t"},
            CheckpointError,
            "cannot express use_aux_hidden_state false",
        ),
        ("mistral, as engines read it", {"verifier": "t"}, CheckpointError, "cannot express a final norm"),
        ("yuhuili/EAGLE-Vicuna-7B-v1.3", {}, CheckpointError, "names the target: give verifier"),
        ("yuhuili/EAGLE-Vicuna-7B-v1.3", {"to": "gguf"}, ValueError, "to must be one of 'eagle', 'speculators'"),
        ("yuhuili/EAGLE-Vicuna-7B-v1.3", {"output": "."}, ValueError, "is not an empty folder"),
    ],
)
def test_what_cannot_be_written_raises(tmp_path: Path, name, options, error, message):
    row = BY_NAME[name]
    _, head = written(row, tmp_path / "head")
    options = {"to": "speculators", "output": "out"} | options
    output = tmp_path / options.pop("output")
    with pytest.raises(error, match=message):
        convert_head(head.folder, output, **options)
    assert not (tmp_path / "out").exists()
