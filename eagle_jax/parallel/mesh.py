"""The mesh of devices: slots are split over the axis "data", weights over the axis "model"."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle_jax.parallel.hosts import join_processes

DATA, MODEL = "data", "model"
"""Names of the axes."""


def make_mesh(
    tensor_parallel_size: int = 1, data_parallel_size: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh | None:
    """A mesh of `data_parallel_size` groups of `tensor_parallel_size` devices.

    Processes that environment variables name are joined first (`eagle_jax.parallel.join_processes`).

    Args:
      tensor_parallel_size: devices that share the weights.
      data_parallel_size: groups that share the slots; each holds all weights.
      devices: the devices; None takes the first of all.

    Returns:
      The mesh, or None where a single device of this process is all there is to it: the programs are then those without a mesh.

    Raises:
      ValueError: a size below 1, too few devices, or processes that would have none of them.
    """
    for name, size in (("tensor_parallel_size", tensor_parallel_size), ("data_parallel_size", data_parallel_size)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
    join_processes()
    count = tensor_parallel_size * data_parallel_size
    if devices is None:
        if count == 1 and jax.process_count() == 1:
            return None
        devices = jax.devices()
    asked = f"tensor_parallel_size {tensor_parallel_size} x data_parallel_size {data_parallel_size}"
    if count > len(devices):
        raise ValueError(f"{asked} needs {count} devices, and there are {len(devices)}")
    if count < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"{asked} uses {count} of the {len(devices)} devices of {jax.process_count()} processes; give sizes that use all of "
            "them, or start fewer processes"
        )
    shape = (data_parallel_size, tensor_parallel_size)
    if count == len(devices) > 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.array(list(devices)[:count]).reshape(shape)
    return Mesh(grid, (DATA, MODEL))


def check_mesh(mesh: Mesh | None) -> Mesh | None:
    """The mesh, None if it is a single device of this process, which programs need not know about.

    Raises:
      TypeError: no mesh.
      ValueError: other axes than `DATA` and `MODEL`.
    """
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be what eagle_jax.parallel.make_mesh returns, got {mesh!r}")
    if mesh.axis_names != (DATA, MODEL):
        raise ValueError(f"mesh must have the axes {(DATA, MODEL)}, got {mesh.axis_names}")
    if mesh.size == 1 and jax.process_count() == 1 and mesh.devices.flat[0] == jax.devices()[0]:
        return None
    return mesh


def model_shards(mesh: Mesh | None) -> int:
    """Devices that share the weights."""
    return 1 if mesh is None else mesh.shape[MODEL]


def data_groups(mesh: Mesh | None) -> int:
    """Groups that share the slots."""
    return 1 if mesh is None else mesh.shape[DATA]


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


@functools.lru_cache(maxsize=16)
def replicate(mesh: Mesh, rows: int | None = None, dtype: Any = None) -> Any:
    """A program that puts every array of a pytree, wherever it lies in the mesh, whole onto every device.

    Args:
      mesh: the mesh.
      rows: keep only so many along axis 0.
      dtype: cast to it.
    """

    def take(x: jax.Array) -> jax.Array:
        return x[:rows].astype(dtype or x.dtype)

    return jax.jit(lambda tree: jax.tree.map(take, tree), out_shardings=replicated(mesh))


@functools.lru_cache(maxsize=16)
def _rows(mesh: Any, count: int) -> Any:
    return jax.jit(
        lambda array, start: jax.lax.dynamic_slice_in_dim(array, start, count), out_shardings=replicated(mesh)
    )


def read_rows(array: jax.Array, low: int, high: int) -> np.ndarray:
    """Rows `low..high-1` of an array that may be spread over devices of several processes, all of which must ask for them."""
    if isinstance(array.sharding, NamedSharding):
        return np.asarray(_rows(array.sharding.mesh, high - low)(array, np.int32(low)))
    return np.asarray(array[low:high])
