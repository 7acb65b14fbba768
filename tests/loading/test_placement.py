"""Placing parameters: shards read only what they need, and host memory stays at about one parameter."""

import json
import subprocess
import sys
from pathlib import Path

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

    def place(axes):
        split = (None, "model") if axes[-1] in ("heads", "mlp") else ("model",)
        return NamedSharding(mesh, PartitionSpec(*split) if len(axes) == 2 else PartitionSpec())

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


# A checkpoint in two shards of bfloat16, made of holes in a file, with the configuration of the second argument, loaded in the
# dtype of the third. Prints by how much peak resident memory grows while it loads, and what the process reads, in bytes.
MEMORY = """
import json, struct, sys
from pathlib import Path
import jax.numpy as jnp
from eagle_jax.loading import load_target
from eagle_jax.loading.tables import llama_table
from eagle_jax.models import LlamaConfig
folder, config, dtype = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
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

def measure():
    # Not getrusage: what it calls the peak of a new process starts at the size of the process that started it.
    (peak,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(peak) * 1024, int(Path("/proc/self/io").read_text().split()[1])

(peak, read), target = measure(), load_target(folder, dtype=dtype)
(new_peak, all_read), arrays = measure(), total * jnp.dtype(dtype).itemsize // 2
print(json.dumps(dict(growth=new_peak - peak, arrays=arrays, largest=largest, file=total, read=all_read - read)))
"""
SMALL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
}


def measure(folder, config, dtype):
    if not Path("/proc/self/io").exists():
        pytest.skip("peak memory and reads are taken from Linux's /proc")
    command = [sys.executable, "-c", MEMORY, str(folder), json.dumps(config), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    print(figures)
    # Each byte of the file once, and a little for headers and modules.
    assert figures["file"] <= figures["read"] < 1.02 * figures["file"] + 4e6
    assert figures["growth"] > 0.9 * figures["arrays"], "the measure misses the arrays themselves"
    return figures


def test_peak_memory_of_a_sharded_load(tmp_path):
    figures = measure(tmp_path, SMALL, "bfloat16")
    assert figures["file"] > 290e6
    # The arrays themselves live in host memory on CPU. A load of the whole file first would need 300 MB more, a copy of each
    # parameter on its way 65 MB.
    assert figures["growth"] < figures["arrays"] + 60e6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_of_two_gigabytes(tmp_path, dtype):
    width = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
    figures = measure(tmp_path, {"model_type": "llama", **width, **heads}, dtype)
    assert figures["file"] > 1.9e9
    assert figures["growth"] < figures["arrays"] + 1.3 * figures["largest"] + 300e6
