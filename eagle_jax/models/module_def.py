"""A module taken apart for compiled programs: what is static of it, and its parameters as a flat tuple."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax
from flax import nnx

Module = TypeVar("Module", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class ModuleDef(Generic[Module]):
    """What is static of a module: hashable, so that it can be part of a program's key."""

    graph: nnx.GraphDef[Module]
    structure: jax.tree_util.PyTreeDef
    """Of the nested dictionaries that `nnx.to_pure_dict` makes of the parameters."""

    @staticmethod
    def split(module: Module) -> "tuple[ModuleDef[Module], tuple[jax.Array, ...]]":
        """A module's structure and its parameters.

        They are flat because they are arguments of every dispatch: a flat tuple takes a tenth of the time of nested dictionaries
        to take apart, and those a quarter of an `nnx.State`.
        """
        graph, state = nnx.split(module)
        leaves, structure = jax.tree.flatten(nnx.to_pure_dict(state))
        return ModuleDef(graph, structure), tuple(leaves)

    def merge(self, parameters: Sequence[jax.Array]) -> Module:
        """The module around given parameters, in the order of `split`."""
        return nnx.merge(self.graph, self.nested(parameters))

    def nested(self, leaves: Sequence[Any]) -> Any:
        """What `split` flattened, with other leaves."""
        return jax.tree.unflatten(self.structure, leaves)
