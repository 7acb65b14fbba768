"""From tensors in files to device arrays in a module, by a table: each parameter is a stack of file tensors along axis 0.

A parameter that is split over devices lists rows of tensors in another order (q, k and v of one shard after another), because
arrays are filled by ranges of rows; nothing here knows what the rows mean.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from eagle_jax.loading.errors import CheckpointError
from eagle_jax.loading.progress import Progress, reporter
from eagle_jax.loading.sources import TensorSource
from eagle_jax.parallel.partition import Axes

Module = TypeVar("Module", bound=nnx.Module)
Sharding = jax.sharding.Sharding | Callable[[Axes], jax.sharding.Sharding]
"""One sharding for all parameters, or a function of a parameter's logical axes."""

_CHUNK_BYTES = 32 << 20  # a cast needs a second copy of what it casts: of one chunk, not of a tensor
_ALIGNMENT = 64  # bytes; from there XLA's CPU backend takes a host array as it is, without a copy
_FLOATS = {np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}


ZEROS = ""
"""In place of a tensor's name: rows that no file has, padding."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of a file tensor that are part of a parameter, and the shape that the whole tensor must have."""

    tensor: str
    shape: tuple[int, ...]
    start: int = 0
    """First row."""
    stop: int | None = None
    """One past the last row; None is the end of the tensor."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return (self.shape[0] if self.stop is None else self.stop) - self.start

    def part(self, low: int, high: int) -> "Piece":
        """Rows `low..high-1` of this piece."""
        return dataclasses.replace(self, start=self.start + low, stop=self.start + high)


Table = Mapping[str, tuple[Piece, ...]]
"""For each parameter's path the tensors that are stacked along axis 0 to make it."""


@dataclasses.dataclass(frozen=True)
class Match:
    """How the tensors of a checkpoint fit a table."""

    used: tuple[str, ...]
    unused: tuple[str, ...]
    """Tensors that are known not to matter."""
    missing: tuple[Piece, ...]
    unexpected: tuple[str, ...]
    """Tensors that nothing reads."""
    problems: tuple[str, ...]
    """One sentence for every tensor that is missing, unexpected, or of the wrong shape or kind."""

    def check(self) -> None:
        """Raises CheckpointError with every problem, if there is one."""
        if self.problems:
            shown = self.problems[:20]
            more = [f"... and {len(self.problems) - 20} more"] if len(self.problems) > 20 else []
            raise CheckpointError("\n  ".join(["the tensors do not fit the configuration.", *shown, *more]))


def reordered(row: tuple[Piece, ...], ranges: Iterable[tuple[int, int]], zeros: int) -> tuple[Piece, ...]:
    """The rows of a stack in another order, and zeros behind them.

    Args:
      row: the stack.
      ranges: first and one-past-last row of each run of rows that stay together; a run may come several times.
      zeros: rows of zeros at the end.
    """
    pieces = []
    for low, high in ranges:
        offset = 0
        for piece in row:
            first, last = max(low, offset), min(high, offset + piece.rows)
            if first < last:
                whole = last - first == piece.rows
                pieces.append(piece if whole else piece.part(first - offset, last - offset))
            offset += piece.rows
    return (*pieces, *([Piece(ZEROS, (zeros, *row[0].shape[1:]))] if zeros else []))


def match_tensors(table: Table, source: TensorSource, known_unused: Iterable[str] = ()) -> Match:
    """Compares a checkpoint with the table that is to be filled from it; reads no tensor.

    Args:
      table: the parameters.
      source: the checkpoint.
      known_unused: names of tensors that need not be read, though they are there.
    """
    present, known = set(source.names()), set(known_unused)
    pieces = {piece.tensor: piece for row in table.values() for piece in row if piece.tensor != ZEROS}
    missing = tuple(piece for name, piece in pieces.items() if name not in present)
    unexpected = tuple(name for name in source.names() if name not in pieces and name not in known)
    problems = [
        f"missing: {source.stored_name(name)} of shape {piece.shape}"
        for name, piece in pieces.items()
        if piece in missing
    ]
    problems += [
        f"unexpected: {source.stored_name(n)} of shape {source.shape(n)}, which nothing reads" for n in unexpected
    ]
    for name, piece in pieces.items():
        if name not in present:
            continue
        stored = source.stored_name(name)
        if (shape := source.shape(name)) != piece.shape:
            transposed = ", its transpose" if shape == piece.shape[::-1] else ""
            problems.append(f"{stored} has shape {shape}{transposed}; the configuration makes it {piece.shape}")
        if source.dtype(name) not in _FLOATS:
            problems.append(
                f"{stored} is stored as {source.storage(name)}; weights must be float64, float32, float16 or bfloat16"
            )
    return Match(
        used=tuple(name for name in pieces if name in present),
        unused=tuple(name for name in source.names() if name in known and name not in pieces),
        missing=missing,
        unexpected=unexpected,
        problems=tuple(problems),
    )


