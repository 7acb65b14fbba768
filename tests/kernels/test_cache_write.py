"""The write of rows into caches: plain XLA against loops, the Hopper kernel's program against both, and the kernel on a GPU.

`pytest tests/kernels/test_cache_write.py -k gpu` runs what needs an NVIDIA GPU.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import threads

from pallas_kernels import primitive
from pallas_kernels.backends import Device
from pallas_kernels.cache_write import backends, chosen_backend, mosaic_gpu, write_rows
from pallas_kernels.cache_write.mosaic_gpu import mosaic_gpu_write_rows
from pallas_kernels.cache_write.reference import Part

HOPPER = Device("cuda", "NVIDIA H200", "9.0")
CAPACITY = 24
Shape = tuple[int, int, int, int, int | None, int]
"""Buffers, B, Hkv, T, A (None: no path) and Dh."""


def make(shape: Shape, dtype: Any = np.float32, *, capacity: int = CAPACITY, where: str = "any", seed: int = 0) -> Any:
    """Buffers, rows, path and start; `where` says which starts: "first", "last", "any", or "beyond" with rows beyond too."""
    count, batch, heads, tokens, steps, head_dim = shape
    rng = np.random.default_rng(seed)

    def normal(length: int) -> list[np.ndarray]:
        shape = (batch, heads, length, head_dim)
        return [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for _ in range(count)]

    path = None if steps is None else rng.integers(0, tokens, (batch, steps)).astype(np.int32)
    last = capacity - (tokens if steps is None else steps)
    starts = {"first": np.zeros(batch), "last": np.full(batch, last), "any": rng.integers(0, last + 1, batch)}
    start = starts.get(where)
    if start is None:  # "beyond": what is to be clipped
        start = np.resize([-3, capacity, 1], batch)
        if path is not None:
            path[:, ::2] = np.resize([-2, tokens + 5], path[:, ::2].shape)
    return normal(capacity), normal(tokens), path, start.astype(np.int32)


def loops(buffers: Any, rows: Any, path: Any, start: Any) -> list[np.ndarray]:
    """What is wanted, row by row."""
    wanted = [buffer.copy() for buffer in buffers]
    for buffer, new in zip(wanted, rows, strict=True):
        steps = new.shape[2] if path is None else path.shape[1]
        for slot, first in enumerate(np.clip(start, 0, buffer.shape[2] - steps)):
            for step in range(steps):
                row = step if path is None else np.clip(path[slot, step], 0, new.shape[2] - 1)
                buffer[slot, :, first + step] = new[slot, :, row]
    return wanted


def in_pairs(rows: list[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """An array of 19 rows more for each two buffers, where other rows are NaN; each buffer's array, and where its rows begin."""
    arrays, first = [], []
    for i in range(0, len(rows), 2):
        pair = rows[i : i + 2]
        batch, heads, tokens, head_dim = pair[0].shape
        array = np.full((batch, heads, 19 + 2 * tokens, head_dim), np.nan, pair[0].dtype)
        for begin, part in zip((8, 11 + tokens), pair, strict=False):
            array[:, :, begin : begin + tokens] = part
            arrays.append(array)
            first.append(begin)
    return arrays, first


