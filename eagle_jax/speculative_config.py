"""`SpeculativeConfig`: which draft head to use and what trees it grows, from the dictionary that vLLM users know."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from eagle_jax.decoding.adaptive import AdaptiveSpeculation
from eagle_jax.decoding.rules import SEEDED, Rule, check_rule, make_rule
from eagle_jax.drafters.tree import NAMED_TREES, StaticTree, TreeConfig
from eagle_jax.loading import Draft
from eagle_jax.models import DraftConfig

METHODS = ("eagle", "eagle3")

Tree = TreeConfig | StaticTree | AdaptiveSpeculation
AUTO: Literal["auto"] = "auto"
"""In the place of a tree: adaptive speculation with the `default_candidates` of the platform."""
TreeArgument = Tree | Mapping[str, int] | str | Sequence[Sequence[int]]
"""A tree as callers may give it: see `tree_config`."""

# Keys that vLLM users put here by mistake or from another version, and what to do instead.
_ADVICE = {
    "tensor_parallel_size": "use draft_tensor_parallel_size, or tensor_parallel_size of LLM for the target",
    "max_model_len": "speculation is never switched off by length; set max_model_len of LLM to bound prompt and output",
    "quantization": "give an unquantised head",
    "code_revision": "no code is ever taken from a checkpoint",
    "speculative_token_tree": "give it as tree",
    "disable_by_batch_size": "give tree 'auto', which decodes plainly wherever that is faster",
    "parallel_drafting": "heads that draft all tokens in one pass are not supported",
    "prompt_lookup_max": "n-gram lookup is not supported; give an EAGLE head as model",
    "prompt_lookup_min": "n-gram lookup is not supported; give an EAGLE head as model",
}
_ADVICE |= dict.fromkeys(
    ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "n"),
    "this is a matter of each request; set it in SamplingParams",
)
_ADVICE |= dict.fromkeys(
    (
        "dtype",
        "tokenizer",
        "trust_remote_code",
        "gpu_memory_utilization",
        "max_num_seqs",
        "download_dir",
        "enforce_eager",
    ),
    "the draft head shares this with the target; set it as a keyword of LLM",
)


_LOADING = (
    "method", "revision", "draft_tensor_parallel_size", "rope_theta", "layer_id_convention", "config_overrides",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Which draft head to use and what trees it grows."""

    model: str | Path | Draft
    """Folder or repository of the draft head; or the loaded one."""
    tree: Tree | Literal["auto"] | None = None
    """Shape of the draft trees; a chain is a `TreeConfig` with `top_k` 1. "auto" chooses one before each round. None takes
    `default_tree`."""
    method: Literal["eagle", "eagle3"] | None = None
    """"eagle" (EAGLE-1 and -2), "eagle3", or None to take what the checkpoint is."""
    revision: str | None = None
    """Branch, tag or commit of the head's repository."""
    rope_theta: float | None = None
    """Rotary base of the head, in place of the one in its config.json."""
    layer_id_convention: Literal["input", "output"] | None = None
    """What layer numbers in the head's config.json mean, "input" or "output"; see `load_draft`."""
    config_overrides: Mapping[str, Any] | None = None
    """Values for keys of the head's config.json."""
    draft_tensor_parallel_size: int | None = None
    """Devices that share the head: 1, or as many as share the target, which None takes; see `load_draft`."""
    rule: Rule = SEEDED
    """How drafts are made and accepted where tokens are sampled."""

    def __post_init__(self) -> None:
        if self.tree is not None:
            check_shape(self.rule, self.tree)

    @staticmethod
    def from_dict(config: "Mapping[str, Any] | SpeculativeConfig") -> "SpeculativeConfig":
        """Reads `speculative_config` as given to `LLM`.

        Keys: `model` (required), at most one of `num_speculative_tokens` (a chain of so many drafted tokens) and `tree`
        (`{"total_tokens": 60, "depth": 7, "top_k": 10}`, a dynamic tree; "auto", adaptive speculation; others: `tree_config`;
        without either `default_tree`), and `method`, `revision`, `draft_tensor_parallel_size` (1 or the target's),
        `rope_theta`, `layer_id_convention`, `config_overrides` (see `load_draft`); for requests that sample
        `rejection_sample_method`, `draft_sample_method`, `synthetic_acceptance_rates` and `synthetic_acceptance_length` (see
        `make_rule`). A key whose value is None counts as absent, as in vLLM.

        Raises:
          TypeError: `config` is no mapping.
          ValueError: an unknown or misplaced key, a missing one, or a value that is not supported; the message says what to do.
        """
        if isinstance(config, SpeculativeConfig):
            return config
        if not isinstance(config, Mapping):
            raise TypeError(f"speculative_config must be a dictionary, got {config!r}")
        given = {key: value for key, value in config.items() if value is not None}
        rule_keys = (
            "rejection_sample_method",
            "draft_sample_method",
            "synthetic_acceptance_rates",
            "synthetic_acceptance_length",
        )
        known = {
            "model",
            "num_speculative_tokens",
            "tree",
            *_LOADING,
            *rule_keys,
        }
        for key in given:
            if key in _ADVICE:
                raise ValueError(f"speculative_config has the key {key!r}, which does not belong there: {_ADVICE[key]}")
            if key not in known:
                raise ValueError(
                    f"speculative_config has the unknown key {key!r}; known keys are {', '.join(sorted(known))}"
                )
        method = given.get("method")
        if method is not None and method not in METHODS:
            raise ValueError(
                f"speculative_config method {method!r} is not supported; supported are {', '.join(map(repr, METHODS))} "
                "(leave method out to take what the checkpoint is)"
            )
        if "model" not in given:
            raise ValueError("speculative_config lacks model: the folder or repository of the draft head")
        model = given["model"]
        if isinstance(model, Draft):
            if extra := [key for key in _LOADING if key in given]:
                raise ValueError(
                    f"{', '.join(extra)} cannot be given with a model that is loaded; give them to load_draft"
                )
        elif not isinstance(model, str | Path) or not str(model):
            raise ValueError(f"speculative_config model must be a path or a repository, got {model!r}")
        parallel = given.get("draft_tensor_parallel_size")
        if parallel is not None and (isinstance(parallel, bool) or not isinstance(parallel, int) or parallel < 1):
            raise ValueError(f"draft_tensor_parallel_size must be 1 or tensor_parallel_size, got {parallel!r}")
        theta = given.get("rope_theta")
        if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 1):
            raise ValueError(f"speculative_config rope_theta must be a number greater than 1, got {theta!r}")
        convention = given.get("layer_id_convention")
        if convention not in (None, "input", "output"):
            raise ValueError(f"speculative_config layer_id_convention must be 'input' or 'output', got {convention!r}")
        overrides = given.get("config_overrides")
        if overrides is not None and not isinstance(overrides, Mapping):
            raise ValueError(f"speculative_config config_overrides must be a dictionary, got {overrides!r}")
        tree = tree_config(given.get("num_speculative_tokens"), given.get("tree"), where="speculative_config")
        return SpeculativeConfig(
            model=model,
            tree=tree,
            rule=make_rule(**{key: given.get(key) for key in rule_keys}),
            method=method,
            revision=given.get("revision"),
            rope_theta=theta,
            layer_id_convention=convention,
            config_overrides=overrides,
            draft_tensor_parallel_size=parallel,
        )


