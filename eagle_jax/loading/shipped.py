"""The released draft heads that come with the library.

They stand in `checkpoints/` at the root of the repository, which an editable install reads, and in `eagle_jax/checkpoints/` of
an installed wheel.
"""

import dataclasses
import functools
import json
from pathlib import Path

from eagle_jax.loading.errors import CheckpointError

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShippedHead:
    """An entry of the index of released heads."""

    name: str
    """Name of its folder, by which it is asked for."""
    method: str
    """As in `speculative_config`: "eagle3"."""
    target: str
    """Repository of the target that it was trained for."""
    license: str
    """SPDX identifier."""
    sha256: str
    """Digest of its model.safetensors."""


@functools.cache
def shipped_heads() -> dict[str, ShippedHead]:
    """The released heads by name.

    Raises:
      CheckpointError: the package was installed without them.
    """
    entries = json.loads((_folder() / "index.json").read_text(encoding="utf-8"))
    return {name: ShippedHead(name=name, **entry) for name, entry in entries.items()}


def shipped_head(name: str) -> Path:
    """Folder of a released head.

    Args:
      name: one of `shipped_heads()`.

    Raises:
      CheckpointError: no released head has that name, or its files are missing.
    """
    heads = shipped_heads()
    if name not in heads:
        raise CheckpointError(f"no released head is called {name!r}; there are {', '.join(sorted(heads))}")
    path = _folder() / name
    if not (path / "model.safetensors").is_file():
        raise CheckpointError(f"the released head {name} has no model.safetensors in {path}; install eagle-jax again")
    return path


def _folder() -> Path:
    for folder in (_PACKAGE / "checkpoints", _PACKAGE.parent / "checkpoints"):
        if (folder / "index.json").is_file():
            return folder
    raise CheckpointError(
        f"eagle-jax was installed without its released heads: neither {_PACKAGE} nor {_PACKAGE.parent} has checkpoints/"
    )
