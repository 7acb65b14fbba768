"""Where tensors come from: one small protocol over every container, and the choice of a container in a folder."""

import abc
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.loading.errors import CheckpointError, listed

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


class ShardedSource(TensorSource):
    """Tensors spread over several files by an index (`*.index.json` with a `weight_map`, as transformers writes it).

    Raises:
      CheckpointError: a shard is missing, or index and shards disagree about where a tensor is.
    """

    def __init__(self, index: Path, open_shard: Callable[[Path], TensorSource]):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index.name} has no weight_map, which says which file holds each tensor")
        folder = index.parent
        shard_names = sorted(set(weight_map.values()))
        # A weight_map comes from a stranger: it may name files beside the index, not anywhere else.
        if foreign := [n for n in shard_names if not isinstance(n, str) or Path(n).name != n]:
            raise CheckpointError(f"{index.name} names shards outside its folder: {listed(foreign)}")
        if missing := [n for n in shard_names if not (folder / n).is_file()]:
            raise CheckpointError(f"{index.name} names shards that are not in {folder}: {listed(missing)}")
        shards = {n: open_shard(folder / n) for n in shard_names}
        holders: dict[str, list[str]] = {}
        for shard_name, shard in shards.items():
            for name in shard.names():
                holders.setdefault(name, []).append(shard_name)
        if absent := [f"{n} ({weight_map[n]})" for n in weight_map if weight_map[n] not in holders.get(n, [])]:
            raise CheckpointError(f"{index.name} lists tensors that their shard does not hold: {listed(absent)}")
        if twice := [f"{n} ({' and '.join(h)})" for n, h in holders.items() if len(h) > 1]:
            raise CheckpointError(f"tensors are in more than one shard of {index.name}: {listed(twice)}")
        if unlisted := [f"{n} ({h[0]})" for n, h in holders.items() if n not in weight_map]:
            raise CheckpointError(f"shards hold tensors that {index.name} does not list: {listed(unlisted)}")
        self._holder = {name: shards[shard_name] for name, shard_name in weight_map.items()}
        super().__init__(
            next(iter(shards.values())).container,
            tuple(folder / n for n in shard_names),
            {},
            {name: holder.tensors[name] for name, holder in self._holder.items()},
        )

    def read(self, name: str, slices: Slices = ()) -> np.ndarray:
        """Reads a slice of a tensor from its shard."""
        return self._holder[name].read(name, slices)


def open_source(path: Path) -> TensorSource:
    """Opens the weights of a checkpoint folder, or one `.gguf` file.

    In a folder safetensors win over torch `.bin` files, a single file over an index, and one `.gguf` file is taken where there
    are neither.

    Raises:
      CheckpointError: no weights, or weights in a format that is not read.
    """
    # Each container is imported when it is met: GGUF and torch are optional.
    from eagle_jax.loading.gguf import GGUFSource
    from eagle_jax.loading.safetensors import SafetensorsSource
    from eagle_jax.loading.torch_bin import TorchSource

    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is a file; give the folder that holds it and config.json, or a .gguf file")
        return GGUFSource(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a folder nor a .gguf file")
    if (file := path / "model.safetensors").is_file():
        return SafetensorsSource(file)
    if (file := path / "model.safetensors.index.json").is_file():
        return ShardedSource(file, SafetensorsSource)
    if (file := path / "pytorch_model.bin").is_file():
        return TorchSource(file)
    if (file := path / "pytorch_model.bin.index.json").is_file():
        return ShardedSource(file, TorchSource)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return GGUFSource(gguf_files[0])
    if gguf_files:
        raise CheckpointError(
            f"{path} holds several GGUF files ({listed(f.name for f in gguf_files)}); give the path of one"
        )
    if (path / "consolidated.00.pth").is_file() or (path / "consolidated.pth").is_file():
        raise CheckpointError(
            f"{path} is in Meta's format (consolidated*.pth, interleaved rotary channels), which is not read; convert it to the "
            "Hugging Face format"
        )
    if (path / "consolidated.safetensors").is_file():
        raise CheckpointError(
            f"{path} is in Mistral's own format (consolidated.safetensors, params.json), which is not read; take the model's "
            "Hugging Face files"
        )
    present = listed(sorted(f.name for f in path.iterdir())) or "nothing"
    raise CheckpointError(
        f"{path} holds no weights: model.safetensors, pytorch_model.bin, an index of one of them (*.index.json) or one .gguf "
        f"file is needed, and it holds {present}"
    )


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
