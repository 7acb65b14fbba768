"""What sampling adds to the state of the slots: settings, what penalties count, and log-probabilities for the host."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle_jax.parallel.vocabulary import Vocabulary
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
    """Log-probabilities of tokens that the host has not read yet. n is `MAX_LOGPROBS`, W the plan's `report_tokens`."""

    chosen: jax.Array
    """Of the emitted token, float32 `[B, W]`."""
    ranks: jax.Array
    """How many tokens were at least as likely, itself included, int32 `[B, W]`."""
    top: jax.Array
    """Of the likeliest tokens, best first, float32 `[B, W, n]`."""
    top_ids: jax.Array
    """int32 `[B, W, n]`."""

    @staticmethod
    def zeros(slots: int, width: int, vocab_size: int) -> "LogProbs":
        """Room for `width` tokens a slot."""
        flat, wide = (slots, width), (slots, width, min(MAX_LOGPROBS, vocab_size))
        return LogProbs(
            jnp.zeros(flat, jnp.float32),
            jnp.zeros(flat, jnp.int32),
            jnp.zeros(wide, jnp.float32),
            jnp.zeros(wide, jnp.int32),
        )

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

        return LogProbs(
            chosen=put(self.chosen, chosen[..., 0]),
            ranks=put(self.ranks, ranks),
            top=put(self.top, top),
            top_ids=put(self.top_ids, top_ids),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """Everything about sampling that a slot keeps: the same arrays whatever rounds are run, so that requests of all modes can
    share the slots. Rounds of a lower mode see only a part of it (`of_mode`)."""

    settings: SlotSettings
    """Of each slot."""
    history: TokenHistory | None
    """None in rounds below `SamplingMode.FULL`, like the log-probabilities: a slot that needs it never runs in those."""
    log_probs: LogProbs | None
    vocabulary: Vocabulary = dataclasses.field(metadata={"static": True})
    """The target's."""
    processed_logprobs: bool = dataclasses.field(default=False, metadata={"static": True})
    """Within rounds, whether log-probabilities are those of the distribution that is sampled, or the model's own."""

    @staticmethod
    def empty(slots: int, report_tokens: int, vocabulary: Vocabulary) -> "SamplingState":
        """A state without requests."""
        shape = (slots, vocabulary.width)
        return SamplingState(
            SlotSettings.empty(slots, vocabulary),
            TokenHistory(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32)),
            LogProbs.zeros(slots, report_tokens, vocabulary.size),
            vocabulary,
        )

    def of_mode(self, mode: SamplingMode, processed_logprobs: bool = False) -> "SamplingState | None":
        """What rounds of that mode read and write; None for greedy ones."""
        if mode is SamplingMode.GREEDY:
            return None
        if mode is SamplingMode.FULL:
            return dataclasses.replace(self, processed_logprobs=processed_logprobs)
        settings = dataclasses.replace(self.settings, controls=None)
        return dataclasses.replace(self, settings=settings, history=None, log_probs=None)

    def after(self, rounds: "SamplingState | None") -> "SamplingState":
        """The whole again, after rounds on a part of it. They may have consumed its arrays, also where they changed nothing."""
        if rounds is None:
            return self
        if rounds.history is None:
            settings = dataclasses.replace(rounds.settings, controls=self.settings.controls)
            return dataclasses.replace(self, settings=settings)
        return dataclasses.replace(rounds, processed_logprobs=self.processed_logprobs)

    def start(self, slot: jax.Array, settings: SlotSettings | None) -> "SamplingState":
        """Gives a slot the settings of a request; None is greedy."""
        return dataclasses.replace(self, settings=self.settings.put(slot, settings, self.vocabulary))

    def read_prompt(self, slot: jax.Array, tokens: jax.Array, valid: jax.Array, first: jax.Array) -> "SamplingState":
        """Takes in a chunk of a slot's prompt; see `TokenHistory.start`."""
        if self.history is None:
            return self
        return dataclasses.replace(self, history=self.history.start(slot, tokens, valid, first, self.vocabulary))

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
          places: tokens that the host has not read yet, int32 `[R]`: these go behind them.
          slots: whose they are, int32 `[R]`.
          logits: what the target said before each, float32 `[R, A, V]`.
          processed: the same after `process`.
        """
        if self.history is None or self.log_probs is None:
            return self
        source = processed if self.processed_logprobs else jnp.where(jnp.isnan(logits), -jnp.inf, logits)
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

    def target_noise(self, positions: jax.Array) -> jax.Array:
        """`SlotSettings.target_noise` for this device's columns of the target's vocabulary."""
        with jax.named_scope("noise"):
            return self.settings.target_noise(positions, self.vocabulary.ids())
