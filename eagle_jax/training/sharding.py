"""Where arrays go when several devices train: batches over the axis "data", weights of target and head over "model".

The programs are the same as on one device; XLA inserts the collectives that these placements ask for.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle_jax.parallel.mesh import DATA, MODEL
from eagle_jax.parallel.partition import partition_spec
from eagle_jax.training.batch import PackedBatch


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, or one device where it is None."""

    mesh: Mesh | None = None

    @staticmethod
    def make(data: int, model: int) -> "Placement":
        """Over `data` x `model` devices.

        Raises:
          ValueError: there are fewer devices.
        """
        if data * model == 1:
            return Placement()
        devices = jax.devices()
        if data * model > len(devices):
            raise ValueError(
                f"data_parallel {data} x model_parallel {model} needs {data * model} devices, and there are {len(devices)}"
            )
        grid = np.array(devices[: data * model]).reshape(data, model)
        return Placement(Mesh(grid, (DATA, MODEL)))

    def weight(self, path: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        """Of a parameter of target or head by its path; what does not divide evenly is kept whole on every device."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(jax.devices()[0])
        size, spec = self.mesh.shape[MODEL], partition_spec(path)
        divides = all(length % size == 0 for length, axis in zip(shape, spec, strict=False) if axis == MODEL)
        return NamedSharding(self.mesh, spec if len(shape) == 2 and divides else PartitionSpec())

    def tree(self, tree: Any) -> Any:
        """Shardings of a pytree: leaves that stand in a dictionary under the path of a parameter, such as the moments of an
        optimiser, lie with it; all others are on every device."""

        def of(path: tuple[Any, ...], leaf: Any) -> jax.sharding.Sharding:
            keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
            return self.weight(keys[-1] if keys else "", np.shape(leaf))

        return jax.tree_util.tree_map_with_path(of, tree)

    def batch(self, batch: PackedBatch) -> PackedBatch:
        """Puts a batch on the devices."""
        where = jax.devices()[0] if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(DATA, None))
        return jax.device_put(batch, where)
