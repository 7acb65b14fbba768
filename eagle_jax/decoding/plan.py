"""What is static about a decoding configuration, and the parameters that its programs take."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from eagle_jax.decoding.adaptive import AdaptiveSpeculation
from eagle_jax.decoding.report import ReportLayout, report_tokens
from eagle_jax.decoding.rules import SEEDED, Rule
from eagle_jax.decoding.state import cache_capacity
from eagle_jax.drafters.base import Drafter
from eagle_jax.drafters.registry import DrafterSpec, build_drafter
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.models.llama import Llama
from eagle_jax.models.module_def import ModuleDef
from eagle_jax.parallel.mesh import data_groups
from eagle_jax.sampling.params import SamplingMode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters of target and drafter. Arguments of every program, never constants in it."""

    target: Any
    """As `ModuleDef.split` gives them."""
    draft: Any
    """The same of the drafter's module, or any pytree of arrays that the drafter understands; None without one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything static about a decoding configuration. Equal plans share their compiled programs."""

    target_def: ModuleDef[Llama]
    """Structure and configuration of the target module."""
    drafter: DrafterSpec | None
    """What drafts; None decodes plainly."""
    tree: TreeConfig | StaticTree | AdaptiveSpeculation | None
    """Shape of the draft trees, or several to choose from; None exactly when there is no drafter."""
    slots: int
    """Sequences decoded side by side: B."""
    max_length: int
    """Tokens of the longest sequence, prompt and output."""
    prefill_chunk: int
    """Prompt tokens run at once: C."""
    max_stop_ids: int = 8
    """Stop ids a slot can have: E."""
    mode: SamplingMode = SamplingMode.GREEDY
    """What requests of these rounds can ask for. Plans that differ in nothing else have the same state."""
    rule: Rule = SEEDED
    """How drafts are made and accepted in slots that sample; means nothing in greedy rounds."""
    processed_logprobs: bool = False
    """Whether log-probabilities are those of the processed distribution."""
    shape_invariant: bool = False
    """Whether a token's logits have the same bits however many drafts were accepted before it (chains only)."""
    mesh: Mesh | None = None
    """The devices (`eagle_jax.parallel.make_mesh`); None is one."""

    @property
    def capacity(self) -> int:
        """Rows of the caches: S."""
        path = self.due_rows or self.max_depth + 1
        return cache_capacity(self.max_length, self.prefill_chunk, path, idle_prefills=self.groups > 1)

    @property
    def due_rows(self) -> int | None:
        """Tokens that a drafter can fall behind where some rounds are not drafted; None where all are."""
        return self.tree.due_rows if isinstance(self.tree, AdaptiveSpeculation) else None

    @property
    def groups(self) -> int:
        """Groups of devices that the slots are split over."""
        return data_groups(self.mesh)

    @property
    def group_slots(self) -> int:
        """Slots of one group: slot s belongs to group `s // group_slots`."""
        return self.slots // self.groups

    @property
    def max_depth(self) -> int:
        """Most drafted tokens that a round can accept: D."""
        return 0 if self.tree is None else self.tree.max_depth

    @property
    def report_tokens(self) -> int:
        """Tokens of a slot that a report holds at most: W."""
        return report_tokens(self.max_depth)

    @property
    def layout(self) -> ReportLayout:
        """What reports look like."""
        drafted: tuple[int, ...] = (0,) if self.tree is None else (self.tree.total_tokens - 1,)
        if isinstance(self.tree, AdaptiveSpeculation):
            drafted = self.tree.drafted
        return ReportLayout(depth=self.max_depth, tokens=self.report_tokens, drafted=drafted)

    def modules(self, weights: Weights) -> tuple[Llama, Drafter]:
        """The target and the drafter around given weights; of several trees the drafter grows the deepest."""
        target = self.target_def.merge(weights.target)
        if self.shape_invariant and target.shards > 1:
            target.sum_in_order()
        deepest = self.tree.deepest if isinstance(self.tree, AdaptiveSpeculation) else self.tree
        return target, self.drafter_of(deepest, target, weights)

    def drafter_module(self, weights: Weights) -> nnx.Module | None:
        """The module that the drafter runs, if it is one."""
        if self.drafter is None or self.drafter.module is None:
            return None
        return self.drafter.module.merge(weights.draft)

    def drafter_of(self, tree: TreeConfig | StaticTree | None, target: Llama, weights: Weights) -> Drafter:
        """The drafter that grows trees of one shape, or none."""
        return build_drafter(self.drafter, target, weights.draft, tree, drafts=self.rule.drafts, due_rows=self.due_rows)
