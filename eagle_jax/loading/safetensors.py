"""Safetensors files (https://github.com/huggingface/safetensors).

The package of that name checks a file. Its tensors are read here: to numpy the package (0.5 to 0.8) gives bfloat16 but no float8,
and it maps the whole file while it is open. The format: the header's length as a little-endian uint64, a JSON header that
maps each name to dtype, shape and byte range, then the tensors, row-major and without gaps.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle_jax.loading.errors import CheckpointError
from eagle_jax.loading.sources import Slices, TensorInfo, TensorSource, bounds

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class SafetensorsSource(TensorSource):
    """The tensors of one `.safetensors` file.

    Raises:
      CheckpointError: the header is broken, or the file is shorter or longer than its header says.
    """

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
        except SafetensorError as error:
            with path.open("rb") as file:
                pointer = file.read(8) == b"version "
            raise CheckpointError(
                f"{path} is truncated or no safetensors file ({path.stat().st_size} bytes): {error}"
                + (" (a Git LFS pointer, whose file was not fetched)" if pointer else "")
            ) from error
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length), object_pairs_hook=lambda pairs: _unique(path, pairs))
        header.pop("__metadata__", None)
        for name, record in header.items():
            if record["dtype"] not in _DTYPES:
                raise CheckpointError(f"tensor {name} of {path} has dtype {record['dtype']!r}, which is not read")
        dtypes = {name: _DTYPES[record["dtype"]] for name, record in header.items()}
        tensors = {n: TensorInfo(n, tuple(r["shape"]), dtypes[n], dtypes[n].name) for n, r in header.items()}
        super().__init__("safetensors", (path,), metadata, tensors)
        self._begin = {name: 8 + length + record["data_offsets"][0] for name, record in header.items()}

    def read(self, name: str, slices: Slices = ()) -> np.ndarray:
        """Reads a slice of a tensor: whole rows by one read of their bytes, columns through a short-lived memory map."""
        info = self.tensors[name]
        return read_block(self.files[0], self._begin[name], info.dtype, info.shape, bounds(name, info.shape, slices))


def read_block(
    path: Path, begin: int, dtype: np.dtype, shape: tuple[int, ...], limits: tuple[tuple[int, int], ...]
) -> np.ndarray:
    """Reads a block of a row-major array that starts at byte `begin` of a file.

    Args:
      path: the file.
      begin: offset of the array's first byte.
      dtype: dtype of the array.
      shape: shape of the whole array.
      limits: first and one-past-last index on every axis.
    """
    if not shape:
        return np.fromfile(path, dtype, count=1, offset=begin).reshape(())
    first, stop = limits[0]
    stop = max(first, stop)
    row = math.prod(shape[1:])
    offset = begin + first * row * dtype.itemsize
    if all((low, high) == (0, size) for (low, high), size in zip(limits[1:], shape[1:], strict=True)):
        block = np.fromfile(path, dtype, count=(stop - first) * row, offset=offset)
        if block.size != (stop - first) * row:
            raise CheckpointError(
                f"{path} ended while it was read: {block.size} of {(stop - first) * row} values were there"
            )
        return block.reshape(stop - first, *shape[1:])
    # A shard of columns touches a part of every row; the map goes away with this call, so it does not add up in memory.
    mapped = np.memmap(path, dtype, mode="r", offset=offset, shape=(stop - first, *shape[1:]))
    return np.array(mapped[(slice(None), *(slice(low, high) for low, high in limits[1:]))])


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...], Callable[[], np.ndarray]]]
) -> None:
    """Writes a file, one tensor in memory at a time; a file of that name appears only when it is complete.

    Args:
      path: the file.
      tensors: dtype, shape and a function that gives the values, by name.

    Raises:
      CheckpointError: a dtype that the format does not have.
    """
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    # Wide dtypes first, so that every tensor is aligned to its items.
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in order:
        dtype, shape, _ = tensors[name]
        if dtype not in codes:
            raise CheckpointError(f"tensor {name} has dtype {dtype}, which safetensors does not have")
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for name in order:
                dtype, shape, read = tensors[name]
                values = read()
                if values.dtype != dtype or values.shape != shape:
                    raise CheckpointError(
                        f"tensor {name} was announced as {dtype} {shape}, but is {values.dtype} {values.shape}"
                    )
                file.write(np.ascontiguousarray(values).tobytes())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        raise CheckpointError(f"{path} names {next(k for k in keys if keys.count(k) > 1)} twice in its header")
    return out
