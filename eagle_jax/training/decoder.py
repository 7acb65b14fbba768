"""Plain decoding of very many short prompts: for throughput alone, a thousand slots at a time.

`eagle_jax.decoding` prefills one slot at a time and looks after each; here prompts are prefilled in groups, tokens are emitted
for a number of steps without asking the host, and slots that have ended wait until a whole group of them can be refilled. A token
depends on the prompt, the seed and its position, up to rounding not on its batch mates.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.models import KVCache, KVRows, Llama
from eagle_jax.models.cache import ordered_after
from eagle_jax.sampling.noise import Stream, seed_words, stream_key, vocabulary_gumbel
from eagle_jax.training.attention import packed_attention
from pallas_kernels.tree_attention import tree_attention

Implementation = Literal["dense", "tree"]
"""Attention of a step: "dense" multiplies the whole capacity of the cache, "tree" is `tree_attention`."""

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One prompt to be answered."""

    index: int
    """By which the caller knows it."""
    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    seed: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was answered."""

    job: Job
    token_ids: np.ndarray
    """int32, the end-of-sequence token included where the answer has ended."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """State of B slots."""

    cache: KVCache
    lengths: Any
    """Committed rows, int32 `[B]`; the last emitted token is none of them."""
    tokens: Any
    """The last emitted token, int32 `[B]`."""
    output: Any
    """Emitted tokens, int32 `[B, N]`."""
    counts: Any
    """How many, int32 `[B]`."""
    limits: Any
    """Most tokens to be emitted, int32 `[B]`."""
    active: Any
    """bool `[B]`."""
    temperature: Any
    """float32 `[B]`."""
    seeds: Any
    """uint32 `[B, 2]`."""


class BulkDecoder:
    """Answers prompts with a target.

    Args:
      target: the target.
      slots: sequences decoded side by side, B.
      max_prompt: tokens of the longest prompt.
      max_new_tokens: tokens of the longest answer, N.
      eos_ids: ids that end an answer.
      group: prompts prefilled at once, R.
      steps_per_dispatch: tokens between two looks at which slots have ended.
      attention: None takes "dense" on a CPU, and elsewhere whichever a few steps show to be faster.
    """

    def __init__(
        self,
        target: Llama,
        *,
        slots: int,
        max_prompt: int,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        group: int | None = None,
        steps_per_dispatch: int = 16,
        attention: Implementation | None = None,
    ):
        self._graph, self._weights = nnx.split(target)
        self._config, self._dtype = target.config, target.dtype
        self.slots, self.max_new_tokens, self.max_prompt = slots, max_new_tokens, max_prompt
        self.group = min(slots, group or max(1, slots // 8))
        self._eos = tuple(eos_ids)
        self.buckets = prompt_buckets(max_prompt)
        # Prefill writes whole buckets, and a slot that has ended goes on writing one row at its length.
        rows = max(max_prompt + max_new_tokens, self.buckets[-1]) + 1
        self.capacity = -(-rows // 64) * 64
        self._steps = steps_per_dispatch
        self.timings: dict[str, float] = {}
        """Milliseconds a step of each attention that was tried."""
        platform = jax.devices()[0].platform
        self.attention = attention or ("dense" if platform == "cpu" else self._faster())
        self._decode = self._make_decode(self.attention)
        self._prefill = jax.jit(functools.partial(_prefill, self._graph, self._eos), donate_argnums=1)

    def run(self, jobs: Sequence[Job], *, seed: int = 0) -> Iterator[list[Answer]]:
        """Answers jobs, and yields those that have ended after each dispatch; their order depends on `seed` and their lengths.

        Raises:
          ValueError: a job that does not fit.
        """
        for job in jobs:
            if not 1 <= len(job.prompt) <= self.max_prompt or not 1 <= job.max_new_tokens <= self.max_new_tokens:
                raise ValueError(
                    f"job {job.index} has {len(job.prompt)} prompt tokens and asks for {job.max_new_tokens}; at most "
                    f"{self.max_prompt} and {self.max_new_tokens} fit, and at least 1 each is needed"
                )
        groups = self._groups(jobs, seed)
        state = self._empty()
        running: dict[int, Job] = {}
        while groups or running:
            while groups and self.slots - len(running) >= len(groups[-1]):
                members = groups.pop()
                free = [slot for slot in range(self.slots) if slot not in running][: len(members)]
                state = self._prefill(self._weights, state, *self._pad(members, free))
                running.update(zip(free, members, strict=True))
            state = self._decode(self._weights, state)
            active, counts, output = jax.device_get((state.active, state.counts, state.output))
            ended = [slot for slot in running if not active[slot]]
            if ended:
                yield [Answer(running.pop(slot), output[slot, : counts[slot]].copy()) for slot in ended]

    def _groups(self, jobs: Sequence[Job], seed: int) -> list[list[Job]]:
        rng = np.random.default_rng((seed, 2))
        queues: dict[int, list[Job]] = {bucket: [] for bucket in self.buckets}
        for i in rng.permutation(len(jobs)):
            queues[self._bucket(len(jobs[i].prompt))].append(jobs[i])
        groups = [queue[i : i + self.group] for queue in queues.values() for i in range(0, len(queue), self.group)]
        return [groups[i] for i in rng.permutation(len(groups))]

    def _bucket(self, length: int) -> int:
        return next(bucket for bucket in self.buckets if bucket >= length)

    def _pad(self, members: list[Job], free: list[int]) -> tuple[np.ndarray, ...]:
        """Arrays of R prompts; slots of missing ones are B, which no write reaches."""
        bucket, count = max(self._bucket(len(job.prompt)) for job in members), self.group
        slots = np.full(count, self.slots, np.int32)
        tokens = np.zeros((count, bucket), np.int32)
        lengths, limits = np.ones(count, np.int32), np.ones(count, np.int32)
        temperature, seeds = np.zeros(count, np.float32), np.zeros((count, 2), np.uint32)
        for row, (job, slot) in enumerate(zip(members, free, strict=True)):
            slots[row], lengths[row], limits[row] = slot, len(job.prompt), job.max_new_tokens
            tokens[row, : len(job.prompt)] = job.prompt
            temperature[row], seeds[row] = job.temperature, seed_words(job.seed)
        return slots, tokens, lengths, limits, temperature, seeds

    def _empty(self) -> SlotState:
        config, count = self._config, self.slots

        def integers() -> jax.Array:
            return jnp.zeros((count,), jnp.int32)

        return SlotState(
            cache=KVCache.zeros(
                config.num_hidden_layers, count, config.num_key_value_heads, self.capacity, config.head_dim, self._dtype
            ),
            lengths=integers(),
            tokens=integers(),
            output=jnp.zeros((count, self.max_new_tokens), jnp.int32),
            counts=integers(),
            limits=integers(),
            active=jnp.zeros((count,), bool),
            temperature=jnp.zeros((count,), jnp.float32),
            seeds=jnp.zeros((count, 2), jnp.uint32),
        )

    def _make_decode(self, attention: Implementation) -> Callable[..., SlotState]:
        return jax.jit(functools.partial(_decode, self._graph, self._eos, attention, self._steps), donate_argnums=1)

    def _faster(self) -> Implementation:
        """The faster attention, measured with caches a third full: slots are in all stages of their answers, and most prompts are
        far shorter than the longest."""
        for name in ("dense", "tree"):
            decode = self._make_decode(name)
            filled = jnp.full((self.slots,), (self.max_prompt + self.max_new_tokens) // 3, jnp.int32)
            state = dataclasses.replace(
                self._empty(),
                lengths=filled,
                limits=jnp.full((self.slots,), 2**30, jnp.int32),
                active=jnp.ones((self.slots,), bool),
            )
            for _ in range(2):  # compiles; a second time if the state of the first call lay elsewhere
                state = decode(self._weights, state)
            jax.block_until_ready(state.tokens)
            start = time.perf_counter()
            state = decode(self._weights, state)
            jax.block_until_ready(state.tokens)
            self.timings[name] = 1e3 * (time.perf_counter() - start) / self._steps
            del state
        return "dense" if self.timings["dense"] <= self.timings["tree"] else "tree"


def prompt_buckets(longest: int) -> tuple[int, ...]:
    """Lengths that prompts are padded to: powers of two from 32 on, and the longest."""
    powers = [2**i for i in range(5, 20) if 2**i < longest]
    return (*powers, longest)


def _forward(
    model: Llama,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """States after the final norm `[B, T, H]`; `attend` takes a layer's number, queries, keys and values `[B, T, heads, Dh]`."""
    config = model.config
    # Dynamic rotary scaling is refused by whoever decodes beyond the trained context.
    phases = config.rope.phases(positions, config.head_dim, jnp.zeros((tokens.shape[0],), jnp.int32))
    x = model.embed(tokens)
    for i, layer in enumerate(model.layers):
        with jax.named_scope(f"layer_{i}"):
            queries, keys, values = layer.attention.project(layer.input_norm(x), phases)
            x = x + layer.attention.join(attend(i, queries, keys, values))
            x = x + layer.mlp(layer.post_norm(x))
    return model.norm(x)


