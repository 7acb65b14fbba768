"""One GGUF file: its header, and its tensors dequantised slice by slice by the `gguf` package.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here: the package's reader makes several
arrays for every token and merge of the tokenizer, 4 s for 49,152 tokens.
"""

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle_jax.loading.errors import CheckpointError, listed
from eagle_jax.loading.safetensors import read_block
from eagle_jax.loading.sources import Slices, TensorInfo, TensorSource, bounds

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Tensor types that numpy holds as they are; every other type is a quantisation.
_PLAIN = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a tensor lies and how: `shape` is row-major (the file lists axes the other way round)."""

    kind: int
    shape: tuple[int, ...]
    begin: int


class GGUFSource(TensorSource):
    """The tensors of one `.gguf` file under their names in the file; quantised ones are read as float32.

    `metadata` holds the keys of the file with plain Python values.

    Raises:
      CheckpointError: a broken or truncated file, or a quantisation that needs the `gguf` package or that it cannot undo.
    """

    def __init__(self, path: Path):
        metadata, self._entries = _Parser(path).run()
        self._known: dict[int, tuple[int, int, str]] = {}
        tensors: dict[str, TensorInfo] = {}
        super().__init__("gguf", (path,), metadata, tensors)
        size = path.stat().st_size
        for name, entry in self._entries.items():
            block, block_bytes, storage = self._blocks(entry.kind)
            if entry.shape and entry.shape[-1] % block:
                raise CheckpointError(
                    f"tensor {name} of {path} has rows of {entry.shape[-1]}, no multiple of its block size {block}"
                )
            end = entry.begin + math.prod(entry.shape) // block * block_bytes
            if end > size:
                raise CheckpointError(f"{path} is truncated: tensor {name} ends at byte {end} of {size}")
            dtype = _PLAIN.get(entry.kind, np.dtype(np.float32))
            tensors[name] = TensorInfo(name, entry.shape, dtype, storage)

    def read(self, name: str, slices: Slices = ()) -> np.ndarray:
        """Reads a slice of a tensor and dequantises it."""
        entry, path = self._entries[name], self.files[0]
        limits = bounds(name, entry.shape, slices)
        if entry.kind in _PLAIN:
            return read_block(path, entry.begin, _PLAIN[entry.kind], entry.shape, limits)
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        # Blocks run along the last axis, so those that hold the columns are dequantised whole, and cut afterwards.
        block, block_bytes, _ = self._blocks(entry.kind)
        packed = (*entry.shape[:-1], entry.shape[-1] // block * block_bytes)
        low, high = limits[-1]
        first, last = low // block, -(-high // block)
        data = read_block(
            path, entry.begin, np.dtype(np.uint8), packed, (*limits[:-1], (first * block_bytes, last * block_bytes))
        )
        # The package works in groups of 16 rows; blocks do not care where a row ends, so longer rows mean fewer groups.
        group = math.gcd(math.prod(data.shape[:-1]), 16)
        values = dequantize(data.reshape(-1, group * data.shape[-1]), GGMLQuantizationType(entry.kind))
        values = values.reshape(*data.shape[:-1], (last - first) * block)
        return np.ascontiguousarray(values[..., low - first * block : high - first * block])

    def _blocks(self, kind: int) -> tuple[int, int, str]:
        """Values a block, bytes a block, and name of a tensor type."""
        if kind in _PLAIN:
            return 1, _PLAIN[kind].itemsize, _PLAIN[kind].name
        if kind in self._known:
            return self._known[kind]
        try:
            from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError:
            raise CheckpointError(
                f"{self.files[0]} is quantised, which needs the gguf package: pip install 'eagle-jax[gguf]'"
            ) from None
        try:
            quantisation = GGMLQuantizationType(kind)
        except ValueError:
            raise CheckpointError(
                f"{self.files[0]} uses tensor type {kind}, unknown to this version of the gguf package"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
        try:
            dequantize(np.zeros((1, block_bytes), np.uint8), quantisation)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.files[0]} uses tensor type {quantisation.name}, which the gguf package cannot dequantise"
            ) from None
        self._known[kind] = block, block_bytes, quantisation.name
        return self._known[kind]


class _Parser:
    """Reads the header of a GGUF file: keys and values, then the list of tensors."""

    def __init__(self, path: Path):
        self.path = path

    def run(self) -> tuple[dict[str, Any], dict[str, _Entry]]:
        """The metadata, and the tensors by name."""
        if self.path.stat().st_size < 24:
            raise CheckpointError(f"{self.path} is too short for a GGUF file")
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self.data:
            try:
                return self._header()
            except (struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
                raise CheckpointError(f"{self.path} is truncated or broken inside its GGUF header ({error})") from error

    def _header(self) -> tuple[dict[str, Any], dict[str, _Entry]]:
        if self.data[:4] != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file: it starts with {self.data[:4]!r}")
        self.at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.path} is GGUF version {version} (or big-endian); versions {_VERSIONS} are read"
            )
        tensors, keys = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in metadata:
                raise CheckpointError(f"{self.path} has the key {key} twice")
            metadata[key] = self._value(self._scalar("I"))
        found: list[tuple[str, int, tuple[int, ...], int]] = []
        for _ in range(tensors):
            name, axes = self._string(), self._scalar("I")
            shape = tuple(self._scalar("Q") for _ in range(axes))[::-1]
            found.append((name, self._scalar("I"), shape, self._scalar("Q")))
        alignment = metadata.get("general.alignment", 32)
        start = -(-self.at // alignment) * alignment
        entries = {name: _Entry(kind, shape, start + offset) for name, kind, shape, offset in found}
        if len(entries) != len(found):
            names = [name for name, *_ in found]
            raise CheckpointError(
                f"{self.path} holds tensors twice: {listed(sorted({n for n in names if names.count(n) > 1}))}"
            )
        return metadata, entries

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        if self.at + length > len(self.data):
            raise struct.error(f"a string of {length} bytes")
        value = self.data[self.at : self.at + length].decode("utf-8")
        self.at += length
        return value

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path} has a value of type {kind}, unknown to GGUF")
        item, count = self._scalar("I"), self._scalar("Q")
        if item in _SCALARS:
            values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self.data, self.at)
            self.at += struct.calcsize(f"<{count}{_SCALARS[item]}")
            return list(values)
        return [self._value(item) for _ in range(count)]
