"""Adaptive speculation: a few shapes of rounds in one program, of which the device picks one before each round.

A *candidate* is plain decoding or a draft tree. What a round of each costs is measured once on the user's device
(`eagle_jax.engine.calibration`). What it yields is estimated from what the running requests accepted so far, and the candidate
with the most expected tokens for its time is run. So the choice depends on the calibration and on the acceptance of the requests
themselves, never on a clock: the same requests with the same calibration run the same candidates.

The estimate: candidate r accepts a further draft with probability p_r at every depth, so a round of depth D yields 1 + p_r + .. +
p_r^D tokens. Trees accept more often than chains, by `1 - p_tree = (1 - p_chain)^gain`; with that, what one candidate accepted
says something about the others, and the own record of a candidate corrects it (weighted by the number of drafts that were put to
the test). Chains have gain 1. SmolLM2-135M with its released head: chains of 7 and trees of 60 nodes accepted 4.08 and 6.07
tokens a round on mt_bench, 4.64 and 6.82 on gsm8k, 4.55 and 6.62 on humaneval, which are gains of 1.44, 1.46 and 1.43.

Where plain decoding is best, the cheapest drafting candidate is probed all the same: first so often that it costs
`PROBE_BUDGETS[0]` of the time if nothing is accepted, half as often after every probe that loses time, down to
`PROBE_BUDGETS[1]`. Answers often begin with what is hard to draft and go on with what is easy (a list, say): that is noticed
within a few rounds.

Estimates can stay wrong, above all where drafting costs next to nothing more. So accounts are kept: whatever the estimates say, a
candidate is run only if its time, lost as a whole, would not put the slots more than `LOSS` plain rounds and `LOSS_RATE` of the
time behind plain decoding, on average. Over 256 tokens that is 1.7 %.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.drafters.tree import StaticTree, TreeConfig

MAX_CANDIDATES = 15
FIRST_GUESS = 0.5
"""Acceptance of a chain's draft before anything was seen."""
GUESS_WEIGHT = 1.5
"""Tested drafts that the guess counts for."""
OTHERS_WEIGHT = 30.0
"""Tested drafts that the record of the other candidates counts for, when it speaks about one."""
MEMORY = 24.0
"""Tested drafts of a candidate that are remembered: older ones fade."""
FADING = 0.95
"""What is left of the record of a candidate after a round of another one that drafts: nothing is held against it for ever."""
GAIN = 0.18
"""Gain of a tree for each doubling of its nodes a level."""
PROBE_BUDGETS = 0.05, 0.01
"""Largest and smallest share of the time that may be lost by trying to draft where plain decoding is best."""
LOSS, LOSS_RATE = 3.0, 0.005
"""What drafting may lose in all: plain rounds, and a share of the time."""
UNDECIDED = -1
"""Value of `AdaptiveState.candidate` where the choice is to be made anew."""
DUE_ROWS = 32
"""Rows of features that plain rounds collect before the draft head must encode them."""


