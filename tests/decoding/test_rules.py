"""Only rules that fit their drafts can be made; the message names both."""

import pytest

from eagle_jax import SpeculativeConfig, TreeConfig
from eagle_jax.decoding.rules import SEEDED, Drafts, check_rule, make_rule
from eagle_jax.drafters.tree import NAMED_TREES, StaticTree

CHAIN, DYNAMIC, STATIC = TreeConfig.chain(3), TreeConfig(total_tokens=6, depth=2, top_k=2), NAMED_TREES["mc_sim_7b_63"]


@pytest.mark.parametrize(
    ("methods", "trees", "drafts"),
    [
        ((None, None), (CHAIN, DYNAMIC, STATIC), Drafts.SHARED_NOISE),
        (("seeded", "greedy"), (CHAIN, DYNAMIC, STATIC), Drafts.LIKELIEST),
        (("standard", None), (CHAIN, DYNAMIC, STATIC), Drafts.LIKELIEST),
        (("standard", "probabilistic"), (CHAIN, NAMED_TREES["chain_5"]), Drafts.SAMPLED),
        (("block", None), (CHAIN, NAMED_TREES["chain_5"]), Drafts.SAMPLED),
        (("recursive", None), (STATIC,), Drafts.SAMPLED),
        (("traversal", "probabilistic"), (STATIC,), Drafts.SAMPLED),
    ],
)
def test_what_goes_together(methods, trees, drafts):
    rule = make_rule(*methods)
    assert rule.drafts is drafts
    for tree in trees:
        check_rule(rule, tree)
    if len(trees) < 3:
        for other in {CHAIN, DYNAMIC, STATIC} - {*trees}:
            with pytest.raises(ValueError, match=r"rejection_sample_method '\w+' .*tree is a"):
                check_rule(rule, other)


def test_nothing_asked_for_is_the_seeded_rule():
    assert make_rule() == SEEDED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rejection_sample_method": "strict"},
            "rejection_sample_method 'strict' is unknown; known are 'seeded', 'standard'",
        ),
        ({"draft_sample_method": "beam"}, "draft_sample_method 'beam' is unknown; known are 'greedy', 'probabilistic'"),
        (
            {"rejection_sample_method": "block", "draft_sample_method": "greedy"},
            "'block' needs sampled drafts, but draft_sample_method is 'greedy'",
        ),
        ({"rejection_sample_method": "synthetic"}, "needs exactly one of synthetic_acceptance_rates and"),
        ({"synthetic_acceptance_length": 2.0}, "synthetic_acceptance_length needs rejection_sample_method 'synthetic'"),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.6]},
            r"synthetic_acceptance_rates must be in \[0, 1\] and not increase, got \[0.5, 0.6\]",
        ),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 0.5}, "must be at least 1, got 0.5"),
    ],
)
def test_rules_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        make_rule(**options)


def test_synthetic_rates_fit_the_chain():
    with pytest.raises(ValueError, match="has 2 entries, but 3 tokens are drafted a round"):
        check_rule(make_rule("synthetic", synthetic_acceptance_rates=[0.5, 0.2]), CHAIN)
    with pytest.raises(ValueError, match=r"must be at most 4 for 3 drafted tokens, got 4\.5"):
        check_rule(make_rule("synthetic", synthetic_acceptance_length=4.5), CHAIN)


def test_siblings_of_sampled_trees_have_no_gaps():
    with pytest.raises(ValueError, match=r"tree path \[0, 1\] lacks its sibling \[0, 0\]"):
        check_rule(make_rule("recursive"), StaticTree.from_paths([[0], [1], [0, 1]]))


def test_the_configuration_of_vllm():
    config = {"model": "head", "num_speculative_tokens": 3, "rejection_sample_method": "block"}
    assert SpeculativeConfig.from_dict(config).rule == make_rule("block")
    with pytest.raises(ValueError, match="'block' works on chains, but tree is a static tree"):
        SpeculativeConfig.from_dict({"model": "head", "tree": "mc_sim_7b_63", "rejection_sample_method": "block"})
