"""`eagle-jax inspect`."""

import json
import shutil


def test_the_released_head_is_found_by_its_name(command):
    code, out, err = command("inspect", "smollm2-135m-instruct-eagle3", "--json")
    assert code == 0
    assert err == ""
    report = json.loads(out)
    assert report["attention"]["TPU"] == "mosaic_tpu"
    assert report["attention"]["Hopper GPU"] == "mosaic_gpu"
    assert report["attention"]["other GPU"] == report["attention"]["CPU"] == "xla_blocked"
    assert report["kind"] == "eagle3"
    assert report["loads"] is True
    assert report["geometry"]["draft_vocab_size"] == 16384
    assert report["parameters"] == 15_193_152
    assert len(report["used"]) == 19


def test_the_text_says_the_same_to_people(command):
    code, out, _ = command("inspect", "smollm2-135m-instruct-eagle3")
    assert code == 0
    assert out.startswith("EAGLE-3 draft head: ")
    assert "15,193,152" in out
    assert "would load" in out


def test_a_head_beside_its_target(command, head, bare_model):
    code, out, _ = command("inspect", head, "--target", bare_model, "--json")
    assert code == 0
    assert json.loads(out)["capture_layers"] == [2, 4, 5]


def test_a_target(command, bare_model):
    code, out, _ = command("inspect", bare_model, "--json")
    assert code == 0
    assert json.loads(out)["kind"] == "target"


def test_a_head_of_another_target_would_not_load(command, bare_model):
    code, out, _ = command("inspect", "smollm2-135m-instruct-eagle3", "--target", bare_model)
    assert code == 1
    assert "would NOT load" in out


def test_a_damaged_checkpoint_would_not_load(command, head, tmp_path):
    shutil.copytree(head, tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    code, out, _ = command("inspect", str(tmp_path / "head"), "--json")
    assert code == 1
    report = json.loads(out)
    assert report["loads"] is False
    assert report["problems"]
