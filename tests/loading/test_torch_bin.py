"""Torch files: equal to safetensors, and never executed."""

import json
import pickle
import subprocess
import sys

import pytest
import torch
from checkpoint_files import assert_same_parameters, head_tensors, random_target, save_head

from eagle_jax.loading import CheckpointError, load_draft
from eagle_jax.loading.containers import open_source


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_bin_head_equals_the_safetensors_head(tmp_path, target, dtype, zipped):
    tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in head_tensors().items()}
    save_head(tmp_path / "safe", tensors)
    save_head(tmp_path / "bin", tensors, container="bin")
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    native = str(dtype).removeprefix("torch.")
    first = load_draft(tmp_path / "safe", target, dtype=native)
    second = load_draft(tmp_path / "bin", target, dtype=native)
    assert_same_parameters(first.head, second.head)


def test_sharded_bin_files_are_read(tmp_path, target):
    tensors = head_tensors()
    save_head(tmp_path / "safe", tensors)
    folder = save_head(tmp_path / "bin", tensors, container="bin")
    (folder / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    parts = {"pytorch_model-00001-of-00002.bin": names[:7], "pytorch_model-00002-of-00002.bin": names[7:]}
    for file, part in parts.items():
        torch.save({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same_parameters(load_draft(tmp_path / "safe", target).head, load_draft(folder, target).head)


def test_safetensors_win_when_both_are_there(tmp_path, target):
    save_head(tmp_path / "both", head_tensors(seed=1))
    save_head(tmp_path / "both", head_tensors(seed=2), container="bin")
    save_head(tmp_path / "safe", head_tensors(seed=1))
    assert open_source(tmp_path / "both").container == "safetensors"
    assert_same_parameters(load_draft(tmp_path / "both", target).head, load_draft(tmp_path / "safe", target).head)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_refused_and_not_executed(tmp_path, target, zipped):
    folder = save_head(tmp_path / "head", container="bin")
    trace = tmp_path / "executed"
    torch.save(
        head_tensors() | {"x": Malicious(trace)}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped
    )
    with pytest.raises(CheckpointError, match="Python objects other than tensors"):
        load_draft(folder, target)
    assert not trace.exists()


def test_a_bare_pickle_is_refused_and_not_executed(tmp_path, target):
    folder = save_head(tmp_path / "head", container="bin")
    trace = tmp_path / "executed"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Malicious(trace)}))
    with pytest.raises(CheckpointError):
        load_draft(folder, target)
    assert not trace.exists()


def test_truncated_and_foreign_files_are_refused(tmp_path, target):
    folder = save_head(tmp_path / "head", container="bin")
    file = folder / "pytorch_model.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError):
        load_draft(folder, target)
    torch.save([torch.zeros(2)], file)
    with pytest.raises(CheckpointError, match="mapping of names to tensors"):
        load_draft(folder, target)


def test_without_torch_the_message_says_what_to_install(tmp_path):
    folder = save_head(tmp_path / "head", container="bin")
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
from eagle_jax.loading.containers import open_source
try:
    open_source(Path({str(folder)!r}))
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install torch" in done.stdout


def test_a_torch_that_cannot_refuse_pickles_is_refused(tmp_path, monkeypatch):
    folder = save_head(tmp_path / "head", container="bin")
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(CheckpointError, match=r"torch >= 2.6"):
        open_source(folder)
