"""Tree attention as a JAX primitive."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from pallas_kernels.backends import Device
from pallas_kernels.primitive import register, vary_alike
from pallas_kernels.tree_attention.backends import Implementation, choose
from pallas_kernels.tree_attention.reference import reference_tree_attention

tree_attention_p = Primitive("tree_attention")


def bind(
    arrays: Sequence[jax.Array | None], *, scale: float, soft_cap: float | None, implementation: Implementation | None
) -> jax.Array:
    """Puts the operation into the program; `arrays` are those of `reference_tree_attention`, then `prefix_start`."""
    present = tuple(x is not None for x in arrays)
    operands = vary_alike([x for x in arrays if x is not None])
    return _call(
        *operands,
        present=present,
        scale=float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        implementation=implementation,
        # The backend is traced when the program is lowered, perhaps outside the context that sets the precision.
        precision=jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
    )


@functools.partial(jax.jit, static_argnames=("present", "scale", "soft_cap", "implementation", "precision"))
def _call(*operands: jax.Array, **parameters: Any) -> jax.Array:
    # A function of its own: layers of equal shapes share one in the lowered program.
    with jax.named_scope("tree_attention"):
        return tree_attention_p.bind(*operands, **parameters)


def _fill(operands: Sequence[Any], present: tuple[bool, ...]) -> list[Any]:
    """All arguments in their places, None where there is none."""
    rest = iter(operands)
    return [next(rest) if given else None for given in present]


def _reference(
    *operands: jax.Array, present: tuple[bool, ...], scale: float, soft_cap: float | None, precision: Any, **_: Any
) -> jax.Array:
    *arrays, prefix_start = _fill(operands, present)
    with jax.default_matmul_precision(precision):
        return reference_tree_attention(*arrays, scale=scale, prefix_start=prefix_start, soft_cap=soft_cap)


def _prepare(
    device: Device,
    shapes: Sequence[Any],
    *,
    present: tuple[bool, ...],
    scale: float,
    soft_cap: float | None,
    implementation: Implementation | None,
    precision: Any,
) -> Callable[..., jax.Array]:
    with jax.default_matmul_precision(precision):
        options = {"scale": scale, "soft_cap": soft_cap}
        function = choose(device, _fill(shapes, present), options, implementation).function

    def run(*operands: jax.Array) -> jax.Array:
        with jax.default_matmul_precision(precision):
            return function(*_fill(operands, present))

    return run


register(tree_attention_p, reference=_reference, result=lambda queries, *_, **__: queries, prepare=_prepare)
