"""Torch `.bin` checkpoints, read with `weights_only=True`: a file that holds anything but tensors is refused, not executed."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle_jax.loading.errors import CheckpointError
from eagle_jax.loading.sources import Slices, TensorInfo, TensorSource, bounds


class TorchSource(TensorSource):
    """The tensors of one `pytorch_model.bin`; torch maps the file, so that a tensor is read when it is asked for.

    Raises:
      CheckpointError: torch is absent or too old to refuse pickles safely, or the file holds something else than named tensors.
    """

    def __init__(self, path: Path):
        self._tensors = _load(path)
        storage = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._tensors.items()}
        dtypes = {name: np.dtype(getattr(ml_dtypes, kind, None) or kind) for name, kind in storage.items()}
        tensors = {n: TensorInfo(n, tuple(x.shape), dtypes[n], storage[n]) for n, x in self._tensors.items()}
        super().__init__("torch", (path,), {}, tensors)

    def read(self, name: str, slices: Slices = ()) -> np.ndarray:
        """Reads a slice of a tensor."""
        limits = bounds(name, self.shape(name), slices)
        block = self._tensors[name][tuple(slice(low, high) for low, high in limits)]
        # numpy knows neither bfloat16 nor float8, so the bits travel as bytes; the copy keeps no hold on the file.
        raw = block.contiguous().reshape(-1).view(_torch(self.files[0]).uint8).numpy().copy()
        return raw.view(self.dtype(name)).reshape(tuple(block.shape))


def _torch(path: Path) -> Any:
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{path} is a torch file, and torch is not installed: pip install torch, or convert the checkpoint to safetensors"
        ) from None
    if tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) < (2, 6):
        # CVE-2025-32434: before 2.6 weights_only=True could still be made to run code.
        raise CheckpointError(
            f"{path} is a torch file, which torch {torch.__version__} cannot read safely; install torch >= 2.6"
        )
    return torch


def _load(path: Path) -> dict[str, Any]:
    torch = _torch(path)
    try:
        # Only the zip layout of torch >= 1.6 can be mapped.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds Python objects other than tensors; it is refused because reading them would run code from the file. "
            "Ask its author for safetensors"
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete torch file: {error}") from error
    if not isinstance(tensors, Mapping) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise CheckpointError(f"{path} must hold a mapping of names to tensors, a state dict")
    return dict(tensors)
