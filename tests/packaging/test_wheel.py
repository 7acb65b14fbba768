"""What is in the wheel, and that it works where nothing else of the repository is."""

import hashlib
import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX = json.loads((ROOT / "checkpoints" / "index.json").read_text())


def build(folder: Path, *options: str) -> Path:
    # Without isolation: the build backend is in the test extra, and no package index is needed.
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"), "--wheel")


@pytest.fixture(scope="module")
def members(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.file_size for info in archive.infolist()}


def test_the_wheel_holds_the_packages_and_nothing_else(members):
    tops = {name.split("/")[0] for name in members}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"eagle_jax", "pallas_kernels"}
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ("eagle_jax", "pallas_kernels")
        for path in (ROOT / package).rglob("*.py")
    }
    assert sources <= set(members)
    assert not [name for name in members if "__pycache__" in name or name.startswith("tests")]


def test_both_packages_are_marked_as_typed(members):
    assert {"eagle_jax/py.typed", "pallas_kernels/py.typed"} <= set(members)


def test_the_wheel_holds_the_licence_and_the_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [entry_points] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "eagle-jax = eagle_jax.cli:main" in archive.read(entry_points).decode()
        [metadata] = [name for name in archive.namelist() if name.endswith("METADATA")]
        text = archive.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text
    assert {line.removeprefix("Provides-Extra: ") for line in text.splitlines() if line.startswith("Provides-Extra")} == {
        "gguf", "eval", "train", "bench", "serve", "tpu", "cuda", "test", "docs"
    }  # fmt: skip


def test_the_wheel_holds_the_released_heads(wheel, members):
    assert "eagle_jax/checkpoints/index.json" in members
    with zipfile.ZipFile(wheel) as archive:
        for name, entry in INDEX.items():
            assert f"eagle_jax/checkpoints/{name}/config.json" in members
            with archive.open(f"eagle_jax/checkpoints/{name}/model.safetensors") as file:
                assert hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]


def test_the_package_index_takes_a_wheel_of_that_size(wheel):
    assert wheel.stat().st_size < 100e6


CHECK = """
import json, pathlib, sys
import eagle_jax
from eagle_jax.loading.shipped import shipped_head, shipped_heads
print(json.dumps([str(pathlib.Path(eagle_jax.__file__).parent), [str(shipped_head(name)) for name in shipped_heads()]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", ["wheel", "wheel of the sdist", "editable"])
def test_a_fresh_environment_finds_the_heads_and_the_command(tmp_path, source):
    """Needs a package index: the environment gets every dependency anew."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    if source == "editable":
        what = ["--editable", str(ROOT)]
    else:
        what = [str(build(tmp_path / "dist", *(["--wheel"] if source == "wheel" else [])))]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *what], check=True, cwd=tmp_path)
    subprocess.run([python, "-m", "pip", "check"], check=True, cwd=tmp_path)
    package, heads = json.loads(subprocess.check_output([python, "-c", CHECK], text=True, cwd=tmp_path))
    inside = str(tmp_path) if source != "editable" else str(ROOT)
    assert package.startswith(inside)
    assert len(heads) == len(INDEX)
    assert all(head.startswith(inside) for head in heads)
    report = subprocess.check_output(
        [python.parent / "eagle-jax", "inspect", next(iter(INDEX)), "--json"], text=True, cwd=tmp_path
    )
    assert json.loads(report)["loads"]
