"""What is in the wheel, and that it works where nothing else of the repository is."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from documentation.pages import blocks
from loading.checkpoint_files import hugging_face_llama
from loading.gguf_files import gguf_keys, gguf_tensors, write_gguf
from support.chat_model import GOLDEN, write_chat_model

import eagle_jax

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


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The source archive and the wheel that is made of it, as they would be published."""
    folder = tmp_path_factory.mktemp("distributions")
    build(folder)
    return folder


def test_what_would_be_published_is_well_formed(wheel):
    """`twine check` renders the README as the package index does."""
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", wheel], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_source_archive_is_well_formed_and_whole(distributions):
    [archive] = distributions.glob("*.tar.gz")
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", archive], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "mkdocs.yml", "docs/index.md", "run"} <= names
    assert {"notebooks/1_quick_start.ipynb", "tests/conftest.py", "pallas_kernels/py.typed"} <= names


def test_the_version_is_the_same_everywhere():
    version = eagle_jax.__version__
    assert re.fullmatch(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?", version), "a semantic version"
    [first] = re.findall(r"^## \[?(\d\S*?)\]?(?: |$)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[:1]
    assert first == version
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


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
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # nothing of the clone
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    if source == "editable":
        what = ["--editable", str(ROOT)]
    else:
        what = [str(build(tmp_path / "dist", *(["--wheel"] if source == "wheel" else [])))]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *what], check=True, cwd=tmp_path, env=environment)
    subprocess.run([python, "-m", "pip", "check"], check=True, cwd=tmp_path, env=environment)
    package, heads = json.loads(
        subprocess.check_output([python, "-c", CHECK], text=True, cwd=tmp_path, env=environment)
    )
    inside = str(tmp_path) if source != "editable" else str(ROOT)
    assert package.startswith(inside)
    assert len(heads) == len(INDEX)
    assert all(head.startswith(inside) for head in heads)
    report = subprocess.check_output(
        [python.parent / "eagle-jax", "inspect", next(iter(INDEX)), "--json"], text=True, cwd=tmp_path
    )
    assert json.loads(report)["loads"]


MATRIX = [(python, jax) for python in ("3.11", "3.12", "3.13") for jax in ("oldest", "newest")]


def interpreter(version: str) -> str:
    """A Python of that version, on the path or kept by pyenv."""
    kept = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    for candidate in (*map(str, kept), shutil.which(f"python{version}")):
        if (
            candidate
            and not subprocess.run([candidate, "-c", "import venv, ensurepip"], capture_output=True).returncode
        ):
            return candidate
    pytest.skip(f"there is no Python {version} here")


@pytest.mark.slow
@pytest.mark.parametrize(("version", "jax"), MATRIX, ids=lambda value: str(value))
def test_the_quick_start_works_with_the_wheel_alone(wheel, tmp_path, version, jax):
    """In an environment with nothing but the wheel and what it asks for; needs a package index."""
    requirements = [str(wheel)]
    if jax == "oldest":
        [least] = re.findall(r'^    "jax>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        requirements.append(f"jax=={least}.0")
    subprocess.run([interpreter(version), "-m", "venv", str(tmp_path / "venv")], check=True)
    programs = tmp_path / "venv" / "bin"
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [programs / words[0], *words[1:]],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=environment,
        )

    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", *requirements], check=True, cwd=tmp_path)
    subprocess.run([*pip, "check"], check=True, cwd=tmp_path)
    assert json.loads(run("python", "-W", "error::DeprecationWarning:eagle_jax", "-c", CHECK).stdout)[0].startswith(
        str(tmp_path)
    )

    # Kernels are traced for devices that are not here: kernel languages move between versions of jax.
    report = json.loads(run("eagle-jax", "inspect", next(iter(INDEX)), "--json").stdout)
    assert (report["attention"]["TPU"], report["attention"]["Hopper GPU"]) == ("mosaic_tpu", "mosaic_gpu")

    model = write_chat_model(tmp_path / "model")
    head = shutil.copytree(GOLDEN / "head_A_e3", tmp_path / "head")
    code = "".join(block.code for block in blocks(ROOT / "README.md") if block.language == "python")
    code = code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", model).replace("smollm2-135m-instruct-eagle3", str(head))
    (tmp_path / "quick_start.py").write_text(code + "import jax; print('jax', jax.__version__)\n")
    done = run("python", "quick_start.py")
    assert done.returncode == 0, done.stderr
    assert "vllm:spec_decode_num_drafts" in done.stdout
    print(version, done.stdout.splitlines()[-1])

    # What an extra is needed for says its name, in one line.
    source = hugging_face_llama(num_hidden_layers=1, hidden_size=64)
    quantised = write_gguf(tmp_path / "quantised.gguf", gguf_tensors(source), gguf_keys(source.config), "Q4_1")
    for words, extra in (
        (["generate", "hello", "--model", str(quantised)], "gguf"),
        (["train", "--model", model, "--data", "x", "--output", "run", "--epochs", "1"], "train"),
        (["eval", "--model-dir", model, "--eagle-dir", str(head), "--output", "out"], "eval"),
        (["generate", "hello", "--device", "gpu"], "cuda"),
    ):
        environment.pop("JAX_PLATFORMS", None)
        done = run("eagle-jax", *words)
        assert done.returncode == 2
        assert f"pip install 'eagle-jax[{extra}]'" in done.stderr.splitlines()[-1], done.stderr
