"""A round compiled for devices that are not there: what memory it takes on each, whether that fits, and its collectives."""

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.decoding.loop import decode, specs, state_shapes
from eagle_jax.decoding.placement import everywhere, placed
from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.drafters.registry import DrafterSpec
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.models import DraftConfig, Llama, LlamaConfig, make_head
from eagle_jax.models.module_def import ModuleDef
from eagle_jax.parallel.counting import count_collectives
from eagle_jax.parallel.mesh import make_mesh
from eagle_jax.parallel.partition import check_divisible

DEVICE_BYTES = {"TPU v5 lite": 16 * 2**30, "TPU v5": 95 * 2**30, "TPU v6 lite": 32 * 2**30, "TPU7x": 96 * 2**30}
"""Memory of a device by the beginning of its kind; a TPU7x chip is two devices."""

TOPOLOGIES = ("v5e:2x2", "v5e:2x4", "v5e:4x4", "v6e:1x1x1", "v6e:2x4x1", "v5p:2x2x2", "tpu7x:2x2x1")
"""Names that libtpu is known to take; there are others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is split, and how much of it there is."""

    tensor_parallel_size: int
    draft_tensor_parallel_size: int
    data_parallel_size: int
    batch: int
    """Sequences decoded side by side, by all groups together."""
    max_model_len: int
    """Tokens of the longest sequence, prompt and output."""
    dtype: str


def topology_devices(topology: str) -> list[Any]:
    """The devices of a TPU topology, such as "v5p:2x2x2"; libtpu must be installed, a TPU is not needed.

    Raises:
      ValueError: libtpu is missing or does not know the topology.
    """
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"topology {topology!r} cannot be had: it is GENERATION:AxB or GENERATION:AxBxC, such as {', '.join(TOPOLOGIES)}, "
            f"and needs pip install 'eagle-jax[tpu]' ({reason})"
        ) from error


def compile_ahead(
    target: LlamaConfig,
    head: DraftConfig | None,
    tree: TreeConfig | StaticTree | None,
    parallel: ParallelConfig,
    devices: list[Any],
) -> dict[str, Any]:
    """Compiles the program that decodes rounds, with weights that are shapes alone.

    Args:
      target: the target.
      head: the draft head; None is plain decoding.
      tree: shape of the draft trees; None exactly when there is no head.
      parallel: how the work is split.
      devices: real ones or those of a topology.

    Returns:
      Bytes of one device, whether they fit, collectives of a round by part and kind, the seconds that compiling took, and
      XLA's own count of operations and of bytes moved on a device: of the whole program, each loop's body once, kernels such
      as attention left out; None where it has no count. All of it can be written as JSON.

    Raises:
      ValueError: numbers that do not divide, or too few devices.
    """
    shards, draft_shards = parallel.tensor_parallel_size, parallel.draft_tensor_parallel_size
    check_divisible(target, shards, whose="the target")
    if draft_shards not in (1, shards):
        raise ValueError(f"draft_tensor_parallel_size must be 1 or tensor_parallel_size {shards}, got {draft_shards}")
    if parallel.batch % parallel.data_parallel_size:
        raise ValueError(f"batch {parallel.batch} is no multiple of data_parallel_size {parallel.data_parallel_size}")
    mesh = make_mesh(shards, parallel.data_parallel_size, devices=devices)
    assert mesh is not None
    dtype = jnp.dtype(parallel.dtype)
    if head is not None and draft_shards < shards:
        head = dataclasses.replace(head, own_embedding=True, own_lm_head=True)  # as `load_draft` copies them
    target_def, target_state = ModuleDef.split(
        nnx.eval_shape(lambda: Llama(target, dtype=dtype, rngs=nnx.Rngs(0), shards=shards))
    )
    head_def, head_state = None, None
    if head is not None:
        made = head
        head_def, head_state = ModuleDef.split(
            nnx.eval_shape(lambda: make_head(made, dtype=dtype, rngs=nnx.Rngs(0), shards=draft_shards))
        )
    plan = Plan(
        target_def=target_def,
        drafter=None if head is None else DrafterSpec(head.method, head_def),
        tree=tree,
        slots=parallel.batch,
        max_length=parallel.max_model_len,
        prefill_chunk=256,
        mesh=mesh,
    )
    weights = Weights(target_state, head_state)
    weights = placed(weights, specs(plan, weights)[0], mesh)
    state = state_shapes(plan, weights)
    steering = (np.ones((plan.slots,), bool), np.int32(1), np.int32(1))
    kind = devices[0].device_kind
    limit = next((size for name, size in DEVICE_BYTES.items() if kind.startswith(name)), None)
    if kind.startswith("TPU v5 lite"):
        limit = DEVICE_BYTES["TPU v5 lite"]
    report: dict[str, Any] = {
        "device": kind,
        "devices": int(mesh.size),
        "device_bytes": limit,
        "target_bytes": _local_bytes(weights.target),
        "draft_bytes": _local_bytes(weights.draft),
        "cache_bytes": _local_bytes((state.target_cache, state.draft)),
    }
    start = time.perf_counter()
    lowered = decode.lower(plan, weights, state, *everywhere(steering, mesh))
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return report | {
            "fits": False,
            "reason": " ".join(str(error).split())[:300],
            "compile_seconds": time.perf_counter() - start,
        }
    memory = compiled.memory_analysis()
    assert memory is not None
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    cost = compiled.cost_analysis() or {}
    return report | {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "total_bytes": used,
        "fits": None if limit is None else used <= limit,
        "flops": cost.get("flops"),
        "bytes_accessed": cost.get("bytes accessed"),
        "collectives": count_collectives(_text(lowered, compiled)),
        "compile_seconds": time.perf_counter() - start,
    }


def _text(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> str:
    """The program in HLO: compiled, or as it goes into the compiler where libtpu (0.0.52 for v5p) cannot print what comes out."""
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        text = None
    return text or lowered.as_text(dialect="hlo", debug_info=True)


def _local_bytes(tree: Any) -> int:
    """Bytes on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
