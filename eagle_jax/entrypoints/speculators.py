"""A speculators checkpoint in the place of a model: it names its target, the model proper, and is itself the draft head."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_jax.loading import CheckpointError, resolve
from eagle_jax.loading.draft_format import is_speculators, read_head_config
from eagle_jax.loading.sources import read_json
from eagle_jax.speculative_config import SpeculativeConfig

Speculation = Mapping[str, Any] | SpeculativeConfig | None


def find_target(
    model: str | Path, speculation: Speculation, *, revision: str | None, download_dir: str | Path | None
) -> tuple[str | Path, Speculation, str | None]:
    """The target, the speculative configuration and the target's revision that a model stands for, as in vLLM.

    A speculators checkpoint becomes the `model` of the speculative configuration, in which the caller's keys win; its target is
    the repository or folder that it names, a relative folder being looked for beside it as well. Any other model is returned as
    given.

    Raises:
      CheckpointError: a speculators checkpoint that cannot be read or names no target.
      ValueError: the caller's speculative configuration is wrong, or names another head.
    """
    if isinstance(speculation, Mapping):  # so that a wrong key is reported before anything is fetched
        SpeculativeConfig.from_dict({**speculation, "model": speculation.get("model") or str(model)})
    path = resolve(model, revision=revision, download_dir=download_dir)
    if not (path / "config.json").is_file() or not is_speculators(config := read_json(path / "config.json")):
        return model, speculation, revision
    try:
        verifier = read_head_config(config).verifier
    except CheckpointError as error:
        raise CheckpointError(f"{model}: {error}") from error
    if verifier is None:
        raise CheckpointError(
            f"{model} is a draft head in the speculators format that does not name its target "
            "(speculators_config.verifier.name_or_path); give the target as model, and the head in speculative_config"
        )
    if isinstance(speculation, SpeculativeConfig):
        named: Any = speculation.model
    else:
        named = (speculation or {}).get("model")
    if named is not None and str(named) != str(model):
        raise ValueError(
            f"model {model} is a draft head for {verifier}, but speculative_config names another head, {named}; give the target "
            "as model to use that one"
        )
    if not isinstance(speculation, SpeculativeConfig):
        speculation = {**(speculation or {}), "model": model, "revision": revision}
    beside = path / verifier
    if not Path(verifier).expanduser().exists() and beside.is_dir():
        verifier = str(beside)
    return verifier, speculation, None
