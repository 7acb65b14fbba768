"""Tree attention as one JAX primitive, so that its backend can be chosen when the program is lowered.

`jax.lax.platform_dependent` would trace the kernels of every platform in every program and knows no device kinds. Differentiated
or mapped by `jax.vmap`, the operation is its XLA reference.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels.tree_attention.backends import Device, Implementation, choose
from pallas_kernels.tree_attention.reference import reference_tree_attention

PLATFORMS = ("cpu", "tpu", "cuda", "rocm")

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


def vary_alike(operands: list[jax.Array]) -> list[jax.Array]:
    """Inside `jax.shard_map`, marks every operand as varying over each mesh axis over which one of them does."""
    axes = [jax.typeof(x).mat.varying for x in operands]
    every = frozenset().union(*axes)
    return [jax.lax.pcast(x, tuple(every - own), to="varying") for x, own in zip(operands, axes, strict=True)]


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


def device_of(ctx: mlir.LoweringRuleContext, platform: str) -> Device:
    """The device that a program is lowered for, as far as it is known."""
    try:
        backend = ctx.module_context.get_backend(optional=True)
    except RuntimeError:  # for a topology of a platform that has no device here
        backend = None
    return Device(platform) if backend is None else Device.of(backend.devices()[0], platform)


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, platform: str, **parameters: Any) -> Any:
    device = device_of(ctx, platform)
    present, precision = parameters["present"], parameters["precision"]
    with jax.default_matmul_precision(precision):
        avals: Sequence[Any] = ctx.avals_in
        shapes = _fill([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals], present)
        options = {"scale": parameters["scale"], "soft_cap": parameters["soft_cap"]}
        function = choose(device, shapes, options, parameters["implementation"]).function
        lower = mlir.lower_fun(lambda *xs: function(*_fill(xs, present)), multiple_results=False)
        return lower(ctx, *operands)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> Any:
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(functools.partial(_reference, **parameters), tuple(primals), tuple(tangents))


def _batch(operands: Sequence[Any], axes: Sequence[Any], **parameters: Any) -> Any:
    return jax.vmap(functools.partial(_reference, **parameters), in_axes=tuple(axes))(*operands), 0


tree_attention_p.def_impl(_reference)  # outside of programs, that is under `jax.disable_jit`
tree_attention_p.def_abstract_eval(lambda queries, *_, **__: queries)
ad.primitive_jvps[tree_attention_p] = _jvp
batching.primitive_batchers[tree_attention_p] = _batch
for _platform in PLATFORMS:
    mlir.register_lowering(tree_attention_p, functools.partial(_lower, platform=_platform), platform=_platform)
