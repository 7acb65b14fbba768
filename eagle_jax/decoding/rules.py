"""How drafts are made and accepted when tokens are sampled, in vLLM's words, and which combinations there are."""

import dataclasses
import itertools
from collections.abc import Sequence

from eagle_jax.drafters.base import Drafts
from eagle_jax.drafters.tree import StaticTree, TreeConfig

REJECTION_METHODS = ("seeded", "standard", "block", "recursive", "traversal", "synthetic")
DRAFT_METHODS = ("greedy", "probabilistic")
_SYNTHETIC = ("synthetic_acceptance_rates", "synthetic_acceptance_length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """How drafted tokens are accepted where tokens are sampled.

    At temperature 0 a draft is accepted if it is the target's likeliest token, by all rules but *synthetic*.

    - *seeded*, the default: the target draws one token at each position, by noise that depends on the seed and the position
      alone, and a draft is accepted if it is that token. The output is the one of plain decoding with that seed, whatever is
      drafted.
    - *standard*: a draft is accepted with probability min(1, p / q), and the residual distribution is sampled where none is.
      Greedy drafts have q = 1, in trees of any shape; sampled drafts make a chain.
    - *block*: a sampled chain is accepted as a whole (https://arxiv.org/abs/2403.10444), at least as long as by *standard*.
    - *recursive*: *standard* for static trees whose siblings are sampled without replacement (https://arxiv.org/abs/2305.09781).
    - *traversal*: such trees, accepted from the leaves up (https://arxiv.org/abs/2505.12398).
    - *synthetic*: chains accepted at given rates, for measuring speed. The output is *not* the target's.

    Under all but *synthetic* every output has exactly the probability that plain decoding gives it.
    """

    rejection_sample_method: str = "seeded"
    """One of `REJECTION_METHODS`."""
    draft_sample_method: str = "probabilistic"
    """"greedy": the likeliest tokens are drafted. "probabilistic": samples; for *seeded*, those that the target's own noise
    draws from the head's distribution."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """For *synthetic*: the share of rounds that accept the draft at each position, in [0, 1] and not increasing."""
    synthetic_acceptance_length: float | None = None
    """In its place the mean accepted length, 1 to drafted tokens + 1: whole drafts are always accepted, the next one with the
    fraction that is left."""

    def __post_init__(self) -> None:
        method, drafts = self.rejection_sample_method, self.draft_sample_method
        for key, value, known in (
            ("rejection_sample_method", method, REJECTION_METHODS),
            ("draft_sample_method", drafts, DRAFT_METHODS),
        ):
            if value not in known:
                raise ValueError(f"{key} {value!r} is unknown; known are {', '.join(map(repr, known))}")
        if drafts == "greedy" and method in ("block", "recursive", "traversal"):
            raise ValueError(
                f"rejection_sample_method {method!r} needs sampled drafts, but draft_sample_method is 'greedy'; use "
                "draft_sample_method 'probabilistic', or rejection_sample_method 'standard' or 'seeded'"
            )
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        given = [name for name in _SYNTHETIC if getattr(self, name) is not None]
        if method != "synthetic" and given:
            raise ValueError(f"{given[0]} needs rejection_sample_method 'synthetic', which is {method!r}")
        if method == "synthetic" and len(given) != 1:
            raise ValueError(f"rejection_sample_method 'synthetic' needs exactly one of {' and '.join(_SYNTHETIC)}")
        if rates is not None and (
            not all(0 <= rate <= 1 for rate in rates) or any(a < b for a, b in itertools.pairwise(rates))
        ):
            raise ValueError(f"synthetic_acceptance_rates must be in [0, 1] and not increase, got {list(rates)}")
        if length is not None and not length >= 1:
            raise ValueError(f"synthetic_acceptance_length must be at least 1, got {length}")

    def synthetic_rates(self, depth: int) -> tuple[float, ...]:
        """Acceptance at each of `depth` positions, for *synthetic*."""
        if self.synthetic_acceptance_length is None:
            assert self.synthetic_acceptance_rates is not None
            return self.synthetic_acceptance_rates
        accepted = self.synthetic_acceptance_length - 1
        return tuple(min(max(accepted - d, 0.0), 1.0) for d in range(depth))

    @property
    def name(self) -> str:
        """The rejection method."""
        return self.rejection_sample_method

    @property
    def exact_match(self) -> bool:
        """Whether the target draws a token after each node, by the noise of its position."""
        return self.name in ("seeded", "synthetic")

    @property
    def drafts(self) -> Drafts:
        """How children are picked."""
        if self.draft_sample_method == "greedy":
            return Drafts.LIKELIEST
        return Drafts.SHARED_NOISE if self.exact_match else Drafts.SAMPLED


SEEDED = Rule()


def make_rule(
    rejection_sample_method: str | None = None,
    draft_sample_method: str | None = None,
    *,
    synthetic_acceptance_rates: Sequence[float] | None = None,
    synthetic_acceptance_length: float | None = None,
) -> Rule:
    """The rule that a caller asks for, who may leave everything open.

    Args:
      rejection_sample_method: one of `REJECTION_METHODS`; None is "seeded".
      draft_sample_method: one of `DRAFT_METHODS`; None is "greedy" for *standard*, as in vLLM, else "probabilistic".
      synthetic_acceptance_rates: see `Rule`.
      synthetic_acceptance_length: see `Rule`.

    Raises:
      ValueError: an unknown method, or a combination that there is not; the message names both parts.
    """
    method = "seeded" if rejection_sample_method is None else rejection_sample_method
    drafts = draft_sample_method
    if drafts is None:
        drafts = "greedy" if method == "standard" else "probabilistic"
    rates = synthetic_acceptance_rates
    return Rule(
        rejection_sample_method=method,
        draft_sample_method=drafts,
        synthetic_acceptance_rates=None if rates is None else tuple(map(float, rates)),
        synthetic_acceptance_length=synthetic_acceptance_length,
    )


def check_rule(rule: Rule, tree: TreeConfig | StaticTree) -> None:
    """Raises ValueError, naming both, if rule and tree do not go together."""
    method, shape = rule.rejection_sample_method, _shape_of(tree)
    if method in ("block", "synthetic") and shape != "chain":
        raise ValueError(
            f"rejection_sample_method {method!r} works on chains, but tree is a {shape} tree; give num_speculative_tokens"
        )
    if method == "standard" and rule.draft_sample_method == "probabilistic" and shape != "chain":
        raise ValueError(
            f"rejection_sample_method 'standard' with draft_sample_method 'probabilistic' works on chains, but tree is a {shape} "
            "tree; for static trees use 'recursive' or 'traversal', for dynamic ones draft_sample_method 'greedy'"
        )
    if method in ("recursive", "traversal"):
        if not isinstance(tree, StaticTree) or shape == "chain":
            raise ValueError(
                f"rejection_sample_method {method!r} works on static trees, but tree is a {shape}"
                f"{'' if shape == 'chain' else ' tree'}: the shape of a sampled tree must not depend on its tokens; give tree as "
                "a list of paths or by name, or use 'block' for a chain"
            )
        _check_ranks(tree)
    rates, length = rule.synthetic_acceptance_rates, rule.synthetic_acceptance_length
    if rates is not None and len(rates) != tree.max_depth:
        raise ValueError(
            f"synthetic_acceptance_rates has {len(rates)} entries, but {tree.max_depth} tokens are drafted a round"
        )
    if length is not None and length > tree.max_depth + 1:
        raise ValueError(
            f"synthetic_acceptance_length must be at most {tree.max_depth + 1} for {tree.max_depth} drafted tokens, got {length}"
        )


def _shape_of(tree: TreeConfig | StaticTree) -> str:
    if tree.total_tokens == tree.max_depth + 1:
        return "chain"
    return "static" if isinstance(tree, StaticTree) else "dynamic"


def _check_ranks(tree: StaticTree) -> None:
    for path in tree.paths:
        if path[-1] and (*path[:-1], path[-1] - 1) not in tree.paths:
            raise ValueError(
                f"tree path {list(path)} lacks its sibling {[*path[:-1], path[-1] - 1]}: children of a sampled tree are drawn "
                "one after the other, so their ranks must be 0, 1, 2, ..."
            )
