"""Placing parameters: shards read only what they need, and host memory stays at about one parameter."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from checkpoint_files import assert_same_parameters, hugging_face_llama
from jax.sharding import NamedSharding, PartitionSpec

from eagle_jax.loading import load_target
from eagle_jax.loading.placement import fill
from eagle_jax.loading.target import plan_target
from eagle_jax.models import Llama


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    hugging_face_llama(num_hidden_layers=1, vocab_size=96).save_pretrained(folder)
    return folder


def test_sharded_parameters_equal_unsharded_ones(saved):
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])

    def place(path, shape):
        assert shape
        row_parallel = path.endswith(("attention.out.weight", "mlp.down.weight"))
        axes = (None, "model") if row_parallel else ("model",)
        return NamedSharding(mesh, PartitionSpec(*axes) if len(shape) == 2 else PartitionSpec())

    read = []
    target = load_target(saved, sharding=place, progress=lambda name, done, total: read.append((done, total)))
    assert_same_parameters(target.model, load_target(saved).model)
    down = target.model.layers[0].mlp.down.weight[...]
    assert {shard.data.shape for shard in down.addressable_shards} == {(32, 32)}
    assert read[-1][0] == read[-1][1]  # every byte once, though two devices hold each block


def test_replicated_parameters_are_read_once(saved):
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    read = []
    sharding = NamedSharding(mesh, PartitionSpec())
    target = load_target(saved, sharding=sharding, progress=lambda name, done, total: read.append((done, total)))
    assert read[-1][0] == read[-1][1]
    assert len(target.model.norm.weight[...].sharding.device_set) == 4


def test_a_table_that_misses_a_parameter_is_an_error(saved):
    from flax import nnx

    plan = plan_target(saved)
    table = {path: row for path, row in plan.table.items() if path != "norm.weight"}
    with pytest.raises(ValueError, match=r"disagree about parameters \['norm.weight'\]"):
        fill(lambda: Llama(plan.config, dtype=np.dtype("float32"), rngs=nnx.Rngs(0)), table, plan.source, np.float32)


# A 300 MB checkpoint in two shards, made of holes in a file. Prints by how much peak resident memory grows while it loads, in
# bytes.
MEMORY = """
import json, resource, struct, sys
from pathlib import Path
import jax.numpy as jnp
from eagle_jax.loading import load_target
from eagle_jax.loading.tables import llama_table
from eagle_jax.models import LlamaConfig
folder = Path(sys.argv[1])
config = dict(vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=5, num_attention_heads=16)
config["model_type"] = "llama"
(folder / "config.json").write_text(json.dumps(config))
pieces = [piece for row in llama_table(LlamaConfig.from_dict(config)).values() for piece in row]
weight_map, total, largest = {}, 0, 0
for k, part in enumerate((pieces[::2], pieces[1::2])):
    header, at = {}, 0
    for piece in part:
        size = 2
        for n in piece.shape:
            size *= n
        header[piece.tensor] = {"dtype": "BF16", "shape": piece.shape, "data_offsets": [at, at + size]}
        at, largest, total = at + size, max(largest, size), total + size
        weight_map[piece.tensor] = f"shard{k}.safetensors"
    text = json.dumps(header).encode()
    with open(folder / f"shard{k}.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
(folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
jnp.zeros(()).block_until_ready()
unit = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
target = load_target(folder, dtype="bfloat16")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
print(json.dumps(dict(growth=after - before, total=total, largest=largest)))
"""


def test_peak_memory_of_a_sharded_load(tmp_path):
    pytest.importorskip("resource")
    import json

    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["total"] > 290e6
    # The arrays themselves live in host memory on CPU. A load of the whole file first would need 300 MB more.
    assert figures["growth"] < figures["total"] + 1.3 * figures["largest"] + 60e6
    print(figures)
