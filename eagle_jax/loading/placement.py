"""From tensors in files to device arrays in a module, by a table: each parameter is a stack of file tensors along axis 0.

A row of the table may later list pieces of tensors in another order (q, k and v of one shard after another), because arrays are
filled by ranges of rows; nothing here knows what the rows mean.
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

Module = TypeVar("Module", bound=nnx.Module)
Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
"""One sharding for all parameters, or a function of a parameter's path ("layers.0.mlp.down.weight") and shape."""

_CHUNK_BYTES = 32 << 20  # a cast needs a second copy of what it casts: of one chunk, not of a tensor
_ALIGNMENT = 64  # bytes; from there XLA's CPU backend takes a host array as it is, without a copy
_FLOATS = {np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A file tensor that is part of a parameter, and the shape it must have."""

    tensor: str
    shape: tuple[int, ...]


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


def match_tensors(table: Table, source: TensorSource, known_unused: Iterable[str] = ()) -> Match:
    """Compares a checkpoint with the table that is to be filled from it; reads no tensor.

    Args:
      table: the parameters.
      source: the checkpoint.
      known_unused: names of tensors that need not be read, though they are there.
    """
    present, known = set(source.names()), set(known_unused)
    pieces = {piece.tensor: piece for row in table.values() for piece in row}
    missing = tuple(piece for piece in pieces.values() if piece.tensor not in present)
    unexpected = tuple(name for name in source.names() if name not in pieces and name not in known)
    problems = [f"missing: {source.stored_name(piece.tensor)} of shape {piece.shape}" for piece in missing]
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
    constants: Mapping[str, np.ndarray] | None = None,
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
      constants: values by path of variables that are no file tensor, kept in their dtype.
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
    total = sum(math.prod(p.shape) * source.dtype(p.tensor).itemsize for row in table.values() for p in row)
    filled = {}
    with reporter(progress, total) as report:
        for key, variable in flat.items():
            path, shape = paths[key], tuple(variable.shape)
            place = where(path, shape) if callable(where) else where
            if path in constants:
                array = jax.device_put(constants[path], place)
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
    stacked = (sum(piece.shape[0] for piece in row), *row[0].shape[1:])
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
        low, high = max(first, offset), min(stop, offset + piece.shape[0])
        stored = source.dtype(piece.tensor)
        step = max(1, _CHUNK_BYTES // max(1, math.prod(shape[1:]) * stored.itemsize))
        for start in range(low, high, step):
            end = min(start + step, high)
            values = source.read(piece.tensor, (slice(start - offset, end - offset), *index[1:]))
            out[start - first : end - first] = _cast(values, dtype, piece.tensor)
            report(piece.tensor, values.nbytes)
        offset += piece.shape[0]
    return out


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
