"""Where tensors come from: one small protocol over every container."""

import abc
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.loading.errors import CheckpointError

Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    stored_name: str
    """Its name in the file."""
    shape: tuple[int, ...]
    dtype: np.dtype
    """What `read` gives."""
    storage: str
    """How the file stores it: a dtype's name, or that of a quantisation such as "Q4_1"."""


class TensorSource(abc.ABC):
    """Named tensors in files, read slice by slice: opening a source reads no tensor data.

    Args:
      container: what the files are: "safetensors", "torch" or "gguf".
      files: those that hold the tensors.
      metadata: what the files say beside the tensors.
      tensors: the tensors by the names that this source gives them.
    """

    def __init__(
        self, container: str, files: tuple[Path, ...], metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
    ):
        self.container, self.files, self.metadata, self.tensors = container, files, metadata, tensors

    def names(self) -> Sequence[str]:
        """Names of all tensors."""
        return tuple(self.tensors)

    def stored_name(self, name: str) -> str:
        """The name in the file, for messages; of a tensor that is missing, the name it would have there."""
        return self.tensors[name].stored_name if name in self.tensors else name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        """dtype that `read` gives."""
        return self.tensors[name].dtype

    def storage(self, name: str) -> str:
        """How the file stores a tensor."""
        return self.tensors[name].storage

    @abc.abstractmethod
    def read(self, name: str, slices: Slices = ()) -> np.ndarray:
        """Reads `tensor[slices]` (contiguous slices of step 1; missing ones mean whole axes) into memory of its own."""


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
      CheckpointError: the file is absent, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def bounds(name: str, shape: tuple[int, ...], slices: Slices) -> tuple[tuple[int, int], ...]:
    """First and one-past-last index on every axis of `tensor[slices]`.

    Raises:
      ValueError: more slices than axes, or a step other than 1.
    """
    if len(slices) > len(shape) or any(s.step not in (None, 1) for s in slices):
        raise ValueError(f"slices {slices} do not select a contiguous block of tensor {name} of shape {shape}")
    padded = (*slices, *(slice(None),) * (len(shape) - len(slices)))
    return tuple(s.indices(size)[:2] for s, size in zip(padded, shape, strict=True))


def same_values(
    source: TensorSource,
    name: str,
    shape: tuple[int, ...],
    rows: Callable[[int, int], np.ndarray],
    dtype: np.dtype | None = None,
) -> bool:
    """Whether a tensor equals another one of that shape, compared in chunks of rows up to the first difference.

    Args:
      source: where the tensor is.
      name: its name.
      shape: shape of the other tensor.
      rows: gives rows `low..high-1` of the other tensor.
      dtype: the tensor's rows are cast to it before they are compared.
    """
    if source.shape(name) != shape:
        return False
    step = max(1, (8 << 20) // max(1, math.prod(shape[1:])))
    for low in range(0, shape[0], step):
        high = min(low + step, shape[0])
        block = source.read(name, (slice(low, high),))
        if not np.array_equal(block if dtype is None else block.astype(dtype), rows(low, high)):
            return False
    return True