DEFAULT_TREES = {
    "eagle": TreeConfig(total_tokens=60, depth=5, top_k=10),
    "eagle3": TreeConfig(total_tokens=60, depth=7, top_k=10),
}
"""What the authors of EAGLE draft with, by method."""


def default_tree(draft: Draft) -> TreeConfig:
    """What a head drafts where the caller asks for nothing: the chain its checkpoint asks for, else its method's default tree.

    Args:
      draft: the loaded head. A tree is made smaller where the head has fewer tokens to choose from than its `top_k`.
    """
    if draft.num_speculative_tokens is not None:
        return TreeConfig.chain(draft.num_speculative_tokens)
    tree = DEFAULT_TREES[draft.config.method]
    return _tree(draft.config, tree.total_tokens, tree.depth, tree.top_k)


def default_candidates(
    head: DraftConfig, platform: str, num_speculative_tokens: int | None = None
) -> AdaptiveSpeculation:
    """The candidates of "auto": plain decoding, short chains and trees; no trees on a CPU, where every row costs time.

    Args:
      head: configuration of the head. Trees are made smaller where it has few tokens to choose from.
      platform: "cpu", "gpu" or "tpu".
      num_speculative_tokens: length of the chain that the head's checkpoint asks for, which is then a candidate too.
    """
    if platform == "cpu":
        trees = [TreeConfig.chain(1), TreeConfig.chain(3), TreeConfig.chain(5)]
    else:
        largest = DEFAULT_TREES[head.method]
        sizes = (largest.total_tokens, largest.depth, largest.top_k)
        trees = [TreeConfig.chain(2), TreeConfig.chain(4), _tree(head, 16, 3, 4), _tree(head, *sizes)]
    if num_speculative_tokens is not None:
        trees.append(TreeConfig.chain(num_speculative_tokens))
    return AdaptiveSpeculation((None, *dict.fromkeys(trees)))


