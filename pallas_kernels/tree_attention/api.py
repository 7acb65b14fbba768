"""The one entry point of tree attention: the contract, its checks, and the choice of a backend."""

from collections.abc import Callable
from typing import Any, Literal

import jax

from pallas_kernels.tree_attention.blocked import BLOCK, blocked_tree_attention
from pallas_kernels.tree_attention.reference import reference_tree_attention

Implementation = Literal["xla", "xla_blocked"]
_BACKENDS: dict[str, Callable[..., jax.Array]] = {
    "xla": reference_tree_attention,
    "xla_blocked": blocked_tree_attention,
}
IMPLEMENTATIONS = tuple(_BACKENDS)


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
      implementation: forces a backend: "xla" reads the whole capacity at once, "xla_blocked" the committed blocks one by one
        (capacities of whole blocks only). None chooses by platform: blocks on the CPU, the whole elsewhere.

    Returns:
      `[B, T, Hq, Dh]` in the dtype of `queries`.

    Raises:
      ValueError: shapes that do not fit together, or an unknown `implementation`.
      NotImplementedError: a forced `implementation` that cannot do these shapes; it says what is missing.
    """
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
    arguments = (queries, cache_keys, cache_values, lengths, tail_keys, tail_values, tail_mask)
    options: dict[str, Any] = {"scale": scale, "prefix_start": prefix_start, "soft_cap": soft_cap}
    with jax.named_scope("tree_attention"):
        if implementation is not None:
            return _BACKENDS[implementation](*arguments, **options)
        if cache_keys.shape[2] % min(BLOCK, cache_keys.shape[2]):
            return reference_tree_attention(*arguments, **options)
        # Both are traced, one is compiled: the platform is known when the program is lowered.
        return jax.lax.platform_dependent(
            *arguments,
            cpu=lambda *arrays: blocked_tree_attention(*arrays, **options),
            default=lambda *arrays: reference_tree_attention(*arrays, **options),
        )
