"""`EngineConfig`: every setting of an engine, in one place, checked once."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
from flax import nnx

from eagle_jax.decoding.adaptive import AdaptiveSpeculation
from eagle_jax.decoding.rules import SEEDED, Rule
from eagle_jax.drafters.registry import check_method
from eagle_jax.loading import Draft, Target
from eagle_jax.models import LlamaConfig
from eagle_jax.parallel.mesh import data_groups
from eagle_jax.sampling.params import check_seed
from eagle_jax.speculative_config import AUTO, Tree, check_shape, default_candidates, default_tree

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
SMALLEST_CAPACITY = 256
DEFAULT_MAX_NUM_SEQS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine decodes; `resolve` makes one for a target and a draft head, with defaults for what is not given.

    Raises:
      ValueError: a value that cannot be, or several that contradict each other.
      TypeError: `tree` is none.
    """

    max_model_len: int
    """Most tokens of prompt and output together."""
    max_num_seqs: int
    """Sequences decoded side by side, by all data-parallel groups together: B."""
    prefill_chunk: int
    """Prompt tokens read at once: C."""
    tree: Tree | None = None
    """Shape of the draft trees, or several to choose from; None decodes plainly."""
    method: str = "eagle3"
    """What drafts, by its name in `eagle_jax.drafters.registry`; means nothing without a tree."""
    rule: Rule = SEEDED
    """How drafts are made and accepted where tokens are sampled (`make_rule`)."""
    logprobs_mode: str = LOGPROBS_MODES[0]
    """Whose log-probabilities are reported: "raw_logprobs", the model's own, or "processed_logprobs", those of the distribution
    that is sampled."""
    shape_invariant: bool = False
    """Whether a token's logits have the same bits however many drafts were accepted before it; chains only."""
    seed: int | None = None
    """Makes the seeds of requests that give none a reproducible sequence."""
    max_stop_ids: int = 8
    """Stop ids that a request can have: E."""

    def __post_init__(self) -> None:
        for name, least in (("max_model_len", 2), ("max_num_seqs", 1), ("prefill_chunk", 1), ("max_stop_ids", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(
                f"logprobs_mode must be {' or '.join(map(repr, LOGPROBS_MODES))}, got {self.logprobs_mode!r}"
            )
        if self.seed is not None:
            check_seed(self.seed)
        check_method(self.method)
        tree = self.tree
        if tree is not None and not isinstance(tree, Tree):
            raise TypeError(f"tree must be a TreeConfig, a StaticTree, AdaptiveSpeculation or {AUTO!r}, got {tree!r}")
        if tree is not None:
            check_shape(self.rule, tree)
        if self.shape_invariant:
            if tree is None:
                raise ValueError("shape_invariant needs a draft, whose rounds plain decoding then runs too")
            if isinstance(tree, AdaptiveSpeculation) or tree.total_tokens != tree.max_depth + 1:
                raise ValueError(f"shape_invariant works on chains, but tree is {tree}; give num_speculative_tokens")
            if not self.rule.exact_match:
                raise ValueError(
                    "shape_invariant works with rejection_sample_method 'seeded', but it is "
                    f"{self.rule.rejection_sample_method!r}"
                )

    @staticmethod
    def resolve(
        target: Target,
        draft: Draft | None,
        *,
        tree: Tree | Literal["auto"] | None = None,
        rule: Rule = SEEDED,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        prefill_chunk: int | None = None,
        **settings: object,
    ) -> "EngineConfig":
        """The configuration for loaded models.

        Args:
          target: what `load_target` returned.
          draft: what `load_draft` returned for it; None decodes plainly, whatever `tree` and `rule` say.
          tree: as the field; "auto" takes the candidates of the platform, None the `default_tree` of the draft.
          rule: as the field.
          max_model_len: as the field; None takes what the model is made for.
          max_num_seqs: as the field; None takes 8, or what the data-parallel groups can share from there on.
          prefill_chunk: as the field; None takes 64 on CPU and 256 on accelerators.
          **settings: further fields.

        Raises:
          TypeError: a target or draft that was not loaded, or an unknown setting.
          ValueError: as the class; a draft head made for another target; more than the model or the mesh allows.
        """
        if not isinstance(target, Target):
            raise TypeError(f"target must be what load_target returns, got {target!r}")
        platform, groups = device_of(target.model).platform, data_groups(target.mesh)
        shape = None if draft is None else _tree_for(target, draft, tree, platform)
        if isinstance(shape, AdaptiveSpeculation) and jax.process_count() > 1:
            raise ValueError(
                f"tree 'auto' is measured by the clock of one process, and there are {jax.process_count()}; give a tree or "
                "num_speculative_tokens"
            )
        config = EngineConfig(
            tree=shape,
            rule=SEEDED if draft is None else rule,
            method=EngineConfig.method if draft is None else draft.config.method,
            max_model_len=context_length(target.config) if max_model_len is None else max_model_len,
            max_num_seqs=-(-DEFAULT_MAX_NUM_SEQS // groups) * groups if max_num_seqs is None else max_num_seqs,
            prefill_chunk=(64 if platform == "cpu" else 256) if prefill_chunk is None else prefill_chunk,
            **settings,  # type: ignore[arg-type]
        )
        if config.max_model_len > (context := context_length(target.config)):
            raise ValueError(
                f"max_model_len {max_model_len} exceeds the {context} tokens that the model's config.json allows"
            )
        if config.max_num_seqs % groups:
            raise ValueError(f"max_num_seqs {max_num_seqs} is no multiple of data_parallel_size {groups}")
        return config

    def for_call(self, *, prompts: int, tokens: int, stop_ids: int, groups: int) -> "EngineConfig":
        """The configuration of a closed call, in one of a few sizes so that calls share programs: powers of two.

        Args:
          prompts: in the call.
          tokens: of its longest sequence, prompt and output.
          stop_ids: the most that one of its requests has.
          groups: data-parallel groups.
        """
        return dataclasses.replace(
            self,
            max_num_seqs=min(_power_of_two(-(-prompts // groups)) * groups, self.max_num_seqs),
            max_model_len=min(_power_of_two(max(tokens, SMALLEST_CAPACITY)), self.max_model_len),
            max_stop_ids=_power_of_two(max(stop_ids, 8)),
        )

    @property
    def max_depth(self) -> int:
        """Drafts that one round can accept at most: D."""
        return 0 if self.tree is None else self.tree.max_depth


def context_length(config: LlamaConfig) -> int:
    """Tokens that a model is made for, prompt and output.

    `max_position_embeddings`, times the factor where rotary scaling extends it without the config saying so (linear, dynamic;
    yarn from its original length), as vLLM derives it.
    """
    rope, positions = config.rope, config.max_position_embeddings
    if rope.rope_type in ("linear", "dynamic"):
        return int(positions * rope.factor)
    if rope.rope_type == "yarn":
        return max(positions, int(rope.original_max_position_embeddings * rope.factor))
    return positions


def device_of(model: nnx.Module) -> jax.Device:
    """The first of this process's devices that hold a module."""
    array = jax.tree.leaves(nnx.state(model))[0]
    return min(array.sharding.addressable_devices, key=lambda device: device.id)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _tree_for(target: Target, draft: Draft, tree: Tree | Literal["auto"] | None, platform: str) -> Tree:
    """Makes sure that head and target belong together; returns the tree, or the head's default."""
    if not isinstance(draft, Draft):
        raise TypeError(f"draft must be what load_draft returns, got {draft!r}")
    if tree is None:
        tree = default_tree(draft)
    elif isinstance(tree, str) and tree == AUTO:
        tree = default_candidates(draft.config, platform, draft.num_speculative_tokens)
    sizes: Mapping[str, tuple[int, int]] = {
        "hidden_size": (draft.config.target_hidden_size, target.config.hidden_size),
        "vocab_size": (draft.config.vocab_size, target.config.vocab_size),
    }
    for name, (made_for, given) in sizes.items():
        if made_for != given:
            raise ValueError(
                f"the draft head {draft.name} is for a target of {name} {made_for}, but {target.name} has {given}"
            )
    if draft.config.capture_layers[-1] > target.config.num_hidden_layers:
        raise ValueError(
            f"the draft head {draft.name} reads layer {draft.config.capture_layers[-1]} of its target, but {target.name} has "
            f"{target.config.num_hidden_layers} layers"
        )
    if isinstance(tree, Tree) and tree.top_k > draft.config.draft_vocab_size:
        raise ValueError(
            f"tree top_k {tree.top_k} exceeds the {draft.config.draft_vocab_size} tokens that {draft.name} can draft"
        )
    return tree
