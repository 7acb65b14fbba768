"""How parameters are split over devices, as data: logical axes of their dimensions, and rules that map these to a mesh.

The rules are Megatron's (https://arxiv.org/abs/1909.08053). A shard must find its own queries, keys and values, and its own gate
and up rows, side by side. So the rows of a fused parameter are stored shard by shard: `q0 k0 v0 q1 k1 v1 ...`, not `q k v`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle_jax.parallel.mesh import MODEL
from eagle_jax.parallel.vocabulary import Vocabulary

Axes = tuple[str | None, ...]
"""The logical axis of each dimension of a parameter; None is split by no rule."""


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Which axis of a mesh each logical axis is split over."""

    mesh_axes: Mapping[str, str | None]

    def spec(self, axes: Axes) -> PartitionSpec:
        """How an array with these axes is split.

        Raises:
          KeyError: an axis that the rules do not know.
        """
        found = [None if axis is None else self.mesh_axes[axis] for axis in axes]
        while found and found[-1] is None:
            found.pop()
        return PartitionSpec(*found)


TENSOR_PARALLEL = AxisRules({
    "embed": None,  # the residual stream
    "qkv": MODEL,  # fused queries, keys and values: column-parallel products, in Megatron's words
    "gate_up": MODEL,
    "vocab": MODEL,
    "heads": MODEL,  # what the heads read: row-parallel products, whose outputs are summed over the shards
    "mlp": MODEL,
    "fused": MODEL,  # the inputs of a draft head's fc
    "expert": MODEL,
    "group": None,  # groups of a packed weight's inputs
})  # fmt: skip
"""The rules of every model here."""
REPLICATED = AxisRules(dict.fromkeys(TENSOR_PARALLEL.mesh_axes))
"""Everything whole on every device."""


def rules_for(shards: int) -> AxisRules:
    """The rules of a module that so many devices share."""
    return TENSOR_PARALLEL if shards > 1 else REPLICATED


def parameter_axes(module: nnx.Module) -> dict[str, Axes]:
    """The logical axes of every variable of a module by its path ("layers.0.mlp.down.weight"); a module of shapes will do.

    Raises:
      ValueError: a variable that names none.
    """
    found = {}
    for keys, variable in nnx.to_flat_state(nnx.state(module)):
        path = ".".join(map(str, keys))
        if not variable.has_metadata("axes"):
            raise ValueError(f"parameter {path} names no logical axes")
        found[path] = variable.get_metadata("axes")
    return found


def parameter_specs(module: nnx.Module, rules: AxisRules) -> dict[Any, Any]:
    """How the variables of a module are split, as nested dictionaries like those of `nnx.to_pure_dict`; a packed weight says it
    of each of its arrays."""
    specs = {}
    for keys, variable in nnx.to_flat_state(nnx.state(module)):
        value, axes = variable.get_value(), variable.get_metadata("axes")
        if hasattr(value, "axes"):
            axes = value.axes(axes)
        specs[keys] = jax.tree.map(rules.spec, axes, is_leaf=lambda x: isinstance(x, tuple))
    nested: dict[Any, Any] = nnx.traversals.unflatten_mapping(specs)
    return nested


Range = tuple[int, int]
"""First and one-past-last row."""


class Geometry(Protocol):
    """What the layout depends on: of a `LlamaConfig` or a `DraftConfig`."""

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""

    @property
    def num_key_value_heads(self) -> int:
        """Key and value heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""


def module_sharding(mesh: Mesh, shards: int) -> Callable[[Axes], NamedSharding]:
    """Where parameters of given logical axes lie in a mesh: split over `shards`, its model axis, or with 1 whole everywhere."""
    rules = rules_for(shards)
    return lambda axes: NamedSharding(mesh, rules.spec(axes))


def check_divisible(config: Any, shards: int, *, whose: str, size_name: str = "tensor_parallel_size") -> None:
    """Makes sure that a model can be split.

    Key and value heads may be fewer than the shards: each is then kept by several of them.

    Args:
      config: a `LlamaConfig` or a `DraftConfig`.
      shards: devices.
      whose: "the target" or "the draft head", for the message.
      size_name: the argument that asks for so many shards.

    Raises:
      ValueError: a number that the shards do not divide; the message names both.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = {"num_attention_heads": heads, "intermediate_size": config.intermediate_size}
    if getattr(config, "use_fc", False):
        fc_inputs = config.feature_size if config.method == "eagle3" else 2 * config.hidden_size
        sizes["inputs of fc"] = fc_inputs
    for name, value in sizes.items():
        if value % shards:
            raise ValueError(f"{whose} has {name} {value}, which {size_name} {shards} does not divide")
    if kv_heads % shards and shards % kv_heads:
        raise ValueError(
            f"{whose} has num_key_value_heads {kv_heads}, of which {size_name} {shards} is neither a divisor nor a multiple"
        )


def local_kv_heads(kv_heads: int, shards: int) -> int:
    """Key and value heads of one shard."""
    return max(1, kv_heads // shards)


def qkv_ranges(config: Geometry, shards: int) -> list[Range]:
    """Rows of `[q; k; v]` in the order in which the shards store them; a key/value head that several shards keep comes again."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    own, own_kv = heads // shards, local_kv_heads(kv_heads, shards)
    ranges = []
    for shard in range(shards):
        first = shard * own * kv_heads // heads  # the key/value head of the shard's first query head
        for start, count in ((shard * own, own), (heads + first, own_kv), (heads + kv_heads + first, own_kv)):
            ranges.append((start * dim, (start + count) * dim))
    return ranges


def gate_up_ranges(config: Geometry, shards: int) -> list[Range]:
    """Rows of `[gate; up]` in the order in which the shards store them."""
    inner = config.intermediate_size
    own = inner // shards
    return [(start, start + own) for shard in range(shards) for start in (shard * own, inner + shard * own)]


def stored_rows(axis: str | None, config: Geometry, shards: int, rows: int) -> tuple[list[Range], int]:
    """The rows of a parameter as one device has them, in the order in which `shards` store them, and zeros behind them.

    Args:
      axis: logical axis of the rows.
      config: the model's.
      shards: devices.
      rows: of the parameter on one device.
    """
    if shards > 1 and axis == "qkv":
        return qkv_ranges(config, shards), 0
    if shards > 1 and axis == "gate_up":
        return gate_up_ranges(config, shards), 0
    return [(0, rows)], Vocabulary(rows, shards).padded_size - rows if axis == "vocab" else 0


def stored_order(axis: str | None, values: np.ndarray, config: Geometry, shards: int) -> np.ndarray:
    """A parameter as one device has it, in the order in which `shards` store it; `axis` is that of its rows."""
    ranges, zeros = stored_rows(axis, config, shards, values.shape[0])
    padding = np.zeros((zeros, *values.shape[1:]), values.dtype)
    return np.concatenate([values[low:high] for low, high in ranges] + [padding])
