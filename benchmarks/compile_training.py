"""Compiles a training step for TPUs that are not there: memory a device, for a Llama of 8B by default.

    python benchmarks/compile_training.py --topology v5p:2x2x2 --data 4 --model 2 --layers 32

Needs libtpu. Weights are shapes only. Prints one line of JSON.
"""

import argparse
import json
import os
import time

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle_jax.models import Llama, LlamaConfig, make_head
from eagle_jax.training.batch import PackedBatch
from eagle_jax.training.config import HeadConfig
from eagle_jax.training.head import HeadTemplate, split_head
from eagle_jax.training.losses import LossConfig
from eagle_jax.training.optimizers import OptimizerConfig, make_optimizer
from eagle_jax.training.sharding import TrainingMesh
from eagle_jax.training.step import Frozen, StepConfig, TrainState, make_programs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--data", type=int, default=4)
    parser.add_argument("--model", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8, help="of a batch")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    devices = topologies.get_topology_desc(options.topology, "tpu").devices
    mesh = Mesh(
        np.array(devices[: options.data * options.model]).reshape(options.data, options.model), ("data", "model")
    )
    placement = TrainingMesh(mesh)
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=options.layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192,
    )  # fmt: skip
    draft = HeadConfig(
        method="eagle3.1", draft_vocab_size=32000, capture_layers=(1, options.layers // 2, options.layers - 1)
    ).build(config)
    graph, weights = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))

    def shape(x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed = [
        (path, v.replace(shape(v.get_value(), placement.sharding(v.get_metadata("axes"), v.get_value().shape))))
        for path, v in nnx.to_flat_state(weights)
    ]
    whole = NamedSharding(mesh, PartitionSpec())
    frozen = Frozen(nnx.from_flat_state(placed), jax.ShapeDtypeStruct((32000,), jnp.int32, sharding=whole))
    optimizer = make_optimizer(OptimizerConfig(), 1000)

    def start() -> TrainState:
        parameters, _ = split_head(make_head(draft, dtype=jnp.float32, rngs=nnx.Rngs(0)))
        return TrainState(parameters=parameters, optimizer=optimizer.init(parameters), step=jnp.zeros((), jnp.int32))

    state = jax.eval_shape(start)
    state = jax.tree.map(shape, state, placement.tree(state))
    by_rows = NamedSharding(mesh, PartitionSpec("data", None))
    rows = {
        name: jax.ShapeDtypeStruct(
            (options.rows, options.length), bool if name == "assistant" else jnp.int32, sharding=by_rows
        )
        for name in ("tokens", "segments", "positions", "assistant")
    }
    step = StepConfig(
        steps=options.steps, loss=LossConfig(kind="lk_hybrid"), compute_dtype="bfloat16", loss_chunk=4096, remat=True
    )
    programs = make_programs(graph, HeadTemplate(draft), step, optimizer, seed=0, mesh=placement)
    begun = time.perf_counter()
    compiled = programs.train.lower(state, frozen, PackedBatch(**rows)).compile()
    memory = compiled.memory_analysis()
    gib = 2**30
    print(json.dumps(vars(options) | {
        "seconds": time.perf_counter() - begun, "arguments_gib": memory.argument_size_in_bytes / gib,
        "temporaries_gib": memory.temp_size_in_bytes / gib, "aliased_gib": memory.alias_size_in_bytes / gib,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
