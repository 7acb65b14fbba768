"""Compiles the TPU kernel of tree attention for TPUs that are not there: `python -m support.compile_kernels_for_tpu usual v5e`.

The arguments are generations, each behind its list: "usual", "two", "tight", "long", "largest", "shards" (four devices) or
"too_little_vmem". A process of its own, as in `compile_for_tpu`. Prints one line of JSON a kernel.
"""

import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_DEFAULT_MATMUL_PRECISION", None)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from kernels.matrix import Case

from pallas_kernels.tree_attention import chosen_backend, tree_attention
from pallas_kernels.tree_attention.mosaic_tpu import mosaic_tpu_tree_attention
from pallas_kernels.tree_attention.mosaic_tpu_tiles import choose_tiles
from support.compile_for_tpu import TOPOLOGIES

KERNEL = 'custom_call_target="tpu_custom_call"'


def case(dtype: str, head_dim: int, queries: int, batch: int, **others: Any) -> Case:
    settings = {"heads": (32, 8), "capacity": 8192, "tail": "tree", "windowed": False, "soft_cap": None} | others
    return Case(dtype=dtype, head_dim=head_dim, queries=queries, batch=batch, **settings)


USUAL = [
    case("bfloat16", 128, 60, 8),  # verification, 8B
    case("bfloat16", 128, 256, 1, tail="causal"),  # its prefill
    case("float32", 64, 60, 2, heads=(9, 3), capacity=2048),  # SmolLM2
    case("bfloat16", 80, 10, 3, tail="level", windowed=True, soft_cap=30.0, capacity=32768),
]

TIGHT = [  # what comes closest to the VMEM that it is given, as the long list showed
    case("bfloat16", 128, 1, 8, heads=(32, 32), tail="causal", capacity=1280),
    case("float32", 128, 256, 8, windowed=True, tail="causal", capacity=1280),
]


def long() -> list[Case]:
    """Every dtype, head_dim, number of queries and of slots; the other settings take turns."""
    heads = itertools.cycle([(32, 8), (32, 32), (9, 3), (16, 1), (28, 4)])
    tails = itertools.cycle(["tree", "causal", "level"])
    windows = itertools.cycle([False, True])
    caps = itertools.cycle([None, None, 30.0])
    settings = itertools.product(("bfloat16", "float32"), (64, 80, 96, 128, 192, 256), (1, 8, 60, 256, 512), (1, 8, 64))
    usual = [
        case(*setting, heads=next(heads), tail=next(tails), windowed=next(windows), soft_cap=next(caps), capacity=1280)
        for setting in settings
    ]
    # The longest list of blocks: it stands in SMEM.
    return [case("bfloat16", 128, 8, 64, heads=(8, 1), capacity=131072), *usual]


def shapes(case: Case, place: Any) -> dict[str, Any]:
    """Arguments of the call as shapes; `place` gives the sharding of one by its name."""
    heads, kv_heads = case.heads
    dtype = jnp.dtype(case.dtype)
    cache = (case.batch, kv_heads, case.capacity, case.head_dim)
    tail = (case.batch, kv_heads, case.tail_rows, case.head_dim)
    every: dict[str, tuple[Any, Any]] = {
        "queries": ((case.batch, case.queries, heads, case.head_dim), dtype),
        "cache_keys": (cache, dtype),
        "cache_values": (cache, dtype),
        "lengths": ((case.batch,), jnp.int32),
        "tail_keys": (tail, dtype),
        "tail_values": (tail, dtype),
    }
    if case.tail != "causal":
        every["tail_mask"] = ((case.batch, case.queries, case.tail_rows), jnp.bool_)
    if case.windowed:
        every["prefix_start"] = ((case.batch, case.queries), jnp.int32)
    return {name: jax.ShapeDtypeStruct(*entry, sharding=place(name)) for name, entry in every.items()}


def tiles_of(case: Case, kind: str) -> Any:
    heads, kv_heads = case.heads
    return choose_tiles(
        kind, queries=case.queries, group=heads // kv_heads, kv_heads=kv_heads, capacity=case.capacity,
        tail=case.tail_rows, head_dim=case.head_dim, dtype=case.dtype, tail_mask=case.tail != "causal",
        windows=case.windowed,
    )  # fmt: skip


