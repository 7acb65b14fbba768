"""The number of compiled programs is the one that `eagle_jax.entrypoints.functions` states."""

import numpy as np
import pytest
from support.compilations import counting
from support.pairs import tiny_pair

from eagle_jax import LLM, SamplingParams, generate, speculative_generate


@pytest.fixture(scope="module")
def fresh():
    """A target that no other test uses, so that none of its programs is compiled yet."""
    return tiny_pair(vocab_size=9, max_position_embeddings=600)


def test_prompt_lengths_and_budgets_share_programs(fresh):
    target, draft = fresh
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 9, 3 * length).tolist() for length in range(1, 31)]
    with counting() as names:
        for prompt in prompts:
            for budget in (1, 3, 8, 9, 20):
                generate(target, [prompt], max_new_tokens=budget, stop_token_ids=[budget % 9])
    assert len(names) == 3, names
    with counting() as names:
        for prompt in prompts:
            speculative_generate(target, draft, [prompt], max_new_tokens=7, num_speculative_tokens=1)
    assert len(names) == 3, names
    with counting() as names:
        speculative_generate(target, draft, [prompts[3]], max_new_tokens=7, num_speculative_tokens=1)
        generate(target, [prompts[5]], max_new_tokens=9, ignore_eos=True)
    assert names == []


def test_numbers_about_sampling_share_programs(fresh):
    target, draft = fresh
    options = {"max_new_tokens": 5, "num_speculative_tokens": 1}
    speculative_generate(target, draft, [[1, 2]], **options)
    with counting() as names:
        for temperature in (0.3, 0.7, 1.0, 1.5, 1e-4):
            for seed, cuts in ((1, {}), (2, {"top_k": 3}), (3, {"top_p": 0.8}), (None, {"min_p": 0.1})):
                speculative_generate(target, draft, [[1, 2, 3]], temperature=temperature, seed=seed, **cuts, **options)
    assert len(names) == 2, names
    with counting() as names:
        for controls in ({"repetition_penalty": 1.2}, {"logprobs": 3}, {"logit_bias": {1: 2.0}}, {"min_tokens": 2}):
            for temperature in (0.0, 0.9):
                speculative_generate(target, draft, [[1, 2, 3]], temperature=temperature, **controls, **options)
    assert len(names) == 2, names
    with counting() as names:
        speculative_generate(target, draft, [[4, 2]], temperature=1e-6, **options)
        speculative_generate(target, draft, [[4, 2]], rejection_sample_method="block", **options)
        speculative_generate(target, draft, [[4, 2]], temperature=2.0, top_p=0.5, **options)
    assert names == [], "greedy calls have one program, whatever the rule for others"


def test_next_capacity_is_compiled_once_and_warmup_compiles_ahead(fresh):
    llm = LLM(fresh[0])
    with counting() as names:
        seconds = llm.warmup(num_tokens=300)
        assert llm.warmup(num_tokens=301) < seconds / 10
    assert len(names) == 3, names
    with counting() as names:
        outputs = llm.generate([[1] * 290], SamplingParams(max_tokens=12), use_tqdm=False)
    assert names == []
    assert len(outputs[0].outputs[0].token_ids) == 12


def test_weights_are_arguments_of_the_programs(fresh):
    other = tiny_pair(vocab_size=9, max_position_embeddings=600)
    with counting() as names:
        generate(other[0], [[1, 2, 3]], max_new_tokens=5)
    # Making the modules of `other` compiles their initialisers; decoding with them compiles nothing.
    assert not {"init_state", "prefill", "decode"} & {str(name) for name in names}, names
