"""Finding checkpoints: local paths, what is asked of the hub, and one sentence for each way in which it can refuse."""

import fnmatch
from types import SimpleNamespace

import huggingface_hub
import pytest
from checkpoint_files import hugging_face_llama
from huggingface_hub import errors

from eagle_jax.loading import CheckpointError, load_target, resolve

REPO = "owner/name"


def http_error(kind, status):
    response = SimpleNamespace(headers={}, status_code=status, request=None, text="")
    error = kind.__new__(kind)
    Exception.__init__(error, "long text from the server")
    error.response = response
    return error


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub whose repository holds `hub.files`, or that raises `hub.error`; `hub.calls` are the questions it was asked."""
    state = SimpleNamespace(files=[], error=None, calls=[])

    def snapshot_download(repo, *, allow_patterns, ignore_patterns, **options):
        state.calls.append({"repo": repo, **options})
        if state.error is not None:
            raise state.error
        for file in state.files:
            wanted = any(fnmatch.fnmatch(file, p) for p in allow_patterns)
            if wanted and not any(fnmatch.fnmatch(file, p) for p in ignore_patterns):
                (tmp_path / "snapshot" / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "snapshot" / file).touch()
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def fetched(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


SMALL = ["config.json", "tokenizer.json", "tokenizer_config.json"]


def test_local_paths_are_used_as_they_are(tmp_path, monkeypatch, hub):
    (tmp_path / "m.gguf").touch()
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m.gguf") == tmp_path / "m.gguf"
    # A folder wins over a repository of the same name.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert str(resolve(REPO)) == REPO
    assert not hub.calls
    with pytest.raises(CheckpointError, match="revision 'v1' has no meaning for the local path"):
        resolve(tmp_path, revision="v1")


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./x", "../owner/name", "x", "a/b/c", "owner/x.gguf", "owner/na me", ""]
)
def test_paths_that_are_not_there_are_not_taken_for_repositories(name, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no folder or \.gguf file"):
        resolve(name or "no-such")
    assert not hub.calls


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["model.safetensors", "pytorch_model.bin", "m.gguf"], ["model.safetensors"]),
        (
            ["model.safetensors.index.json", "model-1-of-2.safetensors", "pytorch_model.bin"],
            ["model-1-of-2.safetensors", "model.safetensors.index.json"],
        ),
        (["pytorch_model.bin", "training_args.bin", "m.gguf"], ["pytorch_model.bin"]),
        (["m.gguf", "README.md"], ["m.gguf"]),
        (
            ["onnx/model.safetensors", "original/consolidated.00.pth", "consolidated.safetensors", "model.safetensors"],
            ["model.safetensors"],
        ),
    ],
)
def test_only_one_kind_of_weights_is_fetched(hub, files, expected):
    hub.files = SMALL + files
    assert fetched(resolve(REPO)) == sorted(SMALL + expected)


def test_revision_and_download_folder_are_passed_on(hub, tmp_path):
    hub.files = ["model.safetensors"]
    resolve(REPO, revision="v1", download_dir=tmp_path / "here")
    expected = {"repo": REPO, "revision": "v1", "cache_dir": tmp_path / "here", "local_files_only": False}
    assert hub.calls == [expected]


@pytest.mark.parametrize(
    ("error", "offline", "message"),
    [
        (http_error(errors.GatedRepoError, 403), False, r"owner/name is gated: accept its licence .* HF_TOKEN"),
        (http_error(errors.HfHubHTTPError, 403), False, "is gated"),
        (
            http_error(errors.RepositoryNotFoundError, 404),
            False,
            r"owner/name does not exist, or is private and HF_TOKEN",
        ),
        (http_error(errors.HfHubHTTPError, 401), False, "does not exist, or is private"),
        (http_error(errors.HfHubHTTPError, 500), False, "could not be fetched from the model hub: HfHubHTTPError"),
        (errors.LocalEntryNotFoundError("x"), True, "not in the cache, and HF_HUB_OFFLINE forbids"),
        (errors.OfflineModeIsEnabled("x"), True, "not in the cache, and HF_HUB_OFFLINE forbids"),
        (errors.LocalEntryNotFoundError("x"), False, "not in the cache, and the model hub cannot be reached"),
        (ConnectionError("x"), False, "the model hub cannot be reached"),
        (
            type("ConnectTimeout", (type("TimeoutException", (Exception,), {}),), {})("x"),
            False,
            "the model hub cannot be reached",
        ),
        (OSError("disk full"), False, "could not be fetched from the model hub: OSError: disk full"),
    ],
)
def test_every_refusal_is_one_sentence(hub, monkeypatch, error, offline, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "0")
    hub.error = error
    with pytest.raises(CheckpointError, match=message) as caught:
        load_target(REPO)
    assert "\n" not in str(caught.value)


def test_a_missing_revision_is_named(hub):
    hub.error = http_error(errors.RevisionNotFoundError, 404)
    with pytest.raises(CheckpointError, match="owner/name has no revision 'v9'"):
        resolve(REPO, revision="v9")


def test_the_hub_package_itself_offline(tmp_path, monkeypatch):
    # The environment of the tests sets HF_HUB_OFFLINE, which the package reads when it is imported.
    with pytest.raises(CheckpointError, match="owner/name is not in the cache"):
        resolve(REPO, download_dir=tmp_path)


def test_a_repository_in_the_cache_loads_offline(tmp_path):
    model = hugging_face_llama(num_hidden_layers=1)
    root = tmp_path / "models--owner--name"
    model.save_pretrained(root / "snapshots" / ("0" * 40))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0" * 40)
    target = load_target(REPO, download_dir=tmp_path)
    assert target.name == REPO
    assert target.config.num_hidden_layers == 1
