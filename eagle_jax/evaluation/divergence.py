"""Where outputs of two engines part, and how near a tie the target was there."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.loading import Target
from eagle_jax.models import CacheContext
from eagle_jax.sampling import SamplingMode, SamplingParams
from eagle_jax.sampling.noise import Stream, stream_key, vocabulary_gumbel
from eagle_jax.sampling.processing import process_logits
from eagle_jax.sampling.settings import SlotSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place at which two outputs of a prompt differ."""

    row: int
    """Index of the prompt."""
    token: int
    """Index in the outputs."""
    ours: int | None
    """The token of the first output; None where it has ended."""
    theirs: int | None
    """The token of the second output; None where it has ended."""
    gap: float | None
    """How far apart the two are in what the token is the argmax of: logits, processed and with noise where tokens are sampled.
    Infinite if one of them cannot be drawn; None if one output has ended."""
    relative_gap: float | None
    """The gap as a share of the largest finite magnitude among these numbers; below 1e-5 float32 programs may differ."""


def first_divergences(
    target: Target,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    *,
    params: SamplingParams | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Divergence]:
    """Finds the first difference of each pair of outputs, and asks the target how near a tie it was.

    Two correct engines choose differently where two tokens are as good as equally likely: a small gap excuses a difference, a
    large one is a fault in one of them. The target computes a row of its own for each difference, in its dtype.

    Args:
      target: the target, on one device.
      prompts: token ids of each prompt.
      ours: output token ids of each prompt.
      theirs: those of another engine, in the same order.
      params: how tokens were chosen, without penalties and biases; None is greedily.
      seeds: of each prompt, where tokens were sampled. Only engines that draw the same noise can be compared then.

    Raises:
      ValueError: numbers of prompts and outputs that differ, or settings that cannot be compared.
    """
    if target.model.shards > 1:
        raise ValueError(
            f"target is split over {target.model.shards} devices; load it without a mesh to compare outputs"
        )
    params = SamplingParams() if params is None else params
    if not len(prompts) == len(ours) == len(theirs):
        raise ValueError(f"there are {len(prompts)} prompts, but {len(ours)} and {len(theirs)} outputs")
    if params.mode > SamplingMode.SAMPLING:
        raise ValueError(
            f"params {params} has controls, logprobs or bans, which depend on more than a row of logits; compare without them"
        )
    if not params.greedy and (seeds is None or len(seeds) != len(prompts)):
        raise ValueError("seeds must have one seed for each prompt where tokens are sampled")
    found = []
    for row, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if list(a) == list(b):
            continue
        shorter = min(len(a), len(b))
        at = next((i for i in range(shorter) if a[i] != b[i]), shorter)
        gap = relative = None
        if at < shorter:
            seed = 0 if seeds is None else seeds[row]
            scores = next_scores(target, [*prompt, *a[:at]], params, seed)
            gap = float(abs(scores[a[at]] - scores[b[at]]))
            gap = float("inf") if np.isnan(gap) else gap
            relative = gap / float(np.abs(scores[np.isfinite(scores)]).max(initial=1e-30))
        found.append(
            Divergence(
                row=row,
                token=at,
                ours=int(a[at]) if at < len(a) else None,
                theirs=int(b[at]) if at < len(b) else None,
                gap=gap,
                relative_gap=relative,
            )
        )
    return found


def next_scores(target: Target, ids: Sequence[int], params: SamplingParams, seed: int) -> np.ndarray:
    """What the token after `ids` is the argmax of, float32 `[V]`: logits if greedy, else processed logits plus noise."""
    size = 1 << (len(ids) - 1).bit_length()  # few shapes, few compilations
    tokens = jnp.asarray([[*ids, *[0] * (size - len(ids))]], jnp.int32)
    graph, weights = nnx.split(target.model)
    logits = _last_logits(graph, weights, tokens, len(ids))
    if params.greedy:
        return np.asarray(logits)
    settings = SlotSettings.of(params, seed, target.config.vocab_size, SamplingMode.SAMPLING)
    assert settings is not None
    slot = settings.batch_of_one()
    processed = process_logits(logits[None, None], slot)[0, 0]
    key = stream_key(slot.seeds, jnp.asarray([len(ids)]), Stream.TARGET)
    return np.asarray(processed + vocabulary_gumbel(key, jnp.arange(target.config.vocab_size))[0])


@functools.partial(jax.jit, static_argnames="graph")
def _last_logits(graph: nnx.GraphDef, weights: nnx.State, tokens: jax.Array, length: jax.Array | int) -> jax.Array:
    model = nnx.merge(graph, weights)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    prompt_lengths = jnp.asarray(length, jnp.int32)[None]
    context = CacheContext(positions, model.empty_cache(1, 1), jnp.zeros((1,), jnp.int32))
    out = model(tokens, context, prompt_lengths=prompt_lengths)
    last = jax.lax.dynamic_slice_in_dim(out.hidden, length - 1, 1, axis=1)
    return model.logits(last)[0, 0]
