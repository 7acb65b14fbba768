"""Sampling through the public functions: seeds, log-probabilities, mixed batches, and programs that keep every bit."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support import golden
from support.letters import letters_tokenizer
from support.pairs import PROMPTS, TINY_PROMPTS, completions, decoder_of
from transformers import AutoModelForCausalLM

from eagle_jax import (
    LLM,
    SamplingParams,
    TreeConfig,
    generate,
    load_draft,
    load_target,
    speculative_generate,
    stream_generate,
)

OPTIONS = {"max_new_tokens": 24, "ignore_eos": True, "max_num_seqs": 4}
CHAIN = {"num_speculative_tokens": 4}
SAMPLED = {"temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def plain(target):
    return generate(target, PROMPTS, seed=[11, 12, 13, 14], **SAMPLED, **OPTIONS)


def test_the_text_of_a_seed_is_the_same_in_any_row_and_with_any_drafts(pair, plain):
    lengths = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        result = speculative_generate(
            *pair, [PROMPTS[i] for i in order], seed=[11 + i for i in order], **SAMPLED, **CHAIN, **OPTIONS
        )
        assert result.token_ids == [plain.token_ids[i] for i in order]
        assert result.texts == [plain.texts[i] for i in order]
        assert result.seeds == [11 + i for i in order]
        lengths += result.metrics.total.accepted_lengths
    assert {1, 2, 3} <= set(lengths)


def test_fresh_seeds_are_reported_and_reproduce_the_text(pair):
    first, second = (speculative_generate(*pair, PROMPTS, **SAMPLED, **CHAIN, **OPTIONS) for _ in range(2))
    assert first.token_ids != second.token_ids
    assert len({*first.seeds, *second.seeds}) == 8
    assert all(0 <= seed < 2**53 for seed in first.seeds), "exact in every JSON reader"
    again = speculative_generate(*pair, PROMPTS, seed=first.seeds, **SAMPLED, **CHAIN, **OPTIONS)
    assert again.token_ids == first.token_ids


def test_a_seed_for_the_llm_makes_fresh_seeds_reproducible(tiny):
    params = SamplingParams(temperature=1.0, max_tokens=3)
    seeds = []
    for seed in (5, 5, 6):
        outputs = LLM(tiny[0], max_num_seqs=4, seed=seed).generate(TINY_PROMPTS, params, use_tqdm=False)
        seeds.append([output.outputs[0].seed for output in outputs])
    assert seeds[0] == seeds[1] != seeds[2]


def test_greedy_seeded_and_unseeded_rows_share_a_batch(pair, plain):
    greedy = generate(pair[0], PROMPTS[:1], **(OPTIONS | {"max_new_tokens": 24}))
    decoder = decoder_of(*pair, TreeConfig.chain(4), max_num_seqs=4)
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, ignore_eos=True, seed=12, **SAMPLED),
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.5),
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=1e-7, seed=3),
    ]
    outputs, _ = decoder.run(decoder.read([PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[0]]), params, progress=False)
    results = completions(outputs)
    assert results[0].token_ids == results[3].token_ids == greedy.token_ids[0]
    assert results[1].token_ids == plain.token_ids[1]
    assert [r.seed for r in results][:2] == [None, 12]
    assert results[2].seed is not None
    assert results[3].seed is None


@pytest.fixture(scope="module")
def with_logprobs(pair):
    options = OPTIONS | {"logprobs": 3, "repetition_penalty": 1.2, "seed": 5, "temperature": 0.9}
    return {
        mode: speculative_generate(*pair, PROMPTS, logprobs_mode=mode, **CHAIN, **options)
        for mode in ("raw_logprobs", "processed_logprobs")
    }


@pytest.mark.slow
def test_log_probabilities_are_those_of_transformers(with_logprobs):
    model = AutoModelForCausalLM.from_pretrained(golden.FOLDER / "target_A", dtype=torch.float32)
    for mode, result in with_logprobs.items():
        assert max(result.metrics.total.accepted_lengths) > 1
        for prompt, output, logprobs in zip(PROMPTS, result.token_ids, result.logprobs, strict=True):
            assert len(logprobs) == len(output)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].double()
            if mode == "processed_logprobs":
                for i in range(len(output)):
                    seen = torch.tensor(sorted({*prompt, *output[:i]}))
                    values = logits[i, seen]
                    logits[i, seen] = torch.where(values > 0, values / 1.2, values * 1.2)
                logits = logits / 0.9
            wanted = torch.log_softmax(logits, -1).numpy()
            for i, (token, at) in enumerate(zip(output, logprobs, strict=True)):
                assert next(iter(at)) == token
                best = np.argsort(-wanted[i])[:3]
                assert set(at) == {token, *best.tolist()}
                for id_, entry in at.items():
                    assert abs(entry.logprob - wanted[i, id_]) < 1e-4
                    assert entry.rank == (wanted[i] >= wanted[i, id_]).sum()
                    assert entry.decoded_token == letters_tokenizer().decode([id_], skip_special_tokens=False)


@pytest.mark.slow
def test_log_probabilities_end_with_the_output_and_stream_with_it(pair, with_logprobs):
    wanted = with_logprobs["raw_logprobs"]
    text = wanted.texts[2]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    params = SamplingParams(
        max_tokens=24, ignore_eos=True, logprobs=3, repetition_penalty=1.2, seed=5, temperature=0.9, stop=stop
    )
    decoder = decoder_of(*pair, TreeConfig.chain(4), max_num_seqs=4)
    outputs, _ = decoder.run(decoder.read(PROMPTS), [params] * 4, progress=False)
    results = completions(outputs)
    assert len(results[2].token_ids) < 24
    assert [len(r.logprobs) for r in results] == [len(r.token_ids) for r in results]
    deltas = [*stream_generate(*pair, PROMPTS[2:3] * 4, params, max_num_seqs=4, **CHAIN)]
    ids = [id_ for d in deltas if d.index == 0 for id_ in d.token_ids]
    shown = [at for d in deltas if d.index == 0 for at in d.logprobs]
    assert ids == results[2].token_ids
    assert [next(iter(at)) for at in shown] == ids


@pytest.mark.slow
def test_min_tokens_puts_off_stop_ids_and_stop_strings(pair, plain):
    row, ids, text = 2, plain.token_ids[2], plain.texts[2]
    options = OPTIONS | SAMPLED | {"seed": 13, "max_new_tokens": 24}
    early = generate(pair[0], PROMPTS[row : row + 1] * 4, **options, stop=text[0])
    assert len(early.token_ids[0]) == 1
    for count in (2, 5, 24):
        late = speculative_generate(
            *pair, PROMPTS[row : row + 1] * 4, **options, **CHAIN, stop=text[0], min_tokens=count
        )
        got = late.token_ids[0]
        assert got == ids[: len(got)]
        assert len(got) > count or len(got) == 24
    banned = speculative_generate(
        *pair, PROMPTS[row : row + 1] * 4, **options, **CHAIN, stop_token_ids=[ids[0]], min_tokens=3
    )
    assert len(banned.token_ids[0]) > 3
    assert ids[0] not in banned.token_ids[0][:3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rejection_sample_method": "block", "tree": "mc_sim_7b_63"},
            "'block' works on chains, but tree is a static tree",
        ),
        ({"rejection_sample_method": "traversal", **CHAIN}, "'traversal' works on static trees, but tree is a chain"),
        ({"shape_invariant": True, "tree": "mc_sim_7b_63"}, "shape_invariant works on chains"),
        (
            {"shape_invariant": True, "rejection_sample_method": "block", **CHAIN},
            "shape_invariant works with .* 'seeded'",
        ),
    ],
)
def test_what_does_not_go_together_raises_before_anything_runs(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        speculative_generate(*tiny, TINY_PROMPTS, max_new_tokens=3, **options)


def test_plain_decoding_needs_the_draft_of_shape_invariant_programs(tiny):
    with pytest.raises(ValueError, match="shape_invariant=True needs draft and num_speculative_tokens"):
        generate(tiny[0], TINY_PROMPTS, max_new_tokens=3, shape_invariant=True)
    with pytest.raises(ValueError, match="are for speculative_generate, or for shape_invariant=True"):
        generate(tiny[0], TINY_PROMPTS, max_new_tokens=3, draft=tiny[1])
    with pytest.raises(ValueError, match="speculate=False needs shape_invariant=True"):
        LLM(tiny[0], max_num_seqs=4).generate(TINY_PROMPTS, speculate=False, use_tqdm=False)


@pytest.mark.slow
def test_shape_invariant_programs_keep_every_bit_in_bfloat16():
    target = load_target(golden.FOLDER / "target_A", dtype="bfloat16")
    draft = load_draft(golden.FOLDER / "head_A_e3", target)
    assert target.model.dtype == jnp.bfloat16
    options = OPTIONS | {"max_new_tokens": 60} | CHAIN
    rng = np.random.default_rng(0)
    prompts = [*PROMPTS, *[rng.integers(3, 512, n).tolist() for n in (3, 70, 120, 20)]]
    for sampling in ({}, {"temperature": 0.9, "seed": list(range(8))}):
        plain = generate(target, prompts, shape_invariant=True, draft=draft, **options, **sampling)
        assert plain.metrics.total.mean_acceptance_length == 1
        result = speculative_generate(target, draft, prompts, shape_invariant=True, **options, **sampling)
        assert result.token_ids == plain.token_ids
        assert {1, 2, 3} <= set(result.metrics.total.accepted_lengths)
