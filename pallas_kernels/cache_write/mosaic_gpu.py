"""The write of rows on Hopper GPUs: one Pallas Mosaic GPU kernel for the caches of many layers.

The rows are few (8 of 2 KB each in every buffer of an 8B model) and the buffers many, so what counts is the number of kernels. A
program instance ("block" in CUDA's words) serves one slot of one buffer, or a part of it if there are many rows. It picks the
addresses of its buffer among all of them and each thread copies pieces of 16 bytes: whole rows of several heads at once for any
head_dim, and neither a descriptor for the copy engine nor code of its own for each buffer. Pallas has no loads through a chosen
address; that much is written in MLIR.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from pallas_kernels.cache_write.reference import Part

_NEEDED = (
    utils.c,
    utils.memref_ptr,
    utils.getelementptr,
    plgpu.inline_mgpu,
    plgpu.RefType,
    plgpu.Mesh,
    jax.new_ref,
    jax.freeze,
    pl.kernel,
)
"""Named here so that a version of JAX without one of them is noticed when the module is imported, and plain XLA is taken."""
THREADS = 128
PIECE_BYTES = 16
"""The most that one instruction of a thread loads or stores."""
PIECES = 4
"""The most pieces of one thread: all are loaded before the first is stored."""
BUFFERS = 64
"""The most buffers of one kernel. A buffer and its rows take 16 bytes of a kernel's parameters, and 176 where JAX hands over
whole descriptions of arrays; there is room for 32764 bytes."""


def mosaic_gpu_write_rows(
    buffers: Sequence[jax.Array], rows: Sequence[jax.Array], path: jax.Array | None, start: jax.Array, *, part: Part
) -> list[jax.Array]:
    """See `pallas_kernels.cache_write.api.write_rows`.

    Raises:
      NotImplementedError: rows that are not whole pieces of 16 bytes, or of no bytes at all.
    """
    written = list(buffers)
    # Caches and rows of one shape go together, in kernels of about equal numbers of them.
    alike: dict[Any, list[int]] = {}
    for i, (buffer, new) in enumerate(zip(buffers, rows, strict=True)):
        check_supported(buffer, path, part.tokens)
        alike.setdefault((buffer.shape, buffer.dtype, new.shape), []).append(i)
    for members in alike.values():
        size = -(-len(members) // -(-len(members) // BUFFERS))
        for share in (members[at : at + size] for at in range(0, len(members), size)):
            of_share = Part(tuple(part.first[i] for i in share), part.tokens)
            done = _write([buffers[i] for i in share], [rows[i] for i in share], path, start, of_share)
            for i, buffer in zip(share, done, strict=True):
                written[i] = buffer
    return written


def check_supported(buffer: Any, path: Any, tokens: int) -> None:
    """Raises NotImplementedError, saying what is missing, unless the kernel takes these."""
    row_bytes = buffer.shape[3] * jnp.dtype(buffer.dtype).itemsize
    if row_bytes % PIECE_BYTES:
        raise NotImplementedError(
            f"mosaic_gpu copies pieces of {PIECE_BYTES} bytes, and a row of head_dim {buffer.shape[3]} in "
            f"{jnp.dtype(buffer.dtype).name} has {row_bytes}"
        )
    if not buffer.size or not tokens or (path is not None and not path.size):
        raise NotImplementedError("mosaic_gpu needs something to write")


def _write(
    buffers: list[jax.Array], rows: list[jax.Array], path: jax.Array | None, start: jax.Array, part: Part
) -> list[jax.Array]:
    """Writes into buffers of one shape and dtype with one kernel, from arrays of one shape."""
    count = len(buffers)
    batch, heads, capacity, head_dim = buffers[0].shape
    length, tokens = rows[0].shape[2], part.tokens
    steps = tokens if path is None else path.shape[1]
    row_pieces = head_dim * buffers[0].dtype.itemsize // PIECE_BYTES
    total = heads * steps * row_pieces  # of one slot of one buffer
    each = min(PIECES, -(-total // THREADS))
    parts = -(-total // (THREADS * each))
    indices = [start.astype(jnp.int32)] + ([] if path is None else [path.astype(jnp.int32)])

    def copy(context: Any, *refs: Any) -> None:
        """What each thread does, in MLIR: loads its pieces of new rows, and stores them."""
        del context
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        piece = ir.VectorType.get((PIECE_BYTES // 4,), i32)

        def number(value: int, kind: Any = i32) -> Any:
            return utils.c(value, kind)

        def split(value: Any, by: int) -> tuple[Any, Any]:
            """Quotient and remainder of numbers that are not negative."""
            if by == 1:
                return value, number(0)
            return arith.divui(value, number(by)), arith.remui(value, number(by))

        def clip(value: Any, largest: int) -> Any:
            return arith.minsi(arith.maxsi(value, number(0)), number(largest))

        def at(pointer: Any, index: Any, kind: Any) -> Any:
            return utils.getelementptr(pointer, [index], kind)

        def pick(values: Sequence[Any], index: Any) -> Any:
            """`values[index]` by halves."""
            if len(values) == 1:
                return values[0]
            half = len(values) // 2
            low, high = pick(values[:half], index), pick(values[half:], arith.subi(index, number(half)))
            return arith.select(arith.cmpi(arith.CmpIPredicate.slt, index, number(half)), low, high)

        def pointer_of(pointers: Sequence[Any], index: Any) -> Any:
            address = pick([llvm.ptrtoint(i64, pointer) for pointer in pointers], index)
            return llvm.inttoptr(pointers[0].type, address)

        pointers = [utils.memref_ptr(ref) for ref in refs]
        start_pointer, path_pointer = pointers[0], None if path is None else pointers[1]
        news, olds = pointers[len(indices) : -count], pointers[-count:]
        block = arith.index_cast(i32, gpu.block_id(gpu.Dimension.x))
        rest, share = split(block, parts)
        buffer, slot = split(rest, batch)
        source, target = pointer_of(news, buffer), pointer_of(olds, buffer)
        begin = pick([number(value) for value in part.first], buffer)
        first = clip(llvm.load(i32, at(start_pointer, slot, i32)), capacity - steps)
        thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))

        def place(head: Any, length: int, row: Any, column: Any) -> Any:
            """Index of a piece in an array `[B, Hkv, length, row_pieces]`, in 64 bits: caches may be larger than 2^31 bytes."""
            lane = arith.addi(arith.muli(slot, number(heads)), head)
            wide = [arith.extui(i64, value) for value in (lane, row, column)]
            index = arith.addi(arith.muli(wide[0], number(length, i64)), wide[1])
            return arith.addi(arith.muli(index, number(row_pieces, i64)), wide[2])

        moves = []
        for step in range(each):
            index = arith.addi(arith.muli(share, number(THREADS * each)), number(THREADS * step))
            index = arith.addi(index, thread)
            # Threads without a piece of their own copy the last one as well: the same bytes to the same place.
            index = arith.minsi(index, number(total - 1))
            rest, column = split(index, row_pieces)
            head, row = split(rest, steps)
            taken = row
            if path_pointer is not None:
                entry = arith.addi(arith.muli(slot, number(steps)), row)
                taken = clip(llvm.load(i32, at(path_pointer, entry, i32)), tokens - 1)
            taken = arith.addi(taken, begin)
            new = llvm.load(piece, at(source, place(head, length, taken, column), piece), alignment=PIECE_BYTES)
            moves.append((new, at(target, place(head, capacity, arith.addi(first, row), column), piece)))
        for new, address in moves:
            llvm.store(new, address, alignment=PIECE_BYTES)

    def body(*refs: Any) -> None:
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(copy)(*refs)

    mesh = plgpu.Mesh(grid=(count * batch * parts,), grid_names=("block",))
    # References are read and written in place: the call's results share their operands' memory.
    held = [jax.new_ref(buffer) for buffer in buffers]
    pl.kernel(body, mesh=mesh, compiler_params=plgpu.CompilerParams(), name="write_rows")(*indices, *rows, *held)
    return [jax.freeze(ref) for ref in held]
