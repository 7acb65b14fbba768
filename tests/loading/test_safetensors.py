"""The safetensors reader: values, slices, and files that are not what they say."""

import json
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eagle_jax.loading.containers import ShardedSource, open_source
from eagle_jax.loading.errors import CheckpointError
from eagle_jax.loading.safetensors import SafetensorsSource

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def as_numpy(tensor):
    dtype = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."), None) or str(tensor.dtype).removeprefix(
        "torch."
    )
    return tensor.contiguous().view(torch.uint8).numpy().view(dtype).reshape(tensor.shape)


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_bit_equal_in_every_dtype(tmp_path, dtype):
    tensor = (torch.randn(5, 7) * 3).to(dtype)
    save_file({"pad": torch.ones(3, dtype=torch.uint8), "x": tensor}, tmp_path / "x.safetensors")
    source = SafetensorsSource(tmp_path / "x.safetensors")
    assert source.shape("x") == (5, 7)
    value = source.read("x")
    assert value.dtype == source.dtype("x")
    np.testing.assert_array_equal(value.view(np.uint8), as_numpy(tensor).view(np.uint8))


@pytest.mark.parametrize(
    "slices",
    [
        (),
        (slice(2, 5),),
        (slice(None), slice(1, 3)),
        (slice(1, 4), slice(0, 3), slice(2, 4)),
        (slice(3, 3),),
        (slice(None), slice(None), slice(4)),
    ],
    ids=str,
)
def test_slices_are_those_of_numpy(tmp_path, slices):
    tensor = torch.randn(6, 3, 4).to(torch.bfloat16)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    value = SafetensorsSource(tmp_path / "x.safetensors").read("x", slices)
    np.testing.assert_array_equal(value, as_numpy(tensor)[slices])
    assert value.flags.writeable  # memory of its own, not a view of the file


def test_scalars_and_empty_tensors_are_read(tmp_path):
    save_file({"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}, tmp_path / "x.safetensors")
    source = SafetensorsSource(tmp_path / "x.safetensors")
    assert source.read("scalar") == 2.5
    assert source.read("empty").shape == (0, 4)


def test_steps_are_refused(tmp_path):
    save_file({"x": torch.zeros(4)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="contiguous block of tensor x"):
        SafetensorsSource(tmp_path / "x.safetensors").read("x", (slice(0, 4, 2),))


def record(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": record([2], 0, 8)}, b"1234", "truncated or no safetensors file .73 bytes.: .*incomplete"),
        (
            {"x": record([2], 0, 8)},
            b"123456789",
            "truncated or no safetensors file .78 bytes.: .*not fully covered",
        ),
        (
            {"x": record([3], 0, 8)},
            b"12345678",
            "truncated or no safetensors file.* invalid shape, data type, or offset",
        ),
        ({"x": record([1], 4, 8)}, b"12345678", "truncated or no safetensors file.* invalid offset for tensor `x`"),
        ({"x": record([1], 0, 4), "y": record([1], 0, 4)}, b"1234", "truncated or no .* invalid offset for tensor"),
        ({"x": record([4], 0, 2, "F4")}, b"12", "dtype 'F4', which is not read"),
        ({"x": {"dtype": "F32"}}, b"", "truncated or no safetensors file.* missing field `shape`"),
        ({"x": record([-2], 0, 8)}, b"12345678", "truncated or no safetensors file.* invalid value: integer `-2`"),
        (b"{nonsense", b"", "truncated or no safetensors file.* invalid JSON in header"),
        (b"[1]", b"", "truncated or no safetensors file.* invalid JSON in header"),
        (
            b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "x": 1}',
            b"1234",
            "truncated or no safetensors file",
        ),
        (
            b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
            b'"x": {"dtype": "U32", "shape": [1], "data_offsets": [0, 4]}}',
            b"1234",
            "names x twice",
        ),
    ],
)
def test_broken_files_are_refused(tmp_path, header, data, message):
    with pytest.raises(CheckpointError, match=message):
        SafetensorsSource(write_raw(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("length", [10_000, 2**63])
def test_an_impossible_header_length_is_refused(tmp_path, length):
    with pytest.raises(CheckpointError, match=r"truncated or no safetensors file .10 bytes.: .*header"):
        SafetensorsSource(write_raw(tmp_path / "x.safetensors", b"{}", length=length))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("slices", [(slice(100, 200),), (slice(None), slice(0, 8))], ids=["rows", "columns"])
def test_a_part_of_a_file_is_read_without_the_rest(tmp_path, slices):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(64_000, 1024, dtype=torch.bfloat16)}, path)
    code = f"""
import resource
from pathlib import Path
from eagle_jax.loading.safetensors import SafetensorsSource
source = SafetensorsSource(Path({str(path)!r}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
block = source.read("x", {slices!r})
maps = Path("/proc/self/maps").read_text()
assert {path.name!r} not in maps, "the file stays mapped"
print(block.nbytes, before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    nbytes, before, after = map(int, out.split())
    if len(slices) == 1:
        assert (after - before) * 1024 < nbytes + (8 << 20)


def test_a_git_lfs_pointer_is_named(tmp_path):
    (tmp_path / "x.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        SafetensorsSource(tmp_path / "x.safetensors")


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"c": torch.full((2,), 2.0)}, tmp_path / "two.safetensors")

    def index(**changes):
        weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"} | changes
        weight_map = {name: file for name, file in weight_map.items() if file is not None}
        path = tmp_path / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": weight_map}))
        return path

    return index


def test_shards_are_one_source(sharded):
    source = ShardedSource(sharded(), SafetensorsSource)
    assert sorted(source.names()) == ["a", "b", "c"]
    assert source.read("c").tolist() == [2.0, 2.0]
    assert [file.name for file in source.files] == ["one.safetensors", "two.safetensors"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d": "three.safetensors"}, "shards that are not in .*: three.safetensors"),
        ({"d": "one.safetensors"}, r"their shard does not hold: d \(one.safetensors\)"),
        ({"a": "two.safetensors"}, r"their shard does not hold: a \(two.safetensors\)"),
        ({"b": None}, r"does not list: b \(one.safetensors\)"),
        ({"d": "../three.safetensors"}, "outside its folder: ../three.safetensors"),
    ],
)
def test_an_index_that_contradicts_its_shards_is_refused(sharded, changes, message):
    with pytest.raises(CheckpointError, match=message):
        ShardedSource(sharded(**changes), SafetensorsSource)


def test_a_tensor_in_two_shards_is_refused(sharded, tmp_path):
    save_file({"c": torch.zeros(2), "a": torch.zeros(2)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"more than one shard .*: a \(one.safetensors and two.safetensors\)"):
        ShardedSource(sharded(), SafetensorsSource)


def test_an_index_without_weight_map_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        open_source(tmp_path)


def test_folders_without_weights_say_what_is_missing(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"holds no weights: model.safetensors.* it holds notes.txt"):
        open_source(tmp_path)
    (tmp_path / "consolidated.00.pth").write_text("")
    with pytest.raises(CheckpointError, match="Meta's format"):
        open_source(tmp_path)
    (tmp_path / "consolidated.00.pth").unlink()
    (tmp_path / "consolidated.safetensors").write_text("")
    with pytest.raises(CheckpointError, match="Mistral's own format"):
        open_source(tmp_path)
    with pytest.raises(CheckpointError, match="give the folder"):
        open_source(tmp_path / "notes.txt")
