"""Megatron's layout (https://arxiv.org/abs/1909.08053) as data: the axis along which a parameter is split, and its order of rows.

A shard must find its own queries, keys and values, and its own gate and up rows, side by side. So the rows of a fused parameter
are stored shard by shard: `q0 k0 v0 q1 k1 v1 ...` in place of `q k v`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle_jax.parallel.mesh import MODEL
from eagle_jax.parallel.vocabulary import Vocabulary

_ROWS = ("qkv.weight", "qkv.bias", "gate_up.weight", "gate_up.bias", "embed.weight", "lm_head.weight")
"""Split along the outputs: column-parallel products, in Megatron's words, and tables over the vocabulary."""
_COLUMNS = ("out.weight", "down.weight", "fc.weight")
"""Split along the inputs: row-parallel products, whose outputs are summed over the shards."""

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


def partition_spec(path: str) -> PartitionSpec:
    """How a parameter is split over the shards, by its path in the module ("layers.0.mlp.down.weight")."""
    if path.endswith(_ROWS):
        return PartitionSpec(MODEL)
    return PartitionSpec(None, MODEL) if path.endswith(_COLUMNS) else PartitionSpec()


def module_sharding(mesh: Mesh, shards: int) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """Where the parameters of a module lie in a mesh: split over `shards`, its model axis, or with 1 whole on every device."""

    def place(path: str, shape: tuple[int, ...]) -> NamedSharding:
        del shape
        return NamedSharding(mesh, partition_spec(path) if shards > 1 else PartitionSpec())

    return place


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


def stored_rows(path: str, config: Geometry, shards: int, rows: int) -> tuple[list[Range], int]:
    """The rows of a parameter as one device has them, in the order in which `shards` store them, and zeros behind them.

    Args:
      path: of the parameter.
      config: the model's.
      shards: devices.
      rows: of the parameter on one device.
    """
    if shards > 1 and ".qkv." in path:
        return qkv_ranges(config, shards), 0
    if shards > 1 and ".gate_up." in path:
        return gate_up_ranges(config, shards), 0
    if path.endswith(("embed.weight", "lm_head.weight")):
        return [(0, rows)], Vocabulary(rows, shards).padded_size - rows
    return [(0, rows)], 0


def stored_order(path: str, values: np.ndarray, config: Geometry, shards: int) -> np.ndarray:
    """A parameter as one device has it, in the order in which `shards` store it."""
    ranges, zeros = stored_rows(path, config, shards, values.shape[0])
    padding = np.zeros((zeros, *values.shape[1:]), values.dtype)
    return np.concatenate([values[low:high] for low, high in ranges] + [padding])