@dataclasses.dataclass(frozen=True)
class AdaptiveSpeculation:
    """Several shapes of rounds; it stands where a single tree could."""

    candidates: tuple[TreeConfig | StaticTree | None, ...]
    """Draft trees; the first candidate is None: plain decoding."""

    def __post_init__(self) -> None:
        if len(self.candidates) < 2 or self.candidates[0] is not None or None in self.candidates[1:]:
            raise ValueError(
                f"adaptive speculation has plain decoding (None) as its first candidate and trees after it, got {self.candidates}"
            )
        if len(self.candidates) > MAX_CANDIDATES:
            raise ValueError(
                f"adaptive speculation has at most {MAX_CANDIDATES} candidates, got {len(self.candidates)}"
            )
        if len(set(self.candidates)) != len(self.candidates):
            raise ValueError(f"the candidates of adaptive speculation must differ, got {self.candidates}")

    @property
    def trees(self) -> tuple[TreeConfig | StaticTree, ...]:
        """The candidates that draft."""
        return tuple(candidate for candidate in self.candidates if candidate is not None)

    @property
    def deepest(self) -> TreeConfig | StaticTree:
        """The candidate that can accept most drafts."""
        return max(self.trees, key=lambda tree: tree.max_depth)

    @property
    def total_tokens(self) -> int:
        """Nodes of the largest tree, the root included."""
        return max(tree.total_tokens for tree in self.trees)

    @property
    def max_depth(self) -> int:
        """Most drafted tokens that a round can accept: D."""
        return self.deepest.max_depth

    @property
    def top_k(self) -> int:
        """Most guesses read after one node."""
        return max(tree.top_k for tree in self.trees)

    @property
    def drafted(self) -> tuple[int, ...]:
        """Drafted nodes of a round of each candidate."""
        return tuple(0 if candidate is None else candidate.total_tokens - 1 for candidate in self.candidates)

    @property
    def depths(self) -> tuple[int, ...]:
        """Drafts that a round of each candidate can accept."""
        return tuple(0 if candidate is None else candidate.max_depth for candidate in self.candidates)

    @property
    def due_rows(self) -> int:
        """Rows of features that are kept until the head encodes them."""
        return max(DUE_ROWS, self.max_depth + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptiveState:
    """What the choice of candidates rests on. R candidates, plain decoding among them."""

    costs: jax.Array
    """Time of a round of each candidate in any unit, float32 `[R]`."""
    accepted: jax.Array
    """Drafts of each candidate that were accepted, older ones faded, float32 `[B, R]`."""
    tested: jax.Array
    """Drafts whose predecessor was accepted, so that the target decided about them; float32 `[B, R]`, faded alike."""
    plain_rounds: jax.Array
    """Plain rounds since something was drafted, int32 scalar."""
    probe_budget: jax.Array
    """Share of the time that the next probe may cost, float32 scalar."""
    in_hand: jax.Array
    """Plain rounds that may be lost from here on, float32 scalar: the allowance, and what was won or lost by drafting."""
    candidate: jax.Array
    """The candidate of the next round, or `UNDECIDED`, int32 scalar."""

    @staticmethod
    def empty(speculation: AdaptiveSpeculation, slots: int) -> "AdaptiveState":
        """Before any round, with costs that are all the same."""
        candidates = len(speculation.candidates)
        zeros = jnp.zeros((slots, candidates), jnp.float32)
        zero = jnp.zeros((), jnp.int32)
        return AdaptiveState(
            costs=jnp.ones((candidates,), jnp.float32),
            accepted=zeros,
            tested=jnp.zeros_like(zeros),
            plain_rounds=zero,
            probe_budget=jnp.asarray(PROBE_BUDGETS[0], jnp.float32),
            in_hand=jnp.asarray(LOSS, jnp.float32),
            candidate=jnp.zeros((), jnp.int32),
        )

    def restart(self, costs: jax.Array | None = None) -> "AdaptiveState":
        """Forgets what belongs to all slots together; `costs`, float32 `[R]`, take the place of the present ones."""
        return dataclasses.replace(
            self,
            costs=self.costs if costs is None else costs,
            plain_rounds=jnp.zeros_like(self.plain_rounds),
            probe_budget=jnp.full_like(self.probe_budget, PROBE_BUDGETS[0]),
            in_hand=jnp.full_like(self.in_hand, LOSS),
        )

    def start(self, slot: jax.Array) -> "AdaptiveState":
        """Forgets the request that had a slot before. What belongs to all slots stays, unless there is only one."""
        fresh = self.restart() if self.tested.shape[0] == 1 else self
        return dataclasses.replace(
            fresh,
            accepted=self.accepted.at[slot].set(0.0),
            tested=self.tested.at[slot].set(0.0),
        )

    def record(
        self, speculation: AdaptiveSpeculation, candidate: int, counts: jax.Array, running: jax.Array
    ) -> "AdaptiveState":
        """Takes note of a round of one candidate, and picks the next.

        Args:
          speculation: the candidates.
          candidate: which one was run.
          counts: accepted drafts, int32 `[B]`.
          running: slots that took part, bool `[B]`.
        """
        emitted = 1 + jnp.sum(jnp.where(running, counts, 0)) / jnp.maximum(jnp.sum(running), 1)
        time = self.costs[candidate] / self.costs[0]
        in_hand = self.in_hand + emitted - time * (1 - LOSS_RATE)
        if candidate == 0:
            return dataclasses.replace(self, plain_rounds=self.plain_rounds + 1, in_hand=in_hand)
        accepted = counts.astype(jnp.float32)
        tested = accepted + (counts < speculation.depths[candidate])
        here = jnp.arange(len(speculation.candidates)) == candidate
        fade = jnp.where(here, jnp.minimum(1.0, MEMORY / (self.tested[:, candidate] + tested))[:, None], FADING)

        def add(total: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(running[:, None], (total + here * new[:, None]) * fade, total)

        # The first round after plain ones is a probe.
        after_loss = jnp.where(self.plain_rounds > 0, self.probe_budget / 2, self.probe_budget)
        budget = jnp.clip(
            jnp.where(emitted < time, after_loss, 2 * self.probe_budget), PROBE_BUDGETS[1], PROBE_BUDGETS[0]
        )
        return dataclasses.replace(
            self,
            accepted=add(self.accepted, accepted),
            tested=add(self.tested, tested),
            plain_rounds=jnp.zeros_like(self.plain_rounds),
            probe_budget=budget,
            in_hand=in_hand,
        )

    def choose(self, speculation: AdaptiveSpeculation, running: jax.Array) -> "AdaptiveState":
        """Picks the next candidate for the running slots, bool `[B]`."""
        yields = jnp.where(running[:, None], self.expected_lengths(speculation), 0).sum(axis=0)  # [R]
        affordable = (self.costs / self.costs[0] - 1 <= self.in_hand).at[0].set(True)
        best = jnp.argmax(jnp.where(affordable, yields / self.costs, -1.0)).astype(jnp.int32)
        cheapest = jnp.argmin(self.costs[1:]).astype(jnp.int32) + 1
        return dataclasses.replace(self, candidate=jnp.where((best == 0) & self.probing, cheapest, best))

    @property
    def probing(self) -> jax.Array:
        """Whether so many plain rounds were run that one of the cheapest drafting candidate may be lost, bool scalar."""
        lost = self.costs[1:].min() / self.costs[0] - 1  # plain rounds that a round without an accepted draft costs
        due = self.plain_rounds * self.probe_budget >= jnp.maximum(lost, self.probe_budget)
        return due & (lost <= self.in_hand)

    def expected_lengths(self, speculation: AdaptiveSpeculation) -> jax.Array:
        """Tokens that a round of each candidate is expected to emit, float32 `[B, R]`."""
        gains = np.array([gain(candidate) for candidate in speculation.trees], np.float32)
        depths = np.array(speculation.depths[1:], np.float32)
        accepted, tested = self.accepted[:, 1:], self.tested[:, 1:]
        guess = np.float32(-math.log(1 - FIRST_GUESS))
        # What each candidate says about chains, and together with the first guess.
        own = (accepted + GUESS_WEIGHT * -np.expm1(-guess * gains)) / (tested + GUESS_WEIGHT)
        said = -jnp.log1p(-jnp.minimum(own, 0.999)) / gains
        pooled = (GUESS_WEIGHT * guess + (tested * said).sum(-1)) / (GUESS_WEIGHT + tested.sum(-1))  # [B]
        rate = (accepted + OTHERS_WEIGHT * -jnp.expm1(-pooled[:, None] * gains)) / (tested + OTHERS_WEIGHT)
        rate = jnp.clip(rate, 0.0, 0.999)
        lengths = 1 + rate * (1 - rate**depths) / (1 - rate)
        return jnp.concatenate([jnp.ones_like(lengths[:, :1]), lengths], axis=1)


def gain(tree: TreeConfig | StaticTree) -> float:
    """How much more often than chains a tree accepts, see the module."""
    return 1 + GAIN * math.log2((tree.total_tokens - 1) / tree.max_depth)


def forced(speculation: AdaptiveSpeculation, candidate: int) -> np.ndarray:
    """Costs with which one candidate is always run, float32 `[R]`."""
    costs = np.full((len(speculation.candidates),), 1e30, np.float32)
    costs[candidate] = 1.0
    return costs
