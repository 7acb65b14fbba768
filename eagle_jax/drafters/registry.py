"""Drafters by their method: a new kind is a file of its own and a row here, or a call of `register` from anywhere."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from eagle_jax.drafters.base import Drafter, Drafts
from eagle_jax.drafters.eagle import EagleDrafter
from eagle_jax.drafters.plain import PlainDrafter
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.models.llama import Llama
from eagle_jax.models.module_def import ModuleDef


@dataclasses.dataclass(frozen=True)
class DrafterSpec:
    """Everything static about a drafter but its trees."""

    method: str
    """Under which it is registered."""
    module: ModuleDef[Any] | None = None
    """Structure of the module that it runs, whose parameters are `Weights.draft`; None where these are a plain pytree."""


class Builder(Protocol):
    """Makes a drafter inside a compiled program."""

    def __call__(
        self,
        spec: DrafterSpec,
        target: Llama,
        weights: Any,
        tree: TreeConfig | StaticTree,
        *,
        drafts: Drafts,
        due_rows: int | None,
    ) -> Drafter:
        """A drafter that grows trees of one shape.

        Args:
          spec: what is static.
          target: the target.
          weights: `Weights.draft`.
          tree: the shape: its nodes and its depth.
          drafts: how slots that sample pick children.
          due_rows: tokens that the drafter can fall behind, where some rounds are not drafted; None: those of one round.
        """
        ...


def _eagle(
    spec: DrafterSpec,
    target: Llama,
    weights: Any,
    tree: TreeConfig | StaticTree,
    *,
    drafts: Drafts,
    due_rows: int | None,
) -> Drafter:
    assert spec.module is not None
    if drafts is Drafts.SAMPLED and isinstance(tree, TreeConfig):  # a chain: the distributions are kept level by level
        tree = StaticTree.from_paths([[0] * depth for depth in range(1, tree.total_tokens)])
    return EagleDrafter(spec.module.merge(weights), target, drafts=drafts, tree=tree, due_rows=due_rows)


_BUILDERS: dict[str, Builder] = {"eagle": _eagle, "eagle3": _eagle}


def register(method: str) -> Callable[[Builder], Builder]:
    """Makes a method known, as a decorator of what builds its drafter.

    Raises:
      ValueError: the name is taken.
    """
    if method in _BUILDERS:
        raise ValueError(f"method {method!r} is registered already")

    def add(builder: Builder) -> Builder:
        _BUILDERS[method] = builder
        return builder

    return add


def methods() -> tuple[str, ...]:
    """All methods that are known."""
    return tuple(_BUILDERS)


def check_method(method: str) -> None:
    """Raises ValueError for a method that is not registered."""
    if method not in _BUILDERS:
        raise ValueError(f"method {method!r} is not known; known are {', '.join(map(repr, _BUILDERS))}")


def build_drafter(
    spec: DrafterSpec | None,
    target: Llama,
    weights: Any,
    tree: TreeConfig | StaticTree | None,
    *,
    drafts: Drafts,
    due_rows: int | None = None,
) -> Drafter:
    """The drafter of a specification; see `Builder`. Without one, or without a tree, it drafts nothing."""
    if spec is None or tree is None:
        return PlainDrafter()
    check_method(spec.method)
    return _BUILDERS[spec.method](spec, target, weights, tree, drafts=drafts, due_rows=due_rows)
