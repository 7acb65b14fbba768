"""Runs a Mosaic GPU kernel of straight-line code on the CPU: every operation of its MLIR for all threads at once, in numpy."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import core, launch_context
from jaxlib.mlir import ir

BASE = 1 << 40
"""Address of the first argument; each has as many bytes of its own."""

BINARY = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.divui": np.floor_divide,
    "arith.remui": np.remainder,
    "arith.remsi": np.fmod,
    "arith.minsi": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.andi": np.bitwise_and,
    "arith.shrui": np.right_shift,
    "llvm.add": np.add,
    "llvm.mul": np.multiply,
}
SAME = ("arith.extui", "arith.index_cast", "llvm.ptrtoint", "llvm.inttoptr", "builtin.unrealized_conversion_cast")
COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)


def modules_of(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The kernels of a function that is lowered for CUDA, in their order."""
    found: list[Any] = []
    lower = core._mosaic_gpu_lowering_rule

    def keep(context: Any, *operands: Any, module: Any, **rest: Any) -> Any:
        found.append(module)
        return lower(context, *operands, module=module, **rest)

    monkeypatch.setattr(core, "_mosaic_gpu_lowering_rule", keep)
    jax.jit(lambda *xs: function(*xs)).trace(*arguments).lower(lowering_platforms=("cuda",))
    return found


def run(module: Any, arguments: Sequence[np.ndarray]) -> None:
    """Runs the kernel on contiguous arrays, which it changes; raises IndexError for an address outside of them."""
    held = [array.reshape(-1).view(np.uint8) for array in arguments]

    def touch(address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Which argument each thread reaches, and at which of its bytes."""
        which, offset = address // BASE - 1, address % BASE
        for argument in np.unique(which):
            inside = offset[which == argument]
            if inside.max() + size > len(held[argument]) or (inside % size).any():
                raise IndexError(f"bytes {inside.min()}..{inside.max() + size} of argument {argument}, {size} each")
        return which, offset

    def load(address: np.ndarray, size: int) -> np.ndarray:
        which, offset = touch(address, size)
        return np.stack([held[w][o : o + size] for w, o in zip(which, offset, strict=True)])

    def store(value: np.ndarray, address: np.ndarray) -> None:
        which, offset = touch(address, value.shape[1])
        for bytes_, w, o in zip(value, which, offset, strict=True):
            held[w][o : o + len(bytes_)] = bytes_

    values: dict[Any, Any] = {}
    launch = None
    for function in module.body.operations:
        for op in (
            function.regions[0].blocks[0].operations if function.regions and len(function.regions[0].blocks) else ()
        ):
            if launch_context.KERNEL_ARG_ID_ATTR in op.attributes:
                index = ir.IntegerAttr(op.attributes[launch_context.KERNEL_ARG_ID_ATTR]).value
                values[op.results[0]] = np.int64(BASE) * (index + 1)
            elif op.operation.name == "arith.constant":
                values[op.results[0]] = np.int64(ir.IntegerAttr(op.attributes["value"]).value)
            elif op.operation.name == "gpu.launch":
                launch = op
    assert launch is not None
    sizes = [int(values[x]) for x in list(launch.operands)[1:7]]
    threads = np.indices((*sizes[2::-1], *sizes[:2:-1])).reshape(6, -1)  # block z, y, x, then thread z, y, x
    places = dict(
        zip(
            ("block_id z", "block_id y", "block_id x", "thread_id z", "thread_id y", "thread_id x"),
            threads,
            strict=True,
        )
    )
    ones = np.ones(threads.shape[1], np.int64)

    for op in launch.regions[0].blocks[0].operations:
        name, operands = op.operation.name, [values.get(x) for x in op.operands]
        result = None
        if name in BINARY:
            result = BINARY[name](*operands)
        elif name in SAME:
            result = operands[0]
        elif name in ("arith.constant", "llvm.mlir.constant"):
            result = ones * ir.IntegerAttr(op.attributes["value"]).value
        elif name in ("gpu.block_id", "gpu.thread_id"):
            axis = str(op).rsplit(" ", 1)[1]
            result = places[f"{name[4:]} {axis}"]
        elif name == "gpu.block_dim":
            result = ones * sizes[3 + "xyz".index(str(op).rsplit(" ", 1)[1])]
        elif name == "arith.cmpi":
            result = COMPARISONS[ir.IntegerAttr(op.attributes["predicate"]).value](*operands)
        elif name == "arith.select":
            result = np.where(*operands)
        elif name == "llvm.extractvalue":
            field = list(ir.DenseI64ArrayAttr(op.attributes["position"]))
            assert field in ([1], [2])  # the address of an array, and the offset in it
            result = ones * operands[0] if field == [1] else 0 * ones
        elif name == "llvm.getelementptr":
            size = size_of(ir.TypeAttr(op.attributes["elem_type"]).value)
            result = operands[0] + size * operands[1]
        elif name == "llvm.load":
            size = size_of(op.results[0].type)
            result = load(operands[0], size)
            result = result.view(np.int32)[:, 0].astype(np.int64) if size == 4 else result
        elif name == "llvm.store":
            store(*operands)
        else:  # what the frame of each kernel does: barriers, and the choice of one thread of several
            frame = name.startswith(("nvvm.", "memref.view", "gpu.")) or name == "llvm.inline_asm"
            inner = [x.operation.name for region in op.regions for block in region.blocks for x in block.operations]
            assert frame or (op.regions and set(inner) <= {"scf.yield"}), name
            result = ones
        if len(op.results):
            values[op.results[0]] = result


def size_of(kind: Any) -> int:
    """Bytes of a 32-bit number or of a vector of them."""
    text = str(kind)
    return 4 * (ir.VectorType(kind).shape[0] if text.startswith("vector") else 1)
