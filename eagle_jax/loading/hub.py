"""From what a user names, a path or a repository of the model hub, to files on this machine."""

import os
import re
from pathlib import Path

from eagle_jax.loading.errors import CheckpointError

# Tried in this order, and only the first kind found is fetched: many repositories hold the same weights several times.
_WEIGHTS = (
    ("*.safetensors", "*.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model*.bin.index.json"),
    ("*.gguf",),
)
_SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
)
_IGNORED = ("*/*", "consolidated*", "training_args.bin", "optimizer*")

# By name, because the hub's package has used several HTTP clients, each with its own errors.
_UNREACHABLE = {"ConnectionError", "ConnectError", "TimeoutError", "Timeout", "TimeoutException"}


def resolve(
    path_or_repo: str | Path,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """Finds a checkpoint: an existing folder or `.gguf` file is used as it is, a repository is fetched from the model hub.

    The hub's package reads HF_TOKEN, HF_HOME and HF_HUB_OFFLINE. Only configuration, tokenizer and one kind of weights are
    fetched.

    Args:
      path_or_repo: a path, or a repository such as "HuggingFaceTB/SmolLM2-135M-Instruct".
      revision: branch, tag or commit of a repository.
      download_dir: where repositories are kept, instead of the hub's own cache.
      local_files_only: take a repository from the cache, without any network.

    Raises:
      CheckpointError: nothing is there, the repository is missing, gated or private, or the hub cannot be reached.
    """
    text = os.fspath(path_or_repo)
    path = Path(text).expanduser()
    if path.exists():
        if revision is not None:
            raise CheckpointError(f"revision {revision!r} has no meaning for the local path {text}")
        return path
    # "name" alone is a legal repository of the hub's early days, but a mistyped folder far more often.
    if (
        isinstance(path_or_repo, Path)
        or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text)
        or text.endswith(".gguf")
    ):
        raise CheckpointError(
            f"there is no folder or .gguf file {text!r}, and it is no repository name such as 'owner/name'"
        )
    return _fetch(text, revision, download_dir, local_files_only)


def _fetch(repo: str, revision: str | None, download_dir: str | Path | None, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    def snapshot(patterns: tuple[str, ...]) -> Path:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(patterns),
                ignore_patterns=list(_IGNORED),
                local_files_only=local_files_only,
            )
        )

    try:
        for weights in _WEIGHTS:
            folder = snapshot((*_SMALL, *weights))
            if any(file for pattern in weights for file in folder.glob(pattern)):
                break
    except Exception as error:
        raise CheckpointError(explain(error, repo, revision)) from error
    else:
        return folder


def explain(error: Exception, repo: str, revision: str | None = None) -> str:
    """One sentence about why a repository could not be fetched."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    named = repo if revision is None else f"{repo} at revision {revision!r}"
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return (
            f"{named} is gated: accept its licence on its page of the hub, then set HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return f"{named} does not exist, or is private and HF_TOKEN is not set to a token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}"
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if isinstance(error, errors.OfflineModeIsEnabled) or (
        offline and isinstance(error, errors.LocalEntryNotFoundError)
    ):
        return f"{named} is not in the cache, and HF_HUB_OFFLINE forbids fetching it: unset it, or give a local folder"
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, errors.LocalEntryNotFoundError) or kinds & _UNREACHABLE:
        return f"{named} is not in the cache, and the model hub cannot be reached: check the network, or give a local folder"
    return f"{named} could not be fetched from the model hub: {type(error).__name__}: {error}"
