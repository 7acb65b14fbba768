"""One safetensors file, read and written without the package of that name: its numpy side cannot give bfloat16 without torch.

Format (https://github.com/huggingface/safetensors): the header's length as a little-endian uint64, a JSON header that maps each
name to dtype, shape and byte range, then the tensors, row-major and without gaps.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle_jax.loading.errors import CheckpointError
from eagle_jax.loading.sources import Slices, bounds

_MAX_HEADER = 100_000_000  # bytes; the limit of the format

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


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: `begin` is counted from the start of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int


class SafetensorsSource:
    """The tensors of one `.safetensors` file.

    Raises:
      CheckpointError: the header is broken, or the file is shorter or longer than its header says.
    """

    container = "safetensors"

    def __init__(self, path: Path):
        self.files = (path,)
        self.metadata, self._entries = _read_header(path)

    def names(self) -> Sequence[str]:
        """Names of all tensors."""
        return tuple(self._entries)

    def stored_name(self, name: str) -> str:
        """The name in the file."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        """dtype of a tensor in the file and out of `read`."""
        return self._entries[name].dtype

    def storage(self, name: str) -> str:
        """Name of the dtype in the file."""
        return self._entries[name].dtype.name

    def read(self, name: str, slices: Slices = ()) -> np.ndarray:
        """Reads a slice of a tensor: whole rows by one read of their bytes, columns through a short-lived memory map."""
        entry = self._entries[name]
        return read_block(self.files[0], entry.begin, entry.dtype, entry.shape, bounds(name, entry.shape, slices))


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


def _read_header(path: Path) -> tuple[Mapping[str, Any], dict[str, _Entry]]:
    size = os.path.getsize(path)
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > _MAX_HEADER or 8 + length > size:
            raise CheckpointError(
                f"{path} is not a complete safetensors file: it has {size} bytes and announces a header of {length}"
                + (" (a Git LFS pointer, whose file was not fetched)" if prefix.startswith(b"version ") else "")
            )
        try:
            header = json.loads(file.read(length), object_pairs_hook=lambda pairs: _unique(path, pairs))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a header that is not a JSON object")
    metadata = header.pop("__metadata__", {})
    entries, ranges = {}, []
    for name, record in header.items():
        try:
            code, shape = record["dtype"], tuple(record["shape"])
            begin, end = record["data_offsets"]
            valid = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            raise CheckpointError(
                f"{path} describes tensor {name} by {record!r}; dtype, shape and data_offsets are needed"
            )
        if code not in _DTYPES:
            raise CheckpointError(f"tensor {name} of {path} has dtype {code!r}, which is not read")
        dtype = _DTYPES[code]
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(
                f"tensor {name} of {path} has shape {shape} of {code}, {math.prod(shape) * dtype.itemsize} bytes, but its "
                f"data_offsets {[begin, end]} hold {end - begin}"
            )
        entries[name] = _Entry(dtype, shape, 8 + length + begin)
        ranges.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            raise CheckpointError(
                f"tensor {name} of {path} starts at byte {begin} of the data, where {position} was expected"
            )
        position = end
    if 8 + length + position != size:
        problem = "is truncated" if 8 + length + position > size else "is longer than its header says"
        raise CheckpointError(f"{path} {problem}: {size} bytes, where its header describes {8 + length + position}")
    return metadata, entries


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        raise CheckpointError(f"{path} names {next(k for k in keys if keys.count(k) > 1)} twice in its header")
    return out
