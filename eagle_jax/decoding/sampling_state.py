"""What sampling adds to the state of the slots: settings, what penalties count, and log-probabilities for the host."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle_jax.parallel.vocabulary import Vocabulary
from eagle_jax.sampling.noise import Stream, stream_key, vocabulary_gumbel
from eagle_jax.sampling.params import MAX_LOGPROBS, SamplingMode
from eagle_jax.sampling.processing import control_logits, log_probabilities, process_logits
from eagle_jax.sampling.settings import SlotSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenHistory:
    """What penalties look at. Over a vocabulary that is split, each device has its own columns."""

    in_prompt: jax.Array
    """Tokens that the prompt holds, bool `[B, V]`."""
    counts: jax.Array
    """How often the output holds each token, the pending root included, int32 `[B, V]`."""

    def start(
        self, slot: jax.Array, tokens: jax.Array, valid: jax.Array, first: jax.Array, vocabulary: Vocabulary
    ) -> "TokenHistory":
        """Takes in a prompt chunk int32 `[C]` of which `valid` tokens count; `first` (bool scalar) forgets what was before."""
        places = vocabulary.places(jnp.where(jnp.arange(tokens.shape[0]) < valid, tokens, -1))
        row = (self.in_prompt[slot] & ~first).at[places].set(True, mode="drop")
        return TokenHistory(self.in_prompt.at[slot].set(row), self.counts.at[slot].set(0))

    def add(self, tokens: jax.Array, counts: jax.Array, slots: jax.Array, vocabulary: Vocabulary) -> "TokenHistory":
        """Counts the first `counts[r]` of emitted tokens int32 `[R, A]` of slots int32 `[R]`."""
        places = vocabulary.places(jnp.where(jnp.arange(tokens.shape[1]) < counts[:, None], tokens, -1))
        return dataclasses.replace(self, counts=self.counts.at[slots[:, None], places].add(1, mode="drop"))

    def at_nodes(self, tokens: jax.Array, ancestors: jax.Array, vocabulary: Vocabulary) -> jax.Array:
        """Counts at each node of a tree, the node's own path added: int32 `[B, N, V]`.

        Args:
          tokens: of the nodes, int32 `[B, N]`; node 0, the root, is counted already.
          ancestors: bool `[B, N, N]`, each node's path, itself included.
          vocabulary: what the columns are.
        """
        batch, nodes = tokens.shape
        slots, rows = jnp.arange(batch)[:, None, None], jnp.arange(nodes)[:, None]
        on_path = ancestors.at[:, :, 0].set(False).astype(jnp.int32)
        everywhere = jnp.broadcast_to(self.counts[:, None], (batch, nodes, self.counts.shape[1]))
        return everywhere.at[slots, rows, vocabulary.places(tokens)[:, None]].add(on_path, mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of the output tokens, at the tokens' places in `DecodeState.tokens`. n is `MAX_LOGPROBS`."""

    chosen: jax.Array
    """Of the emitted token, float32 `[B, S]`."""
    ranks: jax.Array
    """How many tokens were at least as likely, itself included, int32 `[B, S]`."""
    top: jax.Array
    """Of the likeliest tokens, best first, float32 `[B, S, n]`."""
    top_ids: jax.Array
    """int32 `[B, S, n]`."""
    of_processed: bool = dataclasses.field(metadata={"static": True})
    """Whether they are those of the distribution that is sampled, or the model's own."""

    @staticmethod
    def zeros(slots: int, capacity: int, vocab_size: int, of_processed: bool) -> "LogProbs":
        """Room for `capacity` tokens a slot."""
        flat, wide = (slots, capacity), (slots, capacity, min(MAX_LOGPROBS, vocab_size))
        return LogProbs(
            jnp.zeros(flat, jnp.float32), jnp.zeros(flat, jnp.int32),
            jnp.zeros(wide, jnp.float32), jnp.zeros(wide, jnp.int32), of_processed,
        )  # fmt: skip

    def write(
        self,
        logits: jax.Array,
        tokens: jax.Array,
        counts: jax.Array,
        places: jax.Array,
        slots: jax.Array,
        vocabulary: Vocabulary,
    ) -> "LogProbs":
        """Writes what logits `[R, A, V]` say about the first `counts[r]` of tokens int32 `[R, A]` of slots int32 `[R]`, from
        places int32 `[R]` on."""
        scores = log_probabilities(logits, vocabulary)
        chosen = vocabulary.take(scores, tokens[..., None])
        ranks = vocabulary.count(scores >= chosen)
        top, top_ids = vocabulary.top_k(scores, self.top.shape[-1])
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        at = jnp.where(steps < counts[:, None], places[:, None] + steps, self.chosen.shape[1])

        def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
            return buffer.at[slots[:, None], at].set(new, mode="drop")

        return dataclasses.replace(
            self,
            chosen=put(self.chosen, chosen[..., 0]),
            ranks=put(self.ranks, ranks),
            top=put(self.top, top),
            top_ids=put(self.top_ids, top_ids),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """Everything about sampling that a slot keeps. Greedy programs have none of it."""

    settings: SlotSettings
    """Of each slot."""
    history: TokenHistory | None
    """Only with `SamplingMode.FULL`, like the log-probabilities."""
    log_probs: LogProbs | None
    vocabulary: Vocabulary = dataclasses.field(metadata={"static": True})
    """The target's."""

    @staticmethod
    def empty(
        slots: int, capacity: int, vocabulary: Vocabulary, mode: SamplingMode, processed_logprobs: bool
    ) -> "SamplingState | None":
        """A state without requests; None for greedy programs."""
        settings = SlotSettings.empty(slots, vocabulary, mode)
        if settings is None:
            return None
        if mode is not SamplingMode.FULL:
            return SamplingState(settings, None, None, vocabulary)
        shape = (slots, vocabulary.width)
        history = TokenHistory(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))
        log_probs = LogProbs.zeros(slots, capacity, vocabulary.size, processed_logprobs)
        return SamplingState(settings, history, log_probs, vocabulary)

    def start(
        self, slot: jax.Array, settings: SlotSettings, tokens: jax.Array, valid: jax.Array, first: jax.Array
    ) -> "SamplingState":
        """Gives a slot the settings of a request, and takes in a chunk of its prompt; see `TokenHistory.start`."""
        history = self.history
        if history is not None:
            history = history.start(slot, tokens, valid, first, self.vocabulary)
        put = self.settings.put(slot, settings.own_columns(self.vocabulary))
        return dataclasses.replace(self, settings=put, history=history)

    def of_slot(self, slot: jax.Array) -> "SamplingState":
        """The state of one slot, B = 1, without log-probabilities."""
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), dataclasses.replace(self, log_probs=None)
        )

    def record(
        self,
        tokens: jax.Array,
        counts: jax.Array,
        places: jax.Array,
        *,
        slots: jax.Array,
        logits: jax.Array,
        processed: jax.Array,
    ) -> "SamplingState":
        """Takes note of emitted tokens.

        Args:
          tokens: int32 `[R, A]`.
          counts: how many of them are emitted, int32 `[R]`.
          places: where they begin in `DecodeState.tokens`, int32 `[R]`.
          slots: whose they are, int32 `[R]`.
          logits: what the target said before each, float32 `[R, A, V]`.
          processed: the same after `process`.
        """
        if self.history is None or self.log_probs is None:
            return self
        source = processed if self.log_probs.of_processed else jnp.where(jnp.isnan(logits), -jnp.inf, logits)
        return dataclasses.replace(
            self,
            history=self.history.add(tokens, counts, slots, self.vocabulary),
            log_probs=self.log_probs.write(source, tokens, counts, places, slots, self.vocabulary),
        )

    def process(
        self,
        logits: jax.Array,
        *,
        tokens: jax.Array,
        ancestors: jax.Array,
        output_lengths: jax.Array,
        stop_ids: jax.Array,
    ) -> jax.Array:
        """The processed logits after every node of a tree; see `eagle_jax.sampling.processing`.

        Args:
          logits: of the target, float32 `[B, N, V]`.
          tokens: int32 `[B, N]`.
          ancestors: bool `[B, N, N]`.
          output_lengths: tokens of the output up to each node, int32 `[B, N]`.
          stop_ids: int32 `[B, E]`.
        """
        with jax.named_scope("process_logits"):
            if self.history is not None and self.settings.controls is not None:
                counts = self.history.at_nodes(tokens, ancestors, self.vocabulary)
                logits = control_logits(
                    logits,
                    self.settings.controls,
                    self.history.in_prompt,
                    counts,
                    output_lengths,
                    stop_ids,
                    self.vocabulary,
                )
            return process_logits(logits, self.settings, self.vocabulary)

    def target_noise(self, positions: jax.Array, ids: jax.Array | None = None) -> jax.Array:
        """The Gumbel noise of the target's draws: float32 `[B, P, V]` at positions int32 `[B, P]` for ids int32 `[V]`.

        Without ids, for this device's columns of the target's vocabulary.
        """
        ids = self.vocabulary.ids() if ids is None else ids
        with jax.named_scope("noise"):
            return vocabulary_gumbel(stream_key(self.settings.seeds[:, None], positions, Stream.TARGET), ids)
