"""From logits to the distribution that is sampled: controls, temperature, top_k, top_p, min_p, in this order everywhere.

Controls (`control_logits`) come as in vLLM: bias, repetition, frequency and presence penalties, then what may not be emitted.
Temperature and the three cuts (`process_logits`) come as in transformers: each cut sees what the one before left, renormalised.
Cuts are made at values, so that equally likely tokens stay or go together and nothing depends on an order of sorting.

A logit of NaN or -inf is a token that cannot be drawn. +inf counts as the largest float32. A row in which no token can be drawn
has the choice `NO_TOKEN`, which agrees with no draft.

A vocabulary may be split over devices: arrays over it then hold this device's columns (`Vocabulary`), and what is said below of
rows holds for whole rows.
"""

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.parallel.vocabulary import Vocabulary
from eagle_jax.sampling.settings import Controls, SlotSettings

NO_TOKEN = -1
"""The choice from a row of which no token has a probability."""

SHORTLIST = 128
"""Cuts are looked for among so many likeliest tokens first; only where they lie behind is the whole row searched."""

_INFINITY_BITS = np.int32(0x7F800000)
_LARGEST = np.float32(np.finfo(np.float32).max)


def control_logits(
    logits: jax.Array,
    controls: Controls,
    in_prompt: jax.Array,
    counts: jax.Array,
    lengths: jax.Array,
    stop_ids: jax.Array,
    vocabulary: Vocabulary | None = None,
) -> jax.Array:
    """Applies bias, penalties and bans.

    Args:
      logits: float32 `[B, N, V]`.
      controls: settings of the slots.
      in_prompt: tokens that the prompt holds, bool `[B, V]`.
      counts: how often the output up to each row holds each token, int32 `[B, N, V]`.
      lengths: tokens of the output up to each row, int32 `[B, N]`.
      stop_ids: int32 `[B, E]`, padded with -1.
      vocabulary: None is one that is not split.
    """
    vocabulary = vocabulary or Vocabulary(logits.shape[-1])

    def each(values: jax.Array) -> jax.Array:
        return values[:, None, None]

    x = logits + controls.bias[:, None]
    seen = in_prompt[:, None] | (counts > 0)
    penalty = each(controls.repetition_penalty)
    x = jnp.where(seen, jnp.where(x > 0, x / penalty, x * penalty), x)
    x = x - each(controls.frequency_penalty) * counts - each(controls.presence_penalty) * (counts > 0)
    slots = jnp.arange(stop_ids.shape[0])[:, None]
    stops = jnp.zeros(in_prompt.shape, bool).at[slots, vocabulary.places(stop_ids)].set(True, mode="drop")
    too_early = (lengths < controls.min_tokens[:, None])[..., None] & stops[:, None]
    return jnp.where(too_early, -jnp.inf, x)


def process_logits(logits: jax.Array, settings: SlotSettings, vocabulary: Vocabulary | None = None) -> jax.Array:
    """Temperature and cuts.

    Args:
      logits: float32 `[B, N, V]`.
      settings: of the slots.
      vocabulary: None is one that is not split.

    Returns:
      Float32 `[B, N, V]`, at most 0 and exactly 0 for the likeliest token, -inf for tokens that cannot be drawn; their softmax is
      the processed distribution. Greedy slots are not divided and not cut.
    """
    vocabulary = vocabulary or Vocabulary(logits.shape[-1])
    x = jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, _LARGEST))
    peak = vocabulary.max(x)
    x = x - jnp.maximum(peak, -_LARGEST)  # a row of -inf stays one
    greedy = settings.greedy
    x = x / jnp.where(greedy, 1, settings.temperature)[:, None, None]
    threshold = _cut(x, settings, vocabulary)
    min_p = jnp.where(greedy, 0, settings.min_p)[:, None, None]
    kept = (-x <= threshold[..., None]) & (jnp.exp(x) >= min_p)
    return jnp.where(kept, x, -jnp.inf)


def _cut(x: jax.Array, settings: SlotSettings, vocabulary: Vocabulary) -> jax.Array:
    """How far below the likeliest a token may lie under top_k and top_p, float32 `[B, N]`; infinite where neither is on."""
    sampled = ~settings.greedy
    by_count = sampled & (settings.top_k < vocabulary.size)
    by_mass = sampled & (settings.top_p < 1)
    everything = jnp.full(x.shape[:-1], jnp.inf, jnp.float32)

    def cut(x: jax.Array) -> jax.Array:
        shortlist = -vocabulary.top_k(x, min(SHORTLIST, vocabulary.size))[0]  # [B, N, s], ascending
        limit = _count_cut(x, shortlist, jnp.where(by_count, settings.top_k, 1), vocabulary)
        limit = jnp.where(by_count[:, None], limit, jnp.inf)
        goal = jnp.where(by_mass, settings.top_p, 0)[:, None]
        return jnp.where(by_mass[:, None], _mass_cut(x, shortlist, limit, goal, vocabulary), limit)

    # The branch is taken at run time: a batch without these settings pays nothing.
    return jax.lax.cond((by_count | by_mass).any(), cut, lambda x: everything, x)