def fill(
    build: Callable[[], Module],
    table: Table,
    source: TensorSource,
    dtype: jnp.dtype,
    *,
    constants: Mapping[str, np.ndarray | jax.Array] | None = None,
    sharding: Sharding | None = None,
    progress: Progress = False,
) -> Module:
    """Builds a module whose parameters are read from a checkpoint, none of them initialised first.

    Every array is read by the slices that its shards need, cast slice by slice, and handed to its device before the next one is
    read: host memory holds one parameter and a chunk of 32 MiB beside it. On the CPU the parameter is the array itself.

    Args:
      build: makes the module, as `nnx.eval_shape` takes it.
      table: every parameter of the module by path, except those in `constants`.
      source: the checkpoint, already matched.
      dtype: dtype of the parameters.
      constants: values by path of variables that are no file tensor, kept in their dtype; arrays of devices as they lie there.
      sharding: where parameters go; None is the default device.
      progress: see `eagle_jax.loading.progress`.

    Raises:
      CheckpointError: a value does not fit float16, or a table that does not name exactly the module's parameters.
    """
    graph, state = nnx.split(nnx.eval_shape(build))
    flat = dict(nnx.to_flat_state(state))
    constants = constants or {}
    paths = {key: ".".join(map(str, key)) for key in flat}
    if odd := set(paths.values()) ^ (set(table) | set(constants)):
        raise CheckpointError(f"the table of tensors and the module disagree about parameters {sorted(odd)}")
    where = jnp.zeros(()).sharding if sharding is None else sharding
    total = _bytes_to_read(flat, paths, table, source, where)
    filled = {}
    with reporter(progress, total) as report:
        for key, variable in flat.items():
            path, shape = paths[key], tuple(variable.shape)
            place = where(variable.get_metadata("axes")) if callable(where) else where
            if path in constants:
                value = constants[path]
                array = value if isinstance(value, jax.Array) else _put(value, place)
            else:
                array = _read_parameter(path, table[path], shape, dtype, source, place, report)
            filled[key] = variable.replace(array)
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _read_parameter(
    path: str,
    row: tuple[Piece, ...],
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    source: TensorSource,
    sharding: jax.sharding.Sharding,
    report: Callable[[str, int], None],
) -> jax.Array:
    stacked = (sum(piece.rows for piece in row), *row[0].shape[1:])
    if stacked != shape:
        raise CheckpointError(f"the tensors of parameter {path} stack to {stacked}, the module makes it {shape}")
    # Devices that hold the same block share one reading of it.
    blocks: dict[Any, np.ndarray] = {}

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # only scalars have no index, and no parameter is one
        key = tuple(s.indices(size) for s, size in zip(index, shape, strict=True))
        if key not in blocks:
            blocks[key] = _read_block(row, shape, index, dtype, source, report)
        return blocks[key]

    array = jax.make_array_from_callback(shape, sharding, block, dtype=dtype)
    # Transfers are asynchronous: without waiting, the host copies of many parameters would pile up.
    return array.block_until_ready()


def _read_block(
    row: tuple[Piece, ...],
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    dtype: jnp.dtype,
    source: TensorSource,
    report: Callable[[str, int], None],
) -> np.ndarray:
    """One block of a parameter, filled from the ranges of rows of its pieces in chunks."""
    (first, stop, _), *others = (s.indices(size) for s, size in zip(index, shape, strict=True))
    out = _aligned_empty((stop - first, *(high - low for low, high, _ in others)), dtype)
    offset = 0  # row of the parameter at which the piece starts
    for piece in row:
        low, high = max(first, offset), min(stop, offset + piece.rows)
        if piece.tensor == ZEROS:
            out[max(low - first, 0) : max(high - first, 0)] = 0
            continue  # padding comes last
        stored = source.dtype(piece.tensor)
        step = max(1, _CHUNK_BYTES // max(1, math.prod(shape[1:]) * stored.itemsize))
        for start in range(low, high, step):
            end = min(start + step, high)
            skipped = piece.start - offset
            values = source.read(piece.tensor, (slice(start + skipped, end + skipped), *index[1:]))
            out[start - first : end - first] = _cast(values, dtype, piece.tensor)
            report(piece.tensor, values.nbytes)
        offset += piece.rows
    return out


def _put(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A host array on its devices, of which some may be other processes'."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _bytes_to_read(
    flat: Mapping[Any, Any],
    paths: Mapping[Any, str],
    table: Table,
    source: TensorSource,
    where: Sharding,
) -> int:
    """Bytes of the file that this process's devices need, each block once: what `report` will have been told in the end."""
    total = 0
    for key, variable in flat.items():
        path, shape = paths[key], tuple(variable.shape)
        if path not in table:
            continue
        place = where(variable.get_metadata("axes")) if callable(where) else where
        blocks = {
            tuple(s.indices(size)[:2] for s, size in zip(index or (), shape, strict=True))
            for index in place.addressable_devices_indices_map(shape).values()
        }
        for (first, stop), *others in blocks:
            columns, offset = math.prod(high - low for low, high in others), 0
            for piece in table[path]:
                rows = min(stop, offset + piece.rows) - max(first, offset)
                if piece.tensor != ZEROS and rows > 0:
                    total += rows * columns * source.dtype(piece.tensor).itemsize
                offset += piece.rows
    return total


def _aligned_empty(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + size].view(dtype).reshape(shape)


def _cast(values: np.ndarray, dtype: jnp.dtype, name: str) -> np.ndarray:
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    if dtype == np.float16 and (np.isinf(cast) & ~np.isinf(values)).any():
        largest = float(np.abs(values[np.isfinite(values)].astype(np.float32)).max())
        raise CheckpointError(f"{name} has values up to {largest:g}, beyond float16; use dtype='bfloat16' or 'float32'")
    return cast
