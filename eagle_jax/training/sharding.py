"""Where arrays go when several devices train: batches over the axis "data", weights of target and head over "model".

The programs are the same as on one device; XLA inserts the collectives that these placements ask for.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle_jax.parallel.mesh import DATA, MODEL
from eagle_jax.parallel.partition import TENSOR_PARALLEL, Axes
from eagle_jax.training.batch import PackedBatch


@dataclasses.dataclass(frozen=True)
class TrainingMesh:
    """The devices that train: a mesh, or one device where it is None."""

    mesh: Mesh | None = None
    axes: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    """Logical axes of the head's parameters by their path."""

    @staticmethod
    def make(data: int, model: int) -> "TrainingMesh":
        """Over `data` x `model` devices.

        Raises:
          ValueError: there are fewer devices.
        """
        if data * model == 1:
            return TrainingMesh()
        devices = jax.devices()
        if data * model > len(devices):
            raise ValueError(
                f"data_parallel {data} x model_parallel {model} needs {data * model} devices, and there are {len(devices)}"
            )
        grid = np.array(devices[: data * model]).reshape(data, model)
        return TrainingMesh(Mesh(grid, (DATA, MODEL)))

    def sharding(self, axes: Axes, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        """Of a parameter of target or head; what does not divide evenly is kept whole on every device."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(jax.devices()[0])
        size, spec = self.mesh.shape[MODEL], TENSOR_PARALLEL.spec(axes)
        divides = all(length % size == 0 for length, axis in zip(shape, spec, strict=False) if axis == MODEL)
        return NamedSharding(self.mesh, spec if len(shape) == 2 and divides else PartitionSpec())

    def tree(self, tree: Any) -> Any:
        """Shardings of a pytree: leaves that stand in a dictionary under the path of a parameter of the head, such as the moments
        of an optimiser, lie with it; all others are on every device."""

        def of(path: tuple[Any, ...], leaf: Any) -> jax.sharding.Sharding:
            keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
            return self.sharding(self.axes.get(keys[-1], ()) if keys else (), np.shape(leaf))

        return jax.tree_util.tree_map_with_path(of, tree)

    def batch(self, batch: PackedBatch) -> PackedBatch:
        """Puts a batch on the devices."""
        where = jax.devices()[0] if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(DATA, None))
        return jax.device_put(batch, where)