def assert_equal(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("where", ["first", "last", "any", "beyond"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("tokens", "steps"), [(7, 4), (1, 1), (5, None), (3, 6)])
def test_xla_against_loops(batch: int, tokens: int, steps: int | None, where: str) -> None:
    arrays = make((3, batch, 2, tokens, steps, 8), where=where)
    wanted = loops(*arrays)
    assert_equal(jax.jit(write_rows)(*arrays), wanted)
    with jax.disable_jit():
        assert_equal(write_rows(*arrays), wanted)


def test_a_path_without_repetitions() -> None:
    buffers, rows, _, start = make((2, 3, 2, 9, 4, 8))
    path = np.stack([np.random.default_rng(slot).permutation(9)[:4] for slot in range(3)]).astype(np.int32)
    assert_equal(jax.jit(write_rows)(buffers, rows, path, start), loops(buffers, rows, path, start))


def test_rows_are_cast_and_shapes_may_differ() -> None:
    one, other = make((1, 2, 2, 4, 3, 8), jnp.bfloat16), make((1, 2, 5, 4, 3, 16), np.float32, capacity=40)
    rows = [one[1][0].astype(np.float32), other[1][0]]
    found = jax.jit(write_rows)([one[0][0], other[0][0]], rows, one[2], one[3])
    wanted = [loops(x[0], x[1], one[2], one[3])[0] for x in (one, other)]
    assert [x.dtype for x in found] == [jnp.bfloat16, jnp.float32]
    assert_equal(found, wanted)


@pytest.mark.parametrize(("tokens", "steps"), [(7, 4), (1, 1), (5, None), (3, 6)])
def test_rows_that_lie_in_arrays_of_several_buffers(tokens: int, steps: int | None) -> None:
    buffers, rows, path, start = make((4, 3, 2, tokens, steps, 8), where="beyond")
    arrays, first = in_pairs(rows)
    write = functools.partial(write_rows, first=first, tokens=tokens)
    wanted = loops(buffers, rows, path, start)
    assert_equal(jax.jit(write)(buffers, arrays, path, start), wanted)
    with jax.disable_jit():
        assert_equal(write(buffers, arrays, path, start), wanted)
    longer = [np.concatenate([x, 2 * x], axis=2) for x in rows]
    assert_equal(write_rows(buffers, longer, path, start, tokens=tokens), wanted)
    second = write_rows(buffers, longer, path, start, first=[tokens] * 4)
    assert_equal(second, loops(buffers, [2 * x for x in rows], path, start))


def test_mapped_and_differentiated() -> None:
    buffers, rows, path, start = make((2, 2, 2, 4, 3, 8))
    mapped = jax.vmap(write_rows, in_axes=([None, None], [0, 0], None, None))
    doubled = [np.stack([x, 2 * x]) for x in rows]
    found = mapped([jnp.asarray(x) for x in buffers], doubled, path, start)
    for i, factor in enumerate((1, 2)):
        assert_equal([x[i] for x in found], loops(buffers, [factor * x for x in rows], path, start))
    value = jax.grad(lambda x: write_rows(buffers, x, path, start)[1].sum())(rows)
    counts = np.zeros((2, 4))
    for slot in range(2):
        np.add.at(counts[slot], path[slot], 1)
    assert_equal(value, [0 * rows[0], np.broadcast_to(counts[:, None, :, None], rows[1].shape)])


def test_one_slot_is_one_update_in_place() -> None:
    arrays = make((1, 1, 2, 4, 3, 8))
    text = jax.jit(write_rows).lower(*arrays).as_text()
    assert "dynamic_update_slice" in text
    assert "scatter" not in text


def test_what_does_not_fit_is_said() -> None:
    buffers, rows, path, start = make((2, 2, 2, 4, 3, 8))
    with pytest.raises(ValueError, match="2 buffers need as many arrays of rows, and there are 1"):
        write_rows(buffers, rows[:1], path, start)
    with pytest.raises(ValueError, match=r"path \(1, 3\) must be \[B, A\] with B = 2"):
        write_rows(buffers, rows, path[:1], start)
    with pytest.raises(ValueError, match=r"its rows \(2, 2, 4, 7\)"):
        write_rows(buffers, [x[..., :7] for x in rows], path, start)
    with pytest.raises(
        ValueError, match=r"rows \(2, 2, 3, 8\) of a buffer must hold tokens = 4 rows from first = 0 on"
    ):
        write_rows(buffers, [rows[0], rows[1][:, :, :3]], path, start)
    with pytest.raises(ValueError, match=r"rows \(2, 2, 4, 8\) of a buffer must hold tokens = 5 rows from first = 0"):
        write_rows(buffers, rows, path, start, tokens=5)
    with pytest.raises(ValueError, match=r"must hold tokens = -1 rows from first = 0 on"):
        write_rows(buffers, rows, path, start, tokens=-1)
    with pytest.raises(ValueError, match=r"must hold tokens = 3 rows from first = 2 on"):
        write_rows(buffers, rows, path, start, first=[1, 2])
    with pytest.raises(ValueError, match=r"must hold tokens = 3 rows from first = 2 on"):
        write_rows(buffers, rows, path, start, first=[1, 2], tokens=3)
    with pytest.raises(ValueError, match=r"must hold tokens = 3 rows from first = -1 on"):
        write_rows(buffers, rows, path, start, first=[1, -1], tokens=3)
    with pytest.raises(ValueError, match=r"first must have an entry for each of 2 buffers, and is \[0\]"):
        write_rows(buffers, rows, path, start, first=[0], tokens=3)
    with pytest.raises(ValueError, match="3 rows do not fit"):
        write_rows([x[:, :, :2] for x in buffers], rows, path, start)
    with pytest.raises(ValueError, match="implementation='cuda' is unknown"):
        write_rows(buffers, rows, path, start, implementation="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"start must be integers \[B\], and is float32 \(2,\)"):
        write_rows(buffers, rows, path, start.astype(np.float32))
    with pytest.raises(ValueError, match=r"start must be integers \[B\], and is int32 \(\)"):
        write_rows(buffers, rows, path, start[0])
    with pytest.raises(ValueError, match=r"path must be integers \[B, A\], and is int32 \(3,\)"):
        write_rows(buffers, rows, path[0], start)
    with pytest.raises(ValueError, match=r"they are \(2, 2, 24\), \(2, 2, 4, 8\)"):
        write_rows([x[..., 0] for x in buffers], rows, path, start)
    assert write_rows([], [], path, start) == []


def test_the_platform_decides() -> None:
    arrays = make((2, 2, 2, 4, 3, 8), jnp.bfloat16)
    assert chosen_backend(HOPPER, *arrays).name == "mosaic_gpu"
    assert chosen_backend(jax.devices()[0], *arrays).name == "xla"
    other = chosen_backend(Device("cuda", "Tesla T4", "7.5"), *arrays)
    assert (other.name, list(other.refusals)) == ("xla", ["mosaic_gpu"])
    odd = chosen_backend(HOPPER, *make((2, 2, 2, 4, 3, 12), jnp.bfloat16))
    assert odd.name == "xla"
    assert "pieces of 16 bytes, and a row of head_dim 12 in bfloat16 has 24" in odd.refusals["mosaic_gpu"]
    with pytest.raises(NotImplementedError, match="on cpu: mosaic_gpu: it runs on NVIDIA GPUs"):
        jax.jit(functools.partial(write_rows, implementation="mosaic_gpu"))(*arrays)
    with pytest.raises(NotImplementedError, match="on cpu: mosaic_gpu: it runs on NVIDIA GPUs"):
        write_rows(*arrays, implementation="mosaic_gpu")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 2, 3, 5, 4, 80),
        (5, 1, 8, 9, 8, 128),
        (2, 3, 2, 4, None, 64),
        (3, 1, 3, 1, 1, 64),
        (7, 2, 8, 7, 3, 256),
        (6, 2, 4, 5, 3, 64),
        (4, 1, 2, 3, None, 80),
        (1, 2, 1, 6, 2, 96),
    ],
    ids=str,
)
def test_the_kernels_threads_on_the_cpu(monkeypatch: pytest.MonkeyPatch, shape: Shape, dtype: Any) -> None:
    for where in ("last", "any", "beyond"):
        buffers, rows, path, start = make(shape, dtype, where=where)
        wanted = loops(buffers, rows, path, start)
        arrays, first = in_pairs(rows) if shape[0] % 2 == 0 else (rows, [0] * len(rows))
        write = functools.partial(mosaic_gpu_write_rows, part=Part(tuple(first), shape[3]))
        with monkeypatch.context() as patch:
            (module,) = threads.modules_of(patch, write, buffers, arrays, path, start)
        threads.run(module, [start, *([] if path is None else [path]), *arrays, *buffers])
        assert_equal(buffers, wanted)


