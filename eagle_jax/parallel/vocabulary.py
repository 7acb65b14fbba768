"""A vocabulary split over shards: what each holds of logits, and reductions over all of it that never gather the logits.

Shard i holds ids `i * width .. (i + 1) * width - 1`. The last ids of all are padding where the size is no multiple of the shards:
their logits are -inf (`hide_padding`), so they are never chosen, have no probability, and no id below the size is behind them.
Ties go to the lowest id, because candidates are compared in the order of the shards.
"""

import dataclasses

import jax
import jax.numpy as jnp

from eagle_jax.parallel.collectives import gather_over_shards, max_over_shards, shard_index, sum_over_shards
from eagle_jax.parallel.top_k import top_k


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The columns of logits on this device: all, or one of several equal blocks of consecutive ids."""

    size: int
    """Ids of the whole vocabulary, V."""
    shards: int = 1

    @property
    def width(self) -> int:
        """Columns of one shard, padding included: W."""
        return -(-self.size // self.shards)

    @property
    def padded_size(self) -> int:
        """Columns of all shards together."""
        return self.width * self.shards

    def ids(self) -> jax.Array:
        """Ids of the own columns, int32 `[W]`; those of padding are V and more."""
        ids = jnp.arange(self.width, dtype=jnp.int32)
        return ids if self.shards == 1 else ids + shard_index() * self.width

    def hide_padding(self, x: jax.Array) -> jax.Array:
        """`[..., W]` with -inf in padding."""
        return x if self.padded_size == self.size else jnp.where(self.ids() < self.size, x, -jnp.inf)

    def places(self, ids: jax.Array) -> jax.Array:
        """Own column of each id, W (which scatters drop) for ids of other shards and ids below 0."""
        local = ids if self.shards == 1 else ids - shard_index() * self.width
        return jnp.where((ids >= 0) & (local >= 0) & (local < self.width), local, self.width)

    def own(self, values: jax.Array) -> jax.Array:
        """The own columns `[..., W]` of values `[..., V]`; padding is 0."""
        if self.shards == 1:
            return values
        padding = [(0, 0)] * (values.ndim - 1) + [(0, self.padded_size - self.size)]
        start = shard_index() * self.width
        return jax.lax.dynamic_slice_in_dim(jnp.pad(values, padding), start, self.width, axis=-1)

    def whole(self, values: jax.Array) -> jax.Array:
        """All columns `[..., V]` of values `[..., W]`. For what cannot be done piece by piece: it gathers."""
        if self.shards == 1:
            return values
        return self._beside(values)[..., : self.size]

    def max(self, x: jax.Array) -> jax.Array:
        """Largest of each row of `[..., W]`: `[..., 1]`."""
        return max_over_shards(x.max(-1, keepdims=True), self.shards)

    def sum(self, x: jax.Array) -> jax.Array:
        """Sum of each row of `[..., W]`: `[...]`."""
        return sum_over_shards(x.sum(-1), self.shards)

    def count(self, found: jax.Array) -> jax.Array:
        """How many ids of each row of bool `[..., W]` are true: int32 `[...]`."""
        if self.padded_size != self.size:
            found = found & (self.ids() < self.size)
        return sum_over_shards(found.sum(-1, dtype=jnp.int32), self.shards)

    def take(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        """The values of `[..., W]` at ids int32 `[..., n]`: `[..., n]`; those of ids below 0 mean nothing."""
        if self.shards == 1:
            return jnp.take_along_axis(x, jnp.maximum(ids, 0), axis=-1)
        places = self.places(ids)
        values = jnp.take_along_axis(x, jnp.minimum(places, self.width - 1), axis=-1)
        return sum_over_shards(jnp.where(places < self.width, values, 0), self.shards)

    def best(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The largest value of each row of `[..., W]` and its id, int32, the lowest of equal ones: `[...]` both."""
        ids = jnp.argmax(x, axis=-1).astype(jnp.int32)
        if self.shards == 1:
            return x.max(-1), ids
        values = jnp.take_along_axis(x, ids[..., None], axis=-1)
        values, ids = self._gather(values, self._global(ids)[..., None])
        first = jnp.argmax(values, axis=-1, keepdims=True)
        return (jnp.take_along_axis(values, first, axis=-1)[..., 0], jnp.take_along_axis(ids, first, axis=-1)[..., 0])

    def top_k(self, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """The `count` largest values of each row of `[..., W]`, largest first, and their ids, int32; ties to the lower id."""
        values, ids = self._candidates(x, count)
        if self.shards == 1:
            return values, ids
        return _first(*self._gather(values, ids), count)

    def top_log_probs(self, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """As `top_k`, but the values are log-probabilities: minus the row's log-sum-exp. One collective for both."""
        values, ids = self._candidates(x, count)
        if self.shards == 1:
            return values - jax.nn.logsumexp(x, axis=-1, keepdims=True), ids
        peak = values[..., :1]
        mass = jnp.exp(x - jnp.where(jnp.isfinite(peak), peak, 0)).sum(-1, keepdims=True)
        # The mass travels as one more candidate of the shard, behind the others.
        values, ids = self._gather(jnp.concatenate([values, mass], -1), jnp.concatenate([ids, ids[..., :1]], -1))
        values, ids = (y.reshape(*y.shape[:-1], self.shards, -1) for y in (values, ids))
        peaks, masses = values[..., 0], values[..., -1]  # [..., shards]
        peak = peaks.max(-1, keepdims=True)
        log_sum = peak + jnp.log((masses * jnp.exp(peaks - peak)).sum(-1, keepdims=True))
        values, ids = (y[..., :-1].reshape(*y.shape[:-2], -1) for y in (values, ids))
        values, ids = _first(values, ids, count)
        return values - log_sum, ids

    def _global(self, columns: jax.Array) -> jax.Array:
        return columns.astype(jnp.int32) + (0 if self.shards == 1 else shard_index() * self.width)

    def _candidates(self, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """The own candidates for the `count` largest of all."""
        values, columns = top_k(x, min(count, self.width))
        return values, self._global(columns)

    def _gather(self, values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Float32 values and int32 ids `[..., c]` of all shards side by side, `[..., shards * c]`, in one collective."""
        bits = jax.lax.bitcast_convert_type(values, jnp.int32)
        both = self._beside(jnp.stack([bits, ids]))
        return jax.lax.bitcast_convert_type(both[0], jnp.float32), both[1]

    def _beside(self, x: jax.Array) -> jax.Array:
        every = jnp.moveaxis(gather_over_shards(x, self.shards), 0, -2)  # [..., shards, c]
        return every.reshape(*x.shape[:-1], -1)


def _first(values: jax.Array, ids: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of candidates that lie in the order of their ids where they are equal."""
    values, places = top_k(values, count)
    return values, jnp.take_along_axis(ids, places, axis=-1)
