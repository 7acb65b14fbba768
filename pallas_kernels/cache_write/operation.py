"""The write of rows as one JAX primitive, so that its backend can be chosen when the program is lowered.

See `pallas_kernels.tree_attention.operation`. Differentiated or mapped by `jax.vmap`, the operation is its XLA reference.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels.cache_write.backends import Implementation, choose
from pallas_kernels.cache_write.reference import Part, reference_write_rows
from pallas_kernels.tree_attention.operation import PLATFORMS, device_of, vary_alike

write_rows_p = Primitive("write_rows")
write_rows_p.multiple_results = True


def bind(
    buffers: Sequence[jax.Array],
    rows: Sequence[jax.Array],
    path: jax.Array | None,
    start: jax.Array,
    *,
    part: Part,
    implementation: Implementation | None,
) -> list[jax.Array]:
    """Puts the operation into the program."""
    chosen = [] if path is None else [path]
    operands = vary_alike([*buffers, *rows, *chosen, start])
    with jax.named_scope("write_rows"):
        return _call(*operands, part=part, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("part", "implementation"), inline=True)
def _call(*operands: jax.Array, part: Part, implementation: Implementation | None) -> list[jax.Array]:
    """A program of its own outside of programs, so that the backend is chosen there too."""
    return write_rows_p.bind(*operands, part=part, implementation=implementation)


def _arguments(operands: Sequence[Any], part: Part) -> tuple[list[Any], list[Any], Any, Any]:
    """Buffers, rows, path and start."""
    count = len(part.first)
    *path, start = operands[2 * count :]
    return list(operands[:count]), list(operands[count : 2 * count]), path[0] if path else None, start


def _reference(*operands: jax.Array, part: Part, **_: Any) -> list[jax.Array]:
    return reference_write_rows(*_arguments(operands, part), part=part)


def _lower(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    platform: str,
    part: Part,
    implementation: Implementation | None,
) -> Any:
    device = device_of(ctx, platform)
    avals: Sequence[Any] = ctx.avals_in
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    # Without the mesh axes of a `jax.shard_map` over which they vary: since jax 0.12 kernels take no references that have any.
    ctx = ctx.replace(avals_in=[ShapedArray(x.shape, x.dtype) for x in avals])
    function = choose(device, *_arguments(shapes, part), part=part, implementation=implementation).function
    lower = mlir.lower_fun(lambda *xs: function(*_arguments(xs, part)), multiple_results=True)
    return lower(ctx, *operands)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> Any:
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(functools.partial(_reference, **parameters), tuple(primals), tuple(tangents))


def _batch(operands: Sequence[Any], axes: Sequence[Any], **parameters: Any) -> Any:
    outs = jax.vmap(functools.partial(_reference, **parameters), in_axes=tuple(axes))(*operands)
    return outs, [0] * len(outs)


write_rows_p.def_impl(_reference)  # outside of programs, that is under `jax.disable_jit`
write_rows_p.def_abstract_eval(lambda *operands, part, **_: list(operands[: len(part.first)]))
ad.primitive_jvps[write_rows_p] = _jvp
batching.primitive_batchers[write_rows_p] = _batch
for _platform in PLATFORMS:
    mlir.register_lowering(write_rows_p, functools.partial(_lower, platform=_platform), platform=_platform)
