"""The index of released heads, and finding one by its name."""

import hashlib
import json
from pathlib import Path

import pytest

from eagle_jax.loading import CheckpointError, shipped
from eagle_jax.loading.shipped import shipped_head, shipped_heads

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """The library as if it had been installed into `tmp_path`."""
    package = tmp_path / "eagle_jax"
    package.mkdir()
    monkeypatch.setattr(shipped, "_PACKAGE", package)
    shipped_heads.cache_clear()
    yield package
    shipped_heads.cache_clear()


def write_head(folder: Path) -> None:
    (folder / "some-head").mkdir(parents=True)
    (folder / "some-head" / "model.safetensors").touch()
    entry = {"method": "eagle3", "target": "owner/name", "license": "MIT", "sha256": "0"}
    (folder / "index.json").write_text(json.dumps({"some-head": entry}))


def test_the_index_lists_exactly_the_folders():
    folders = {path.name for path in (ROOT / "checkpoints").iterdir() if path.is_dir()}
    assert set(shipped_heads()) == folders


@pytest.mark.parametrize("name", list(shipped_heads()))
def test_a_head_is_the_file_that_the_index_promises(name):
    path = shipped_head(name)
    assert path == ROOT / "checkpoints" / name
    with (path / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == shipped_heads()[name].sha256
    assert (path / "README.md").is_file()
    assert f"[{name}]" in (ROOT / "checkpoints" / "README.md").read_text()


def test_heads_are_found_inside_an_installed_package(elsewhere):
    write_head(elsewhere / "checkpoints")
    assert shipped_head("some-head") == elsewhere / "checkpoints" / "some-head"
    assert shipped_heads()["some-head"].target == "owner/name"


def test_heads_are_found_beside_the_package_of_a_clone(elsewhere):
    write_head(elsewhere.parent / "checkpoints")
    assert shipped_head("some-head") == elsewhere.parent / "checkpoints" / "some-head"


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(CheckpointError, match=r"'no-such-head'; there are .*smollm2-135m-instruct-eagle3"):
        shipped_head("no-such-head")


def test_an_install_without_heads_says_so(elsewhere):
    with pytest.raises(CheckpointError, match="installed without its released heads"):
        shipped_head("some-head")


def test_a_head_without_weights_says_so(elsewhere):
    write_head(elsewhere / "checkpoints")
    (elsewhere / "checkpoints" / "some-head" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        shipped_head("some-head")
