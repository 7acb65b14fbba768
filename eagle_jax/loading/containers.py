"""The choice of a container in a folder, and tensors that are spread over several files."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from eagle_jax.loading.errors import CheckpointError, listed
from eagle_jax.loading.gguf import GGUFSource
from eagle_jax.loading.safetensors import SafetensorsSource
from eagle_jax.loading.sources import Slices, TensorSource, read_json
from eagle_jax.loading.torch_bin import TorchSource


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