def lower(case: Case, device: jax.Device) -> tuple[dict[str, Any], Any]:
    """The arguments as shapes, and the program."""
    arguments = shapes(case, lambda _: SingleDeviceSharding(device))
    return arguments, jax.jit(lambda x: tree_attention(**x, **case.options)).lower(arguments)


def temporary_bytes(lowered: Any) -> int:
    return lowered.compile().memory_analysis().temp_size_in_bytes


def cache_bytes(arguments: dict[str, Any]) -> int:
    return 2 * arguments["cache_keys"].size * arguments["cache_keys"].dtype.itemsize


def compile_case(case: Case, device: jax.Device) -> dict[str, Any]:
    """Through the api, as models call it."""
    start = time.process_time()
    arguments, lowered = lower(case, device)
    temporaries, cache = temporary_bytes(lowered), cache_bytes(arguments)
    copied = temporaries
    if temporaries > 0.1 * cache:
        # These may be queries and outputs, which XLA keeps here or in VMEM as it sees fit: little beside a cache that is
        # longer by a gigabyte, several times the VMEM, and fits into the smallest memory twice; or beside one far longer.
        times = max(2, min(16, 1 + 2**30 // cache))
        longer, lowered_longer = lower(dataclasses.replace(case, capacity=times * case.capacity), device)
        grown = max(0, temporary_bytes(lowered_longer) - temporaries)
        copied = round(grown * cache / (cache_bytes(longer) - cache))
    tiles = tiles_of(case, device.device_kind)
    return {
        "case": str(case),
        "backend": chosen_backend(device, **arguments, **case.options).name,
        # Of the program before compilation: libtpu cannot print every compiled one for tpu7x.
        "kernels": lowered.as_text().count("@tpu_custom_call"),
        "tiles": dataclasses.asdict(tiles),
        "temporaries": temporaries,
        "temporaries_due_to_cache": copied,
        "cache": cache,
        "seconds": time.process_time() - start,
    }


def compile_shards(case: Case, devices: list[jax.Device]) -> dict[str, Any]:
    """Slots over "data", heads over "model"."""
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("data", "model"))
    specs = {"queries": PartitionSpec("data", None, "model")}
    for name in ("lengths", "tail_mask", "prefix_start"):
        specs[name] = PartitionSpec("data")
    arguments = shapes(case, lambda name: NamedSharding(mesh, specs.get(name, PartitionSpec("data", "model"))))
    call = jax.shard_map(
        lambda x: tree_attention(**x, **case.options, implementation="mosaic_tpu"),
        mesh=mesh, in_specs=({name: specs.get(name, PartitionSpec("data", "model")) for name in arguments},),
        out_specs=specs["queries"],
    )  # fmt: skip
    compiled = jax.jit(call).lower(arguments).compile()
    text = compiled.as_text()
    return {"case": str(case), "kernels": text.count(KERNEL), "collectives": text.count("all-")}


def with_too_little_vmem(case: Case, device: jax.Device) -> dict[str, Any]:
    """The same kernel, allowed an eighth of the VMEM that it is said to take."""
    arguments = shapes(case, lambda _: SingleDeviceSharding(device))
    tiles = tiles_of(case, device.device_kind)
    tiles = dataclasses.replace(tiles, vmem_bytes=tiles.vmem_bytes // 8)
    options = {"tail_mask": None, "prefix_start": None, **case.options, "tiles": tiles}
    try:
        jax.jit(lambda x: mosaic_tpu_tree_attention(**(options | x))).lower(arguments).compile()
    except Exception as error:
        return {"case": str(case), "error": str(error)[:2000]}
    return {"case": str(case), "error": None}


def results(what: str, generation: str) -> Iterator[dict[str, Any]]:
    devices = topologies.get_topology_desc(TOPOLOGIES[generation], "tpu").devices
    if what == "shards":
        yield compile_shards(USUAL[0], devices)
    elif what == "too_little_vmem":
        yield with_too_little_vmem(USUAL[0], devices[0])
    else:
        for entry in {"usual": USUAL, "two": USUAL[::3], "tight": TIGHT, "long": long(), "largest": long()[:1]}[what]:
            yield compile_case(entry, devices[0])


def main() -> None:
    for what, generation in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        for result in results(what, generation):
            print(json.dumps({"list": what, "generation": generation, **result}), flush=True)


if __name__ == "__main__":
    main()
