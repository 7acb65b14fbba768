"""The ladder: a few shapes of rounds in one program, of which the device picks one before each round.

A *rung* is plain decoding or a draft tree. What a round of each costs is measured once on the user's device
(`eagle_jax.engine.calibration`). What it yields is estimated from what the running requests accepted so far, and the rung with
the most expected tokens for its time is run. So the choice depends on the calibration and on the acceptance of the requests
themselves, never on a clock: the same requests with the same calibration take the same rungs.

The estimate: rung r accepts a further draft with probability p_r at every depth, so a round of depth D yields 1 + p_r + .. +
p_r^D tokens. Trees accept more often than chains, by `1 - p_tree = (1 - p_chain)^gain`; with that, what one rung accepted says
something about the others, and the own record of a rung corrects it (weighted by the number of drafts that were put to the
test). Chains have gain 1. SmolLM2-135M with its released head: chains of 7 and trees of 60 nodes accepted 4.08 and 6.07 tokens a
round on mt_bench, 4.64 and 6.82 on gsm8k, 4.55 and 6.62 on humaneval, which are gains of 1.44, 1.46 and 1.43.

Where plain decoding is best, the cheapest drafting rung is tried all the same: first so often that it costs `PROBE_BUDGETS[0]` of
the time if nothing is accepted, half as often after every attempt in vain, down to `PROBE_BUDGETS[1]`. Answers often begin with
what is hard to draft and go on with what is easy (a list, say): that is noticed within a few rounds.

Estimates can be wrong for good, above all where drafting costs next to nothing more. So accounts are kept: whatever the estimates
say, a rung is run only if its time, lost as a whole, would not put the slots more than `LOSS` plain rounds and `LOSS_RATE` of the
time behind plain decoding, on average. Over 256 tokens that is 1.7 %.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding.tree import StaticTree, TreeConfig

FIRST_GUESS = 0.5
"""Acceptance of a chain's draft before anything was seen."""
GUESS_WEIGHT = 1.5
"""Tested drafts that the guess counts for."""
OTHERS_WEIGHT = 30.0
"""Tested drafts that the record of the other rungs counts for, when it speaks about one."""
MEMORY = 24.0
"""Tested drafts of a rung that are remembered: older ones fade."""
FADING = 0.95
"""What is left of the record of a rung after a round of another one that drafts: nothing is held against it for ever."""
GAIN = 0.18
"""Gain of a tree for each doubling of its nodes a level."""
PROBE_BUDGETS = 0.05, 0.01
"""Largest and smallest share of the time that may be lost by trying to draft where plain decoding is best."""
LOSS, LOSS_RATE = 3.0, 0.005
"""What drafting may lose in all: plain rounds, and a share of the time."""
UNDECIDED = -1
"""Value of `LadderState.rung` where the choice is to be made anew."""
DUE_ROWS = 32
"""Rows of features that plain rounds collect before the draft head must encode them."""


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Shapes of rounds; it stands where a single tree could."""

    rungs: tuple[TreeConfig | StaticTree | None, ...]
    """Draft trees; the first rung is None: plain decoding."""

    def __post_init__(self) -> None:
        if len(self.rungs) < 2 or self.rungs[0] is not None or None in self.rungs[1:]:
            raise ValueError(
                f"a ladder has plain decoding (None) as its first rung and trees after it, got {self.rungs}"
            )
        if len(set(self.rungs)) != len(self.rungs):
            raise ValueError(f"the rungs of a ladder must differ, got {self.rungs}")

    @property
    def trees(self) -> tuple[TreeConfig | StaticTree, ...]:
        """The rungs that draft."""
        return tuple(rung for rung in self.rungs if rung is not None)

    @property
    def deepest(self) -> TreeConfig | StaticTree:
        """The rung that can accept most drafts."""
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
        """Drafted nodes of a round of each rung."""
        return tuple(0 if rung is None else rung.total_tokens - 1 for rung in self.rungs)

    @property
    def depths(self) -> tuple[int, ...]:
        """Drafts that a round of each rung can accept."""
        return tuple(0 if rung is None else rung.max_depth for rung in self.rungs)

    @property
    def due_rows(self) -> int:
        """Rows of features that are kept until the head encodes them."""
        return max(DUE_ROWS, self.max_depth + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LadderState:
    """What the choice of rungs rests on. R rungs, plain decoding among them."""

    costs: jax.Array
    """Time of a round of each rung in any unit, float32 `[R]`."""
    accepted: jax.Array
    """Drafts of each rung that were accepted, older ones faded, float32 `[B, R]`."""
    tested: jax.Array
    """Drafts whose predecessor was accepted, so that the target decided about them; float32 `[B, R]`, faded alike."""
    plain_rounds: jax.Array
    """Plain rounds since something was drafted, int32 scalar."""
    probe_budget: jax.Array
    """Share of the time that the next attempt to draft may cost, float32 scalar."""
    in_hand: jax.Array
    """Plain rounds that may be lost from here on, float32 scalar: the allowance, and what was won or lost by drafting."""
    rung: jax.Array
    """The rung of the next round, or `UNDECIDED`, int32 scalar."""

    @staticmethod
    def empty(ladder: Ladder, slots: int) -> "LadderState":
        """Before any round, with costs that are all the same."""
        rungs = len(ladder.rungs)
        zeros = jnp.zeros((slots, rungs), jnp.float32)
        zero = jnp.zeros((), jnp.int32)
        return LadderState(
            costs=jnp.ones((rungs,), jnp.float32),
            accepted=zeros,
            tested=jnp.zeros_like(zeros),
            plain_rounds=zero,
            probe_budget=jnp.asarray(PROBE_BUDGETS[0], jnp.float32),
            in_hand=jnp.asarray(LOSS, jnp.float32),
            rung=jnp.zeros((), jnp.int32),
        )

    def restart(self, costs: jax.Array | None = None) -> "LadderState":
        """Forgets what belongs to all slots together; `costs`, float32 `[R]`, take the place of the present ones."""
        return dataclasses.replace(
            self,
            costs=self.costs if costs is None else costs,
            plain_rounds=jnp.zeros_like(self.plain_rounds),
            probe_budget=jnp.full_like(self.probe_budget, PROBE_BUDGETS[0]),
            in_hand=jnp.full_like(self.in_hand, LOSS),
        )

    def start(self, slot: jax.Array) -> "LadderState":
        """Forgets the request that had a slot before. What belongs to all slots stays, unless there is only one."""
        fresh = self.restart() if self.tested.shape[0] == 1 else self
        return dataclasses.replace(
            fresh,
            accepted=self.accepted.at[slot].set(0.0),
            tested=self.tested.at[slot].set(0.0),
        )

    def record(self, ladder: Ladder, rung: int, counts: jax.Array, running: jax.Array) -> "LadderState":
        """Takes note of a round of one rung, and picks the next.

        Args:
          ladder: the rungs.
          rung: which one was run.
          counts: accepted drafts, int32 `[B]`.
          running: slots that took part, bool `[B]`.
        """
        emitted = 1 + jnp.sum(jnp.where(running, counts, 0)) / jnp.maximum(jnp.sum(running), 1)
        time = self.costs[rung] / self.costs[0]
        in_hand = self.in_hand + emitted - time * (1 - LOSS_RATE)
        if rung == 0:
            return dataclasses.replace(self, plain_rounds=self.plain_rounds + 1, in_hand=in_hand)
        accepted = counts.astype(jnp.float32)
        tested = accepted + (counts < ladder.depths[rung])
        here = jnp.arange(len(ladder.rungs)) == rung
        fade = jnp.where(here, jnp.minimum(1.0, MEMORY / (self.tested[:, rung] + tested))[:, None], FADING)

        def add(total: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(running[:, None], (total + here * new[:, None]) * fade, total)

        # The first round after plain ones is an attempt.
        in_vain = jnp.where(self.plain_rounds > 0, self.probe_budget / 2, self.probe_budget)
        budget = jnp.clip(jnp.where(emitted < time, in_vain, 2 * self.probe_budget), PROBE_BUDGETS[1], PROBE_BUDGETS[0])
        return dataclasses.replace(
            self,
            accepted=add(self.accepted, accepted),
            tested=add(self.tested, tested),
            plain_rounds=jnp.zeros_like(self.plain_rounds),
            probe_budget=budget,
            in_hand=in_hand,
        )

    def choose(self, ladder: Ladder, running: jax.Array) -> "LadderState":
        """Picks the next rung for the running slots, bool `[B]`."""
        yields = jnp.where(running[:, None], self.expected_lengths(ladder), 0).sum(axis=0)  # [R]
        affordable = (self.costs / self.costs[0] - 1 <= self.in_hand).at[0].set(True)
        best = jnp.argmax(jnp.where(affordable, yields / self.costs, -1.0)).astype(jnp.int32)
        cheapest = jnp.argmin(self.costs[1:]).astype(jnp.int32) + 1
        return dataclasses.replace(self, rung=jnp.where((best == 0) & self.probing, cheapest, best))

    @property
    def probing(self) -> jax.Array:
        """Whether so many plain rounds were run that one of the cheapest drafting rung may be lost, bool scalar."""
        lost = self.costs[1:].min() / self.costs[0] - 1  # plain rounds that a round in vain costs
        due = self.plain_rounds * self.probe_budget >= jnp.maximum(lost, self.probe_budget)
        return due & (lost <= self.in_hand)

    def expected_lengths(self, ladder: Ladder) -> jax.Array:
        """Tokens that a round of each rung is expected to emit, float32 `[B, R]`."""
        gains = np.array([gain(rung) for rung in ladder.trees], np.float32)
        depths = np.array(ladder.depths[1:], np.float32)
        accepted, tested = self.accepted[:, 1:], self.tested[:, 1:]
        guess = np.float32(-math.log(1 - FIRST_GUESS))
        # What each rung says about chains, and together with the first guess.
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


def forced(ladder: Ladder, rung: int) -> np.ndarray:
    """Costs with which one rung is always run, float32 `[R]`."""
    costs = np.full((len(ladder.rungs),), 1e30, np.float32)
    costs[rung] = 1.0
    return costs
