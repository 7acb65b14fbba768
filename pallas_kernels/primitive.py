"""An operation as one JAX primitive, so that its backend can be chosen when the program is lowered.

`jax.lax.platform_dependent` would trace the kernels of every platform in every program and knows no device kinds.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels.backends import Device

PLATFORMS = ("cpu", "tpu", "cuda", "rocm")


def register(
    primitive: Primitive, *, reference: Callable[..., Any], result: Callable[..., Any], prepare: Callable[..., Any]
) -> None:
    """Gives a primitive its rules.

    Args:
      primitive: the operation.
      reference: what it computes, in plain XLA: takes the operands, and the primitive's parameters by name. It serves outside of
        programs (under `jax.disable_jit`), and where the operation is differentiated or mapped by `jax.vmap`.
      result: abstract values of the results, from those of the operands and the parameters.
      prepare: `(device, shapes, **parameters)`: the backend for a device as a function of the operands.
    """

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, platform: str, **parameters: Any) -> Any:
        avals: Sequence[Any] = ctx.avals_in
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        function = prepare(_device_of(ctx, platform), shapes, **parameters)
        # Without the mesh axes of a `jax.shard_map` over which they vary: since jax 0.12 kernels take no references with any.
        ctx = ctx.replace(avals_in=[ShapedArray(x.shape, x.dtype) for x in avals])
        return mlir.lower_fun(function, multiple_results=primitive.multiple_results)(ctx, *operands)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> Any:
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(functools.partial(reference, **parameters), tuple(primals), tuple(tangents))

    def batch(operands: Sequence[Any], axes: Sequence[Any], **parameters: Any) -> Any:
        outs = jax.vmap(functools.partial(reference, **parameters), in_axes=tuple(axes))(*operands)
        return outs, [0] * len(outs) if primitive.multiple_results else 0

    primitive.def_impl(reference)
    primitive.def_abstract_eval(result)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    for platform in PLATFORMS:
        mlir.register_lowering(primitive, functools.partial(lower, platform=platform), platform=platform)


def vary_alike(operands: list[jax.Array]) -> list[jax.Array]:
    """Inside `jax.shard_map`, marks every operand as varying over each mesh axis over which one of them does."""
    axes = [jax.typeof(x).mat.varying for x in operands]
    every = frozenset().union(*axes)
    return [jax.lax.pcast(x, tuple(every - own), to="varying") for x, own in zip(operands, axes, strict=True)]


def _device_of(ctx: mlir.LoweringRuleContext, platform: str) -> Device:
    """The device that a program is lowered for, as far as it is known."""
    try:
        backend = ctx.module_context.get_backend(optional=True)
    except RuntimeError:  # for a topology of a platform that has no device here
        backend = None
    return Device(platform) if backend is None else Device.of(backend.devices()[0], platform)