def _count_cut(x: jax.Array, shortlist: jax.Array, count: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Depth `[B, N]` of the `count[b]`-th likeliest token."""
    length = shortlist.shape[-1]
    listed = jnp.minimum(count, length) - 1
    depth = jnp.take_along_axis(shortlist, listed[:, None, None], axis=-1)[..., 0]
    goal = jnp.broadcast_to(count[:, None].astype(jnp.float32), x.shape[:-1])
    return jax.lax.cond(
        (count > length).any(), lambda x: _smallest_depth(x, jnp.ones_like(x), goal, vocabulary), lambda x: depth, x
    )


def _mass_cut(
    x: jax.Array, shortlist: jax.Array, limit: jax.Array, share: jax.Array, vocabulary: Vocabulary
) -> jax.Array:
    """Depth `[B, N]`, at most `limit`, of the last token before which less than the share of the mass within `limit` lies."""
    mass = jnp.where(-x <= limit[..., None], jnp.exp(x), 0)
    goal = share * vocabulary.sum(mass)
    listed = jnp.where(shortlist <= limit[..., None], jnp.exp(-shortlist), 0)
    up_to = jnp.cumsum(listed, axis=-1)
    last = jnp.maximum(jnp.sum(up_to - listed < goal[..., None], axis=-1, dtype=jnp.int32) - 1, 0)
    depth = jnp.take_along_axis(shortlist, last[..., None], axis=-1)[..., 0]
    depth = jax.lax.cond(
        (up_to[..., -1] < goal).any(),
        lambda x, mass: _smallest_depth(x, mass, goal, vocabulary),
        lambda x, mass: depth,
        x,
        mass,
    )
    return jnp.minimum(limit, depth)


def _smallest_depth(x: jax.Array, weights: jax.Array, goal: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """The smallest t for which the tokens with `-x <= t` have weights of at least `goal` together.

    Exact, by bisection over the bit patterns of t, which order as the non-negative floats do: 31 passes over the rows took a
    fifth of the time of sorting them (4 rows of 49,152 on two AVX2 cores: 3 ms and 78 ms; the shortlist alone: 0.6 ms).

    Args:
      x: float32 `[B, N, V]`, at most 0.
      weights: float32 `[B, N, V]`, at least 0.
      goal: float32 `[B, N]`, at most the sum of all weights.
      vocabulary: what the columns are.
    """
    bits = jnp.maximum(
        jax.lax.bitcast_convert_type(-x, jnp.int32), 0
    )  # [B, N, V]; the likeliest is at -0, which is negative

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # too little weight within low, enough within high
        middle = low + (high - low) // 2
        reached = vocabulary.sum(jnp.where(bits <= middle[..., None], weights, 0)) >= goal
        return jnp.where(reached, low, middle), jnp.where(reached, middle, high)

    start = jnp.full(goal.shape, -1, jnp.int32), jnp.full(goal.shape, _INFINITY_BITS)
    _, high = jax.lax.fori_loop(0, 31, halve, start)
    return jax.lax.bitcast_convert_type(high, jnp.float32)


def choose(logits: jax.Array, vocabulary: Vocabulary | None = None) -> jax.Array:
    """The greedy token of each row: int32 `[...]` from float32 logits `[..., V]`, ties to the lowest id."""
    return (vocabulary or Vocabulary(logits.shape[-1])).best(logits)[1]


def choose_possible(logits: jax.Array, vocabulary: Vocabulary | None = None) -> jax.Array:
    """As `choose`, but `NO_TOKEN` where no logit is above -inf."""
    value, token = (vocabulary or Vocabulary(logits.shape[-1])).best(logits)
    return jnp.where(value > -jnp.inf, token, NO_TOKEN)


def draw(
    processed: jax.Array, noise: jax.Array, settings: SlotSettings, vocabulary: Vocabulary | None = None
) -> jax.Array:
    """A token of each row: the processed distribution's Gumbel-argmax, in greedy slots the likeliest token.

    Args:
      processed: as `process_logits` gives it, `[B, N, V]`.
      noise: standard Gumbel noise that broadcasts with it.
      settings: of the slots.
      vocabulary: None is one that is not split.

    Returns:
      int32 `[B, N]`, `NO_TOKEN` where there is none.
    """
    return choose_possible(processed + jnp.where(settings.greedy[:, None, None], 0, noise), vocabulary)


def probabilities(processed: jax.Array) -> jax.Array:
    """Softmax of processed logits `[..., V]`; zeros where no token can be drawn."""
    weights = jnp.exp(processed)
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), np.float32(1e-30))


def log_probabilities(logits: jax.Array, vocabulary: Vocabulary | None = None) -> jax.Array:
    """Log-softmax over the last axis; -inf, not NaN, where no token can be drawn."""
    vocabulary = vocabulary or Vocabulary(logits.shape[-1])
    peak = jnp.maximum(vocabulary.max(logits), -_LARGEST)
    shifted = logits - peak
    return shifted - jnp.log(jnp.maximum(vocabulary.sum(jnp.exp(shifted))[..., None], np.float32(1e-30)))