def test_a_version_of_jax_without_what_the_kernel_needs_takes_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    backends._prepared.cache_clear()
    monkeypatch.delitem(sys.modules, "pallas_kernels.cache_write.mosaic_gpu")
    monkeypatch.delattr("jax.experimental.mosaic.gpu.utils.memref_ptr")
    choice = chosen_backend(HOPPER, *make((2, 2, 2, 4, 3, 8), jnp.bfloat16))
    backends._prepared.cache_clear()
    assert choice.name == "xla"
    assert "memref_ptr" in choice.refusals["mosaic_gpu"]


@pytest.mark.parametrize("shape", [(64, 1, 8, 60, 8, 128), (60, 1, 3, 4, 4, 64), (150, 5, 8, 1, None, 192)], ids=str)
def test_many_buffers_lower_and_are_updated_in_place(shape: Shape) -> None:
    count, batch, heads, tokens, steps, head_dim = shape
    struct = jax.ShapeDtypeStruct
    buffers = [struct((batch, heads, 2048, head_dim), jnp.bfloat16)] * count
    rows = [struct((batch, heads, tokens, head_dim), jnp.bfloat16)] * count
    path = None if steps is None else struct((batch, steps), jnp.int32)
    write = functools.partial(mosaic_gpu_write_rows, part=Part((0,) * count, tokens))
    traced = jax.jit(write, donate_argnums=0).trace(buffers, rows, path, struct((batch,), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == -(-count // mosaic_gpu.BUFFERS)
    assert text.count("#stablehlo.output_operand_alias<") == count
    assert text.count("tf.aliasing_output") == count
    assert "copy" not in text


@pytest.mark.parametrize("check_vma", [False, True])
def test_the_kernel_is_chosen_on_the_devices_of_a_mesh(monkeypatch: pytest.MonkeyPatch, check_vma: bool) -> None:
    monkeypatch.setattr(primitive, "Device", lambda platform: HOPPER)
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.P(None, "model"), jax.P()
    specs = (split, split, whole, whole)
    call = jax.shard_map(write_rows, mesh=mesh, in_specs=specs, out_specs=split, check_vma=check_vma)
    arrays = make((4, 1, 8, 6, 4, 128), jnp.bfloat16)
    traced = jax.jit(lambda *xs: jax.lax.fori_loop(0, 3, lambda i, held: call(held, *xs[1:]), xs[0])).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("#stablehlo.output_operand_alias<") == 4


@functools.cache
def gpu() -> jax.Device:
    """The first GPU of the Hopper kind, or the test is skipped."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("there is no GPU")
    if device.compute_capability != "9.0":
        pytest.skip("there is no Hopper GPU")
    return device


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("batch", [1, 5])
def test_gpu_kernel_against_xla(batch: int, head_dim: int, dtype: Any) -> None:
    device = gpu()
    for heads, tokens, steps in ((8, 60, 8), (3, 4, 4), (1, 1, 1), (2, 9, None)):
        arrays = make(
            (8, batch, heads, tokens, steps, head_dim), dtype, capacity=128, where="last" if steps == 4 else "any"
        )
        assert chosen_backend(device, *arrays).name == "mosaic_gpu"
        placed = jax.device_put(arrays, device)
        found = jax.jit(functools.partial(write_rows, implementation="mosaic_gpu"))(*placed)
        assert_equal(found, jax.jit(functools.partial(write_rows, implementation="xla"))(*placed))
        assert_equal(found, loops(*arrays))
        held, first = in_pairs(arrays[1])
        pairs = functools.partial(write_rows, first=first, tokens=tokens, implementation="mosaic_gpu")
        assert_equal(jax.jit(pairs)(placed[0], jax.device_put(held, device), *placed[2:]), found)


@pytest.mark.parametrize("batch", [1, 5])
def test_gpu_kernel_in_a_loop_with_donated_buffers(batch: int) -> None:
    device = gpu()
    buffers, rows, path, _ = make((8, batch, 8, 60, 8, 128), jnp.bfloat16, capacity=128)
    wanted = buffers
    for step in range(10):
        wanted = loops(
            wanted, [(x.astype(np.float32) + step).astype(x.dtype) for x in rows], path, np.full(batch, 3 * step)
        )

    def steps(buffers: list[jax.Array], rows: list[jax.Array], path: jax.Array) -> list[jax.Array]:
        def one(carry: Any) -> Any:
            step, held = carry
            new = [(x.astype(jnp.float32) + step).astype(x.dtype) for x in rows]
            return step + 1, write_rows(held, new, path, jnp.full(batch, 3 * step), implementation="mosaic_gpu")

        return jax.lax.while_loop(lambda carry: carry[0] < 10, one, (jnp.int32(0), buffers))[1]

    placed = jax.device_put((buffers, rows, path), device)
    found = jax.jit(steps, donate_argnums=0)(*placed)
    assert all(x.is_deleted() for x in placed[0])
    assert_equal(found, wanted)