def _tree(head: DraftConfig, total_tokens: int, depth: int, top_k: int) -> TreeConfig:
    """A tree, made smaller where the head has fewer tokens to choose from than `top_k`."""
    top_k = min(top_k, head.draft_vocab_size)
    reachable = 1 + top_k + depth * top_k**2
    return TreeConfig(total_tokens=min(total_tokens, reachable), depth=depth, top_k=top_k)


def check_shape(rule: Rule, tree: Tree | Literal["auto"]) -> None:
    """Raises ValueError if a rule does not go together with a tree, or with several to choose from."""
    if not isinstance(tree, str | AdaptiveSpeculation):
        check_rule(rule, tree)
    elif rule.name != "seeded":
        raise ValueError(
            f"rejection_sample_method {rule.name!r} works with one shape of trees, but tree is {AUTO!r}; give one, or "
            "use 'seeded'"
        )


def tree_config(
    num_speculative_tokens: int | None, tree: TreeArgument | None, *, where: str
) -> Tree | Literal["auto"] | None:
    """The tree that one of two arguments describes; None if neither is given.

    Args:
      num_speculative_tokens: length of a chain.
      tree: a dynamic tree, as `TreeConfig` or as a mapping of its three fields; or a static tree, as `StaticTree`, as a list of
        paths, or by a name in `NAMED_TREES`; or "auto", or an `AdaptiveSpeculation`, for several shapes to choose from.
      where: who asks, for the messages.

    Raises:
      ValueError: both are given, or a tree that cannot be.
    """
    if num_speculative_tokens is not None and tree is not None:
        raise ValueError(f"{where} has both num_speculative_tokens (a chain) and tree; give one of them")
    if num_speculative_tokens is not None:
        return TreeConfig.chain(num_speculative_tokens)
    if tree is None or isinstance(tree, Tree):
        return tree
    if isinstance(tree, str):
        if tree == AUTO:
            return AUTO
        if tree not in NAMED_TREES:
            raise ValueError(f"tree {tree!r} is not known; known are {', '.join(map(repr, (AUTO, *NAMED_TREES)))}")
        return NAMED_TREES[tree]
    if isinstance(tree, list | tuple) and all(isinstance(path, list | tuple) for path in tree):
        return StaticTree.from_paths(tree)
    names = [field.name for field in dataclasses.fields(TreeConfig)]
    if not isinstance(tree, Mapping):
        raise ValueError(f"tree must be a mapping with {', '.join(names)}, a list of paths, or a name, got {tree!r}")
    if unknown := [key for key in tree if key not in names]:
        raise ValueError(f"tree has unknown keys {unknown}; it has {', '.join(names)}")
    if missing := [name for name in names if name not in tree]:
        raise ValueError(f"tree lacks {', '.join(missing)}")
    return TreeConfig(**tree)
