"""The one entry point of tree attention: the contract and its checks."""

from typing import Any

import jax

from pallas_kernels.backends import Choice, Device
from pallas_kernels.tree_attention.backends import IMPLEMENTATIONS, Implementation, choose
from pallas_kernels.tree_attention.operation import bind


def tree_attention(
    queries: jax.Array,
    cache_keys: jax.Array,
    cache_values: jax.Array,
    lengths: jax.Array,
    tail_keys: jax.Array,
    tail_values: jax.Array,
    tail_mask: jax.Array | None = None,
    *,
    scale: float,
    prefix_start: jax.Array | None = None,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attends from T new tokens a slot to the slot's committed prefix and to an uncommitted tail.

    The prefix needs no mask: row `s` of a slot's cache is visible when `s < lengths[b]`. Only the tail, the rows that the
    caller has not committed (the nodes of a draft tree, a prefill chunk), carries a mask. Both parts share one softmax, in
    float32. The cache is read, never written.

    Args:
      queries: rotated queries, `[B, T, Hq, Dh]`.
      cache_keys: rotated keys of committed rows, `[B, Hkv, S, Dh]`; rows at and beyond the slot's length are ignored.
      cache_values: their values, `[B, Hkv, S, Dh]`.
      lengths: number of committed rows of each slot, int32 `[B]`, each in 0..S.
      tail_keys: rotated keys of the tail, `[B, Hkv, M, Dh]`.
      tail_values: values of the tail, `[B, Hkv, M, Dh]`.
      tail_mask: bool `[B, T, M]`, true where query t sees tail row m; every query must see at least one row (itself).
        None means causal: M == T and query t sees tail rows 0..t.
      scale: factor on the scores, usually `Dh ** -0.5`.
      prefix_start: first visible prefix row of each query, int32 `[B, T]` (sliding windows); None means 0. The window over
        the tail belongs into `tail_mask`.
      soft_cap: if given, scores become `soft_cap * tanh(scores / soft_cap)` before masking.
      implementation: forces a backend: "mosaic_tpu" and "mosaic_gpu" are kernels, for TPUs and for Hopper GPUs; "xla_blocked" is
        plain XLA that reads the committed blocks of keys one by one, "xla" plain XLA that reads the whole capacity at once,
        "xla_positioned" plain XLA whose result for a chain does not depend on how much of it is committed.
        None takes the first that does these shapes on the device for which the program is compiled (`ORDER` in `backends`).

    Returns:
      `[B, T, Hq, Dh]` in the dtype of `queries`.

    Raises:
      ValueError: shapes that do not fit together, or an unknown `implementation`.
      NotImplementedError: a forced `implementation` that cannot do this call; it says what is missing. Raised when the program is
        lowered, since only then is its device known.
    """
    arrays = (queries, cache_keys, cache_values, lengths, tail_keys, tail_values, tail_mask, prefix_start)
    check(*arrays, implementation=implementation)
    return bind(arrays, scale=scale, soft_cap=soft_cap, implementation=implementation)


def chosen_backend(
    device: jax.Device | Device,
    queries: Any,
    cache_keys: Any,
    cache_values: Any,
    lengths: Any,
    tail_keys: Any,
    tail_values: Any,
    tail_mask: Any = None,
    *,
    scale: float,
    prefix_start: Any = None,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> Choice:
    """Says which backend `tree_attention` gets on a device, and why not those before it. Nothing is compiled or run.

    Args:
      device: a device of this process or of a topology, or the description of one.
      queries: this and the rest as for `tree_attention`; `jax.ShapeDtypeStruct`s will do in place of arrays.

    Raises:
      ValueError: as `tree_attention`.
      NotImplementedError: a forced `implementation` that cannot do this call; it says what is missing.
    """
    arrays = (queries, cache_keys, cache_values, lengths, tail_keys, tail_values, tail_mask, prefix_start)
    check(*arrays, implementation=implementation)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    described = device if isinstance(device, Device) else Device.of(device)
    return choose(described, shapes, {"scale": scale, "soft_cap": soft_cap}, implementation)


def check(
    queries: Any,
    cache_keys: Any,
    cache_values: Any,
    lengths: Any,
    tail_keys: Any,
    tail_values: Any,
    tail_mask: Any,
    prefix_start: Any,
    *,
    implementation: str | None,
) -> None:
    """Raises `ValueError` for arguments of `tree_attention` that do not fit together."""
    batch, length, query_heads, head_dim = queries.shape
    kv_heads = cache_keys.shape[1]
    expected = (batch, kv_heads, cache_keys.shape[2], head_dim)
    if cache_keys.shape != expected or cache_values.shape != expected:
        raise ValueError(
            f"cache_keys {cache_keys.shape} and cache_values {cache_values.shape} must both be [B, Hkv, S, Dh] with B and Dh of "
            f"queries {queries.shape}"
        )
    tail_rows = tail_keys.shape[2]
    expected = (batch, kv_heads, tail_rows, head_dim)
    if tail_keys.shape != expected or tail_values.shape != expected:
        raise ValueError(f"tail_keys {tail_keys.shape} and tail_values {tail_values.shape} must both be {expected}")
    if query_heads % kv_heads:
        raise ValueError(f"queries have {query_heads} heads, which is no multiple of the {kv_heads} key/value heads")
    if lengths.shape != (batch,):
        raise ValueError(f"lengths {lengths.shape} must be [B] = ({batch},)")
    if tail_mask is None and tail_rows != length:
        raise ValueError(f"a causal tail needs as many tail rows as queries: got {tail_rows} rows, {length} queries")
    if tail_mask is not None and tail_mask.shape != (batch, length, tail_rows):
        raise ValueError(f"tail_mask {tail_mask.shape} must be [B, T, M] = {(batch, length, tail_rows)}")
    if prefix_start is not None and prefix_start.shape != (batch, length):
        raise ValueError(f"prefix_start {prefix_start.shape} must be [B, T] = {(batch, length)}")
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}")
