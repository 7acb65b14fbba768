"""Compiles whole rounds for TPUs that are not there: `python -m support.compile_for_tpu v5e,v5p 1B 4 2 2000 chain tree`.

The arguments: generations, width of the model, layers, slots, longest sequence, trees.

Runs in a process of its own, because libtpu reads its environment when it is loaded. Prints one line of JSON a round.
"""

import json
import os
import sys
import time

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from eagle_jax.decoding.adaptive import AdaptiveSpeculation
from eagle_jax.decoding.loop import decode, init_state
from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafters.registry import DrafterSpec
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.models import DraftConfig, Eagle3Head, Llama, LlamaConfig
from support.tiny import abstract_state, place

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x2", "v6e": "v6e:1x1x1", "tpu7x": "tpu7x:2x2x1"}
TREES = {"chain": TreeConfig.chain(4), "tree": TreeConfig(total_tokens=60, depth=7, top_k=10)}
TREES["adaptive"] = AdaptiveSpeculation((None, TREES["chain"], TREES["tree"]))

# Llama 3.2 1B and Llama 3.1 8B. A few layers take a small vocabulary: the same program, but half the time to compile.
WIDTHS = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def lower_round(
    device: jax.Device,
    shape: str,
    layers: int,
    tree: TreeConfig | AdaptiveSpeculation | None,
    slots: int,
    max_length: int,
) -> tuple[jax.stages.Lowered, Weights, DecodeState]:
    """Rounds of a model in bfloat16, lowered; shapes of its weights and state."""
    width = WIDTHS[shape]
    vocabulary, reduced = (128256, 32000) if layers > 4 else (8192, 4096)
    target = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=layers, max_position_embeddings=131072, **width)
    head = DraftConfig(
        method="eagle3", target_hidden_size=width["hidden_size"], vocab_size=vocabulary, draft_vocab_size=reduced,
        capture_layers=(1, layers // 2, layers - 1), **width,
    )  # fmt: skip
    target_def, target_state = abstract_state(Llama, target, jnp.bfloat16)
    head_def, head_state = (None, None) if tree is None else abstract_state(Eagle3Head, head, jnp.bfloat16)
    plan = Plan(
        target_def=target_def,
        drafter=None if tree is None else DrafterSpec("eagle3", head_def),
        tree=tree,
        slots=slots,
        max_length=max_length,
        prefill_chunk=256,
    )
    sharding = SingleDeviceSharding(device)
    weights = Weights(target_state, head_state)
    state = jax.eval_shape(init_state, plan, weights)
    scalars = (
        jax.ShapeDtypeStruct((slots,), bool),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((), bool),
    )
    return decode.lower(plan, *place((weights, state, *scalars), sharding)), weights, state


def compile_round(
    device: jax.Device, shape: str, layers: int, tree: TreeConfig | AdaptiveSpeculation, slots: int, max_length: int
) -> dict[str, float]:
    """Compiles rounds; sizes in bytes, seconds."""
    lowered, weights, state = lower_round(device, shape, layers, tree, slots, max_length)
    start = time.perf_counter()
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    return {
        "seconds": time.perf_counter() - start,
        "arguments": memory.argument_size_in_bytes,
        # Of the program before compilation, where equal layers share a function; libtpu cannot print every compiled one.
        "kernels": lowered.as_text().count("@tpu_custom_call"),
        "fallbacks": lowered.as_text().count("func.func private @xla_blocked_tree_attention"),
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "cache": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.target_cache, state.draft))),
        "weights": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights)),
    }


def main() -> None:
    generations, shape, layers, slots, max_length, *trees = sys.argv[1:]
    # Tracing is the same for all of them, and done once.
    for generation in generations.split(","):
        device = topologies.get_topology_desc(TOPOLOGIES[generation], "tpu").devices[0]
        for tree in trees:
            result = compile_round(device, shape, int(layers), TREES[tree], int(slots), int(max_length))
            line = {"generation": generation, "kind": device.device_kind, "shape": shape, "tree": tree, **result}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
