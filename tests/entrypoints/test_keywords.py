"""The functions take `SamplingParams` and `speculative_config`, or their fields as keywords: the same outputs."""

import pytest
from support.pairs import TINY_PROMPTS

from eagle_jax import LLM, SamplingParams, generate, speculative_generate, stream_generate


def test_parameters_and_their_fields_say_the_same(tiny):
    target, draft = tiny
    fields = {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.1}
    params = [SamplingParams(max_tokens=20, seed=seed, **fields) for seed in range(4)]
    wanted = generate(target, TINY_PROMPTS, max_new_tokens=20, seed=range(4), **fields).token_ids
    assert generate(target, TINY_PROMPTS, params).token_ids == wanted
    assert len({tuple(ids) for ids in wanted}) == 4
    chain = {"num_speculative_tokens": 2, "rejection_sample_method": "seeded"}
    for arguments in (chain, {"speculative_config": chain}, {"speculative_config": {**chain, "model": draft}}):
        result = speculative_generate(target, draft, TINY_PROMPTS, params, **arguments)
        assert result.token_ids == wanted
        assert result.metrics.total.drafted == 2 * result.metrics.total.rounds
    llm = LLM(target, speculative_config={**chain, "model": draft})
    assert llm.draft is draft
    assert [out.outputs[0].token_ids for out in llm.generate(TINY_PROMPTS, params, use_tqdm=False)] == wanted


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({}, TypeError, r"speculative_generate\(\) missing max_new_tokens, or sampling_params instead"),
        (
            {"max_new_tokens": 3, "top_q": 1},
            TypeError,
            r"speculative_generate\(\) got an unexpected keyword argument 'top_q'",
        ),
        ({"sampling_params": SamplingParams(), "top_k": 1}, ValueError, "top_k cannot be given beside sampling_params"),
        ({"sampling_params": SamplingParams(), "seed": 1}, ValueError, "seed cannot be given beside sampling_params"),
        ({"sampling_params": [SamplingParams()] * 3}, ValueError, "there are 3 sampling_params for 4 prompts"),
        ({"sampling_params": "greedy"}, TypeError, "sampling_params must be SamplingParams"),
        (
            {"max_new_tokens": 3, "speculative_config": {"num_speculative_tokens": 2}, "tree": "auto"},
            ValueError,
            "tree cannot be given beside speculative_config",
        ),
        (
            {"max_new_tokens": 3, "speculative_config": {"num_speculative_tokens": 2, "revision": "main"}},
            ValueError,
            "revision cannot be given with a model that is loaded",
        ),
        (
            {"max_new_tokens": 3, "speculative_config": {"method": "medusa"}},
            ValueError,
            "method 'medusa' is not supported",
        ),
        ({"max_new_tokens": 3, "num_speculative_tokens": 2, "tree": "auto"}, ValueError, "give one of them"),
    ],
)
def test_keywords_that_contradict_each_other_are_named(tiny, keywords, error, message):
    with pytest.raises(error, match=message):
        speculative_generate(*tiny, TINY_PROMPTS, **keywords)


def test_plain_functions_take_nothing_about_drafts(tiny):
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'tree'"):
        generate(tiny[0], TINY_PROMPTS, max_new_tokens=3, tree="auto")
    with pytest.raises(ValueError, match="speculative_config, tree cannot be given without a draft"):
        stream_generate(tiny[0], None, TINY_PROMPTS, SamplingParams(), speculative_config={}, tree="auto")