def _window(model: Llama, layer: int) -> int | None:
    return model.config.sliding_windows[layer] if model.config.sliding_windows else None


def _prefill(
    graph: Any,
    eos: tuple[int, ...],
    weights: Any,
    state: SlotState,
    slots: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    limits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
) -> SlotState:
    model: Llama = nnx.merge(graph, weights)
    count, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    rows: list[tuple[jax.Array, jax.Array]] = []

    def attend(i: int, queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        rows.append((keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)))
        scale = model.config.head_dim**-0.5
        return packed_attention(queries, keys, values, segments, positions, scale=scale, window=_window(model, i))

    hidden = _forward(model, tokens, positions, attend)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    first = _draw(model.logits(last)[:, 0], temperature, seeds, lengths)

    def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
        return buffer.at[slots, :, :length].set(new.astype(buffer.dtype), mode="drop")

    written = KVRows.of(rows)
    cache = KVCache(
        tuple(map(put, state.cache.keys, written.keys)), tuple(map(put, state.cache.values, written.values))
    )

    def fill(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[slots].set(new, mode="drop")

    return SlotState(
        cache=cache,
        lengths=fill(state.lengths, lengths),
        tokens=fill(state.tokens, first),
        output=state.output.at[slots, 0].set(first, mode="drop"),
        counts=fill(state.counts, jnp.ones((count,), jnp.int32)),
        limits=fill(state.limits, limits),
        active=fill(state.active, ~_ends(first, eos) & (limits > 1)),
        temperature=fill(state.temperature, temperature),
        seeds=fill(state.seeds, seeds),
    )


def _decode(
    graph: Any, eos: tuple[int, ...], attention: Implementation, steps: int, weights: Any, state: SlotState
) -> SlotState:
    model: Llama = nnx.merge(graph, weights)

    def step(_: jax.Array, state: SlotState) -> SlotState:
        hidden, cache = _one_token(model, attention, state)
        drawn = _draw(model.logits(hidden)[:, 0], state.temperature, state.seeds, state.lengths + 1)
        active = state.active
        slots = jnp.arange(drawn.shape[0])
        places = jnp.where(active, state.counts, state.output.shape[1])
        counts = state.counts + active
        return dataclasses.replace(
            state,
            cache=cache,
            lengths=state.lengths + active,
            tokens=jnp.where(active, drawn, state.tokens),
            output=state.output.at[slots, places].set(drawn, mode="drop"),
            counts=counts,
            active=active & ~_ends(drawn, eos) & (counts < state.limits),
        )

    return jax.lax.fori_loop(0, steps, step, state)


def _one_token(model: Llama, attention: Implementation, state: SlotState) -> tuple[jax.Array, KVCache]:
    """States `[B, 1, H]` of the last emitted tokens, and the cache with their rows."""
    scale, lengths = model.config.head_dim**-0.5, state.lengths
    rows: list[tuple[jax.Array, jax.Array]] = []
    places = jnp.arange(state.cache.keys[0].shape[2], dtype=jnp.int32)

    def dense(i: int, queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        layer = KVCache((state.cache.keys[i],), (state.cache.values[i],))
        layer = layer.write(KVRows((keys.transpose(0, 2, 1, 3),), (values.transpose(0, 2, 1, 3),)), lengths)
        cached_keys, cached_values = layer.layer(0)
        rows.append((cached_keys, cached_values))
        seen = places <= lengths[:, None]  # [B, S]; rows beyond are finite: zeros, or what was there before
        if (window := _window(model, i)) is not None:
            seen &= places > lengths[:, None] - window
        batch, _, _, width = queries.shape
        grouped = queries.reshape(batch, keys.shape[2], -1, width)  # [B, Hkv, G, Dh]
        scores = scale * jnp.einsum("bhgd,bhsd->bhgs", grouped, cached_keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, _MASKED), axis=-1)
        mixed = jnp.einsum(
            "bhgs,bhsd->bhgd", weights.astype(cached_values.dtype), cached_values, preferred_element_type=jnp.float32
        )
        return mixed.astype(queries.dtype).reshape(queries.shape)

    def tree(i: int, queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
        rows.append((keys, values))
        window = _window(model, i)
        start = None if window is None else jnp.maximum(lengths[:, None] - window + 1, 0)
        return tree_attention(
            queries, *state.cache.layer(i), lengths, keys, values, None, scale=scale, prefix_start=start
        )

    hidden = _forward(model, state.tokens[:, None], lengths[:, None], dense if attention == "dense" else tree)
    done = KVRows.of(rows)
    if attention == "dense":
        return hidden, KVCache(done.keys, done.values)
    return hidden, state.cache.write(done, ordered_after(lengths, (hidden[:, 0, 0] > 0).astype(jnp.int32)))


def _draw(logits: jax.Array, temperature: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """A token of each row of `[B, V]`: the likeliest, or a draw whose noise depends on seed and position."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    noise = vocabulary_gumbel(stream_key(seeds, positions, Stream.TARGET), ids)
    sampled = (temperature > 0)[:, None]
    heated = logits / jnp.where(sampled, temperature[:, None], 1) + jnp.where(sampled, noise, 0)
    return jnp.argmax(heated, axis=-1).astype(jnp.int32)


def _ends(tokens: jax.Array, eos: tuple[int, ...]) -> jax.Array:
    return jnp.isin(tokens, jnp.asarray(eos or (-1,), jnp.int32))
