"""Reports on checkpoints: what they are, what would be used, and why they would not load."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import edit_tensors, head_config, head_tensors, hugging_face_llama, save_head

from eagle_jax.loading import inspect_checkpoint, load_draft, load_target, parameter_count

GOLDEN = Path(__file__).parents[1] / "golden"
SHIPPED = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-instruct-eagle3"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    hugging_face_llama(num_hidden_layers=7).save_pretrained(folder)
    return folder


def test_a_target(target):
    report = inspect_checkpoint(target)
    assert (report.kind, report.container, report.loads) == ("target", "safetensors", True)
    assert report.storage == {"float32": 7 * 9 + 3}
    assert report.geometry["num_hidden_layers"] == 7
    assert report.parameters == sum(p.numel() for p in hugging_face_llama().parameters())
    assert len(report.used) == 66
    assert ("lm_head.weight", (97, 32)) in report.used
    data = json.loads(json.dumps(report.to_dict()))
    assert data["loads"] is True
    assert data["rope"] == {"rope_type": "default", "theta": 10000.0}
    assert "would load" in report.to_text()


def test_a_head_alone_and_with_its_target(tmp_path, target):
    folder = save_head(tmp_path)
    alone = inspect_checkpoint(folder)
    assert (alone.kind, alone.loads, alone.capture_layers, alone.capture_layers_guessed) == ("eagle3", True, None, True)
    assert alone.vocabulary == "40 of 97 tokens"
    assert any("without its target" in note for note in alone.notes)
    fitted = inspect_checkpoint(folder, target)
    assert (fitted.loads, fitted.capture_layers, fitted.capture_layers_guessed) == (True, (2, 3, 4), True)
    assert ("d2t", (40,)) in fitted.used
    assert fitted.unused == (("t2d", (97,)),)
    draft = load_draft(folder, load_target(target))
    assert fitted.parameters == parameter_count(draft.config)
    assert "captures      [2, 3, 4] (guessed)" in fitted.to_text()


def test_named_capture_layers_are_not_guessed(tmp_path):
    folder = save_head(tmp_path, config=head_config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]))
    report = inspect_checkpoint(folder, layer_id_convention="input")
    assert (report.capture_layers, report.capture_layers_guessed) == ((1, 3, 4), False)


def test_the_shared_embedding_is_reported(tmp_path, target):
    embedding = hugging_face_llama().model.embed_tokens.weight.detach()
    folder = save_head(tmp_path, head_tensors() | {"embed_tokens.weight": embedding})
    shared = inspect_checkpoint(folder, target)
    assert any("which the head's equals" in note for note in shared.notes)
    assert ("embed_tokens.weight", (97, 32)) in shared.unused
    edit_tensors(folder, lambda t: t | {"embed_tokens.weight": t["embed_tokens.weight"] + 1})
    assert any("the head's own" in note for note in inspect_checkpoint(folder, target).notes)


def test_a_head_of_another_target_does_not_fit(tmp_path, target):
    tensors, config = head_tensors(target_hidden=48), head_config(target_hidden_size=48)
    folder = save_head(tmp_path, tensors | {"embed_tokens.weight": torch.zeros(97, 32)}, config)
    assert inspect_checkpoint(folder).loads
    report = inspect_checkpoint(folder, target)
    assert not report.loads
    assert "target of hidden size 48" in report.problems[0]


def test_missing_and_unexpected_tensors_are_listed(tmp_path):
    tensors = head_tensors()
    tensors["fc.bias"] = torch.zeros(32)
    del tensors["midlayer.mlp.up_proj.weight"]
    report = inspect_checkpoint(save_head(tmp_path, tensors))
    assert report.missing == (("midlayer.mlp.up_proj.weight", (64, 32)),)
    assert report.unexpected == (("fc.bias", (32,)),)
    assert not report.loads
    assert "would NOT load" in report.to_text()


def test_other_kinds(tmp_path):
    report = inspect_checkpoint(GOLDEN / "head_A_e1", GOLDEN / "target_A")
    assert (report.kind, report.loads, report.capture_layers, report.capture_layers_guessed) == (
        "eagle",
        True,
        (8,),
        False,
    )
    report = inspect_checkpoint(GOLDEN / "head_A_e1")
    assert (report.kind, report.loads, report.capture_layers) == ("eagle", True, None)
    report = inspect_checkpoint(save_head(tmp_path / "other", {"x": torch.zeros(2)}))
    assert (report.kind, report.loads) == ("unknown", False)


def test_a_target_whose_config_is_not_supported(tmp_path):
    hugging_face_llama(num_hidden_layers=1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    report = inspect_checkpoint(tmp_path)
    assert (report.kind, report.loads) == ("target", False)
    assert "model_type 'mamba' is not supported" in report.problems[0]


def test_the_shipped_head():
    report = inspect_checkpoint(SHIPPED)
    assert (report.kind, report.loads) == ("eagle3", True)
    assert report.parameters == 15_193_152
    assert report.vocabulary == "16384 of 49152 tokens"
    assert report.rope["theta"] == 10000.0
