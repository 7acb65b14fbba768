"""What the requests of a batch ask for, as arrays with one entry a slot."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.parallel.vocabulary import Vocabulary
from eagle_jax.sampling.noise import Stream, seed_words, stream_key, vocabulary_gumbel
from eagle_jax.sampling.params import SamplingMode, SamplingParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Controls:
    """What changes logits before temperature."""

    repetition_penalty: Any
    """Float32 `[B]`."""
    frequency_penalty: Any
    """Float32 `[B]`."""
    presence_penalty: Any
    """Float32 `[B]`."""
    min_tokens: Any
    """int32 `[B]`."""
    bias: Any
    """Added to the logits, float32 `[B, V]`: `logit_bias`, and -inf for ids that are not allowed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSettings:
    """How the next token of each slot is chosen. Without the axis B, as numpy values: the settings of one request."""

    seeds: Any
    """uint32 `[B, 2]`, see `seed_words`."""
    temperature: Any
    """Float32 `[B]`; 0 is greedy."""
    top_k: Any
    """int32 `[B]`; V keeps all."""
    top_p: Any
    """Float32 `[B]`."""
    min_p: Any
    """Float32 `[B]`."""
    controls: Controls | None
    """None in rounds below `SamplingMode.FULL`."""

    @staticmethod
    def of(params: SamplingParams, seed: int, vocab_size: int, mode: SamplingMode) -> "SlotSettings | None":
        """The settings of one request; None for the class without any.

        Raises:
          ValueError: `mode` does not cover `params`.
        """
        if params.mode > mode:
            raise ValueError(f"a request needs {params.mode.name} rounds, but these are {mode.name}")
        if mode is SamplingMode.GREEDY:
            return None
        controls = None
        if mode is SamplingMode.FULL:
            bias = np.zeros((vocab_size,), np.float32)
            if params.allowed_token_ids is not None:
                bias[:] = -np.inf
                bias[list(params.allowed_token_ids)] = 0
            for id_, value in params.biases:
                bias[id_] += np.float32(value)
            controls = Controls(
                repetition_penalty=np.float32(params.repetition_penalty),
                frequency_penalty=np.float32(params.frequency_penalty),
                presence_penalty=np.float32(params.presence_penalty),
                min_tokens=np.int32(params.min_tokens),
                bias=bias,
            )
        return SlotSettings(
            seeds=seed_words(seed),
            temperature=np.float32(0 if params.greedy else params.temperature),
            top_k=np.int32(vocab_size if params.top_k < 1 else min(params.top_k, vocab_size)),
            top_p=np.float32(params.top_p),
            min_p=np.float32(params.min_p),
            controls=controls,
        )

    @staticmethod
    def neutral(vocabulary: Vocabulary) -> "SlotSettings":
        """The settings of a greedy request that asks for nothing else, with this device's columns of the vocabulary."""
        one = SlotSettings.of(SamplingParams(), 0, vocabulary.size, SamplingMode.FULL)
        assert one is not None
        assert one.controls is not None
        bias = np.zeros((vocabulary.width,), np.float32)
        return dataclasses.replace(one, controls=dataclasses.replace(one.controls, bias=bias))

    @staticmethod
    def empty(slots: int, vocabulary: Vocabulary) -> "SlotSettings":
        """Neutral settings for every slot, for a state without requests."""
        one = SlotSettings.neutral(vocabulary)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (slots, *np.shape(x))), one)

    def own_columns(self, vocabulary: Vocabulary) -> "SlotSettings":
        """The settings with this device's columns of what they say about the whole vocabulary."""
        if self.controls is None or vocabulary.shards == 1:
            return self
        bias = vocabulary.own(jnp.asarray(self.controls.bias))
        return dataclasses.replace(self, controls=dataclasses.replace(self.controls, bias=bias))

    def put(self, slot: jax.Array, one: "SlotSettings | None", vocabulary: Vocabulary) -> "SlotSettings":
        """Gives one slot (int32 scalar) the settings of a request; what a lower mode leaves out becomes neutral."""
        neutral = SlotSettings.neutral(vocabulary)
        one = neutral if one is None else one.own_columns(vocabulary)
        one = dataclasses.replace(one, controls=one.controls or neutral.controls)
        return jax.tree.map(lambda x, new: x.at[slot].set(new), self, one)

    def batch_of_one(self) -> "SlotSettings":
        """The settings of one request with the axis B."""
        return jax.tree.map(lambda x: jnp.asarray(x)[None], self)

    def target_noise(self, positions: jax.Array, ids: jax.Array) -> jax.Array:
        """The Gumbel noise of the target's draws: float32 `[B, P, V]` at positions int32 `[B, P]` for ids int32 `[V]`."""
        return vocabulary_gumbel(stream_key(self.seeds[:, None], positions, Stream.TARGET), ids)

    @property
    def greedy(self) -> jax.Array:
        """bool `[B]`."""
        return self.temperature == 0
