"""What a drafter is, what it may see, and what it is told about a round."""

import abc
import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from eagle_jax.drafters.tree import DraftTree
from eagle_jax.parallel.mesh import DATA
from eagle_jax.sampling.settings import SlotSettings

Memory = Any
"""What a drafter keeps between rounds: a pytree of its own whose arrays have the axis B in front. Nobody else looks into it."""


class Drafts(enum.Enum):
    """How a drafter picks the children of a node in slots that sample."""

    LIKELIEST = enum.auto()
    """The likeliest, as in greedy decoding."""
    SHARED_NOISE = enum.auto()
    """The largest sums of log-probability and the noise that the target will draw with at this position."""
    SAMPLED = enum.auto()
    """Drawn without replacement from the head's distribution, which is kept for the test of acceptance."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftView:
    """What a drafter may see of B slots."""

    tokens: jax.Array
    """Prompt and output of each slot, int32 `[B, S]`; the pending root is at index `lengths`."""
    lengths: jax.Array
    """Tokens before the root, int32 `[B]`."""
    running: jax.Array
    """bool `[B]`; what is drafted for other slots is lost."""
    settings: SlotSettings | None
    """How tokens are chosen, noise included; None in greedy rounds."""

    @property
    def roots(self) -> jax.Array:
        """The pending token of each slot, int32 `[B]`."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None], axis=1)[:, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a round decided."""

    lengths: jax.Array
    """Tokens before the root of this round, int32 `[B]`."""
    emitted: jax.Array
    """Tokens that the round emitted, the bonus included, int32 `[B]`; 0 for slots that do not run."""
    tokens: jax.Array
    """The emitted tokens, int32 `[B, D + 1]`, of which `emitted` are valid."""
    states: jax.Array
    """Auxiliary hidden states of the target at the root and the accepted drafts, `[B, D + 1, F]`; `emitted` are valid."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """One chunk of a slot's prompt, of C tokens, that the target has read."""

    slot: jax.Array
    """int32 scalar."""
    start: jax.Array
    """Position of the first token, int32 scalar."""
    next_tokens: jax.Array
    """The token after each of the C tokens, int32 `[1, C]`."""
    states: jax.Array
    """Auxiliary hidden states of the target, `[1, C, F]`."""
    valid: jax.Array
    """How many of the C tokens belong to the prompt, int32 scalar of at least 1. The token after the last of them is not known
    before the target's logits are."""


class Drafter(abc.ABC):
    """Proposes a tree for every slot. It is built inside the compiled programs, around the modules that it reads."""

    num_nodes: int
    """Nodes of a tree, the root included: N."""
    max_depth: int
    """Most drafted tokens that a round can accept: D."""
    shards: int = 1
    """Devices that share the parameters."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states the drafter reads (`Llama.__call__`)."""
        return ()

    @abc.abstractmethod
    def init(self, slots: int, capacity: int) -> Memory:
        """The memory before any prompt, for sequences in `capacity` rows."""

    def prefill(self, memory: Memory, reading: Reading) -> Memory:
        """Takes in a chunk of a prompt."""
        del reading
        return memory

    @abc.abstractmethod
    def propose(self, memory: Memory, view: DraftView) -> tuple[DraftTree, Memory]:
        """Grows a tree on each slot's pending root."""

    def observe(self, memory: Memory, outcome: Outcome) -> Memory:
        """Learns what became of a round, drafted or not."""
        del outcome
        return memory

    # What follows has a meaning for drafters that fall behind when rounds are not drafted, and for those with large buffers.

    backlog_room: int = 2**30
    """The largest `backlog` with which `propose` works."""

    def backlog(self, memory: Memory, view: DraftView) -> jax.Array:
        """Tokens of each slot that the drafter has not worked through, int32 `[B]`."""
        del memory
        return jnp.zeros_like(view.lengths)

    def catch_up(self, memory: Memory, view: DraftView) -> Memory:
        """Works the backlog through, but for what the next `propose` does."""
        del view
        return memory

    def assume(self, memory: Memory, lengths: jax.Array) -> Memory:
        """The memory as if `lengths` int32 `[B]` tokens of each slot were worked through but for the last: for measurements."""
        del lengths
        return memory

    def specs(self, memory: Memory) -> Memory:
        """How the memory is split over a mesh: slots over the data-parallel groups."""
        return jax.tree.map(lambda _: PartitionSpec(DATA), memory)

    def choose(self, active: jax.Array, new: Memory, old: Memory) -> Memory:
        """`new` where `active` (bool scalar), else `old`. Buffers whose new rows are no sequence's may be taken from `new`."""
        return jax.tree.map(lambda a, b: a if a is b else jnp.where(active, a, b), new, old)


@dataclasses.dataclass(frozen=True)
class Undrafted(Drafter):
    """Rounds without drafts, of which a drafter is told all the same, because it will go on later."""

    drafter: Drafter
    num_nodes: int = 1
    max_depth: int = 0

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The drafter's, which goes on later."""
        return self.drafter.aux_layers

    def init(self, slots: int, capacity: int) -> Memory:
        """The drafter's."""
        return self.drafter.init(slots, capacity)

    def propose(self, memory: Memory, view: DraftView) -> tuple[DraftTree, Memory]:
        """The root alone."""
        return DraftTree.only_root(view.roots), memory

    def observe(self, memory: Memory, outcome: Outcome) -> Memory:
        """As the drafter does."""
        return self.drafter.observe(memory, outcome)
