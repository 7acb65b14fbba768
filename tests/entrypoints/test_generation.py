"""Speculative decoding says what plain decoding says, ends where it must, and refuses what it cannot do."""

import dataclasses

import numpy as np
import pytest
from flax import nnx
from support.pairs import PROMPTS, TINY_PROMPTS, completions, decoder_of

from eagle_jax import LLM, SamplingParams, TreeConfig, generate, speculative_generate

CHAIN = 4


@pytest.fixture(scope="module")
def plain(target):
    return generate(target, PROMPTS, max_new_tokens=40, ignore_eos=True, max_num_seqs=4)


def speculate(pair, prompts, max_new_tokens=40, **options):
    settings = {"num_speculative_tokens": CHAIN, "ignore_eos": True, "max_num_seqs": 4}
    return speculative_generate(*pair, prompts, max_new_tokens=max_new_tokens, **(settings | options))


def check_identities(result):
    for ids, metrics, reason in zip(result.token_ids, result.metrics, result.finish_reasons, strict=True):
        assert len(ids) == 1 + sum(metrics.accepted_lengths)
        assert min(metrics.accepted_lengths, default=1) >= 1
        assert metrics.rounds == sum(metrics.histogram)
        assert reason in ("stop", "length")
    assert result.metrics.total.rounds == sum(row.rounds for row in result.metrics)


def test_speculative_output_is_the_plain_output_in_any_order_of_a_batch(pair, plain):
    lengths = set()
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        result = speculate(pair, [PROMPTS[i] for i in order])
        assert result.token_ids == [plain.token_ids[i] for i in order]
        assert result.texts == [plain.texts[i] for i in order]
        assert result.prompt_token_ids == [PROMPTS[i] for i in order]
        check_identities(result)
        lengths |= set(result.metrics.total.accepted_lengths)
    assert lengths >= {1, 2, 3}, "drafts must be accepted and rejected for this to prove anything"
    assert plain.metrics.total.mean_acceptance_length == 1
    assert plain.metrics.total.drafted == 0


def test_more_prompts_than_slots_come_back_in_their_order(pair, plain):
    result = speculate(pair, [*PROMPTS, *PROMPTS[::-1], PROMPTS[2]])
    assert result.token_ids == [*plain.token_ids, *plain.token_ids[::-1], plain.token_ids[2]]


def test_output_is_reproduced_by_the_same_call(pair, plain):
    first, second = speculate(pair, PROMPTS), speculate(pair, PROMPTS)
    assert first.token_ids == second.token_ids == plain.token_ids
    assert [m.accepted_lengths for m in first.metrics] == [m.accepted_lengths for m in second.metrics]


def test_texts_are_what_the_ids_say(target, plain):
    assert plain.texts == [target.tokenizer.decode(ids) for ids in plain.token_ids]


def check_budgets(pair, length, prompts, budgets):
    target, draft = pair
    wanted = generate(target, prompts, max_new_tokens=max(budgets), ignore_eos=True, max_num_seqs=4).token_ids
    decoder = decoder_of(target, draft, TreeConfig.chain(length), max_num_seqs=4)
    params = [SamplingParams(max_tokens=budget, ignore_eos=True) for budget in budgets]
    lengths = set()
    for prompt, full in zip(prompts[:2], wanted, strict=False):
        outputs, timing = decoder.run(decoder.read([prompt] * len(params)), params, progress=False)
        results = completions(outputs)
        for budget, result in zip(budgets, results, strict=True):
            assert result.token_ids == full[:budget]
            assert result.finish_reason == "length"
            assert 1 + sum(result.metrics.accepted_lengths) == budget
            lengths |= set(result.metrics.accepted_lengths)
        assert timing.output_tokens == sum(budgets)
        assert timing.decoded_tokens == sum(budgets) - len(budgets)
    assert max(lengths) > 1


@pytest.mark.parametrize("length", [1, 2, 3])
def test_exactly_the_budget_is_emitted(tiny, length):
    check_budgets(tiny, length, TINY_PROMPTS, range(1, 21))


def test_exactly_the_budget_is_emitted_by_long_chains(pair):
    check_budgets(pair, CHAIN, PROMPTS, range(1, 21))


def test_time_of_compilation_is_apart(pair):
    speculate(pair, PROMPTS)
    timing = speculate(pair, PROMPTS).timing
    assert timing.compile_seconds < 0.2  # the programs are there already
    assert timing.attention == {"prefill": "xla_blocked", "verify": "xla_blocked", "draft": "xla_blocked"}
    assert timing.prefill_seconds > 0
    assert timing.decode_seconds > 0
    assert timing.prompt_tokens == sum(map(len, PROMPTS))
    assert (timing.output_tokens, timing.decoded_tokens) == (160, 156)


def test_budget_of_zero_gives_an_empty_output(target, draft):
    [result] = [speculative_generate(target, draft, PROMPTS[:1], max_new_tokens=0, num_speculative_tokens=CHAIN)]
    assert (result.token_ids, result.texts, result.finish_reasons) == ([[]], [""], ["length"])
    assert result.metrics[0].rounds == 0
    assert np.isnan(result.metrics[0].mean_acceptance_length)


def test_budget_of_zero_beside_others(pair, plain):
    decoder = decoder_of(*pair, TreeConfig.chain(CHAIN), max_num_seqs=4)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 0, 7, 3, 0, 9)]
    outputs, _ = decoder.run(decoder.read([*PROMPTS, *PROMPTS[:2]]), params, progress=False)
    results = completions(outputs)
    wanted = [*plain.token_ids, *plain.token_ids[:2]]
    assert [r.token_ids for r in results] == [ids[:n] for ids, n in zip(wanted, (5, 0, 7, 3, 0, 9), strict=True)]


def stop_ids_and_their_places(ids):
    return {id_: ids.index(id_) for id_ in ids}


def test_output_ends_at_a_stop_id_at_every_offset_of_a_round(pair, plain):
    row, ids = 2, plain.token_ids[2]
    rounds = speculate(pair, PROMPTS).metrics[row].accepted_lengths
    places = stop_ids_and_their_places(ids)
    decoder = decoder_of(*pair, TreeConfig.chain(CHAIN), max_num_seqs=4)
    params = [SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=[id_]) for id_ in places]
    outputs, _ = decoder.run(decoder.read([PROMPTS[row]] * len(places)), params, progress=False)
    results = completions(outputs)
    offsets = set()
    for (id_, place), result in zip(places.items(), results, strict=True):
        assert result.token_ids == ids[: place + 1]
        assert (result.finish_reason, result.stop_reason) == ("stop", id_)
        assert sum(result.metrics.accepted_lengths) == place
        starts = np.cumsum([1, *rounds])  # where each round's tokens begin
        number = int(np.searchsorted(starts, place, side="right")) - 1
        if place:
            offsets.add((place - int(starts[number]), rounds[number]))
    assert 0 in places.values(), "the first token comes from the prefill"
    assert {offset for offset, _ in offsets} >= {0, 1, 2}
    assert any(offset == length - 1 > 0 for offset, length in offsets), (
        "the bonus token of a round with accepted drafts"
    )
    assert any(offset < length - 1 for offset, length in offsets), "an accepted draft"


def with_eos(target, *ids):
    return dataclasses.replace(target, config=dataclasses.replace(target.config, eos_token_ids=ids))


@pytest.mark.parametrize("several", [False, True])
def test_output_ends_at_an_end_of_sequence_id(pair, plain, several):
    target, draft = pair
    eos = plain.token_ids[2][9]
    ids = (511, eos) if several else (eos,)
    result = speculate((with_eos(target, *ids), draft), PROMPTS, ignore_eos=False)
    for got, full, reason in zip(result.token_ids, plain.token_ids, result.finish_reasons, strict=True):
        ends = [place for place, id_ in enumerate(full) if id_ in ids]
        assert got == (full[: ends[0] + 1] if ends else full)
        assert reason == ("stop" if ends else "length")
    assert result.finish_reasons[2] == "stop"
    assert result.stop_reasons == [None] * 4
    check_identities(result)


def test_end_of_sequence_id_zero_counts(tiny):
    target, _ = tiny
    full = generate(target, TINY_PROMPTS, max_new_tokens=20, max_num_seqs=4).token_ids
    result = generate(with_eos(target, 0), TINY_PROMPTS, max_new_tokens=20, max_num_seqs=4)
    wanted = [ids[: ids.index(0) + 1] if 0 in ids else ids for ids in full]
    assert wanted != full
    assert result.token_ids == wanted


def test_end_of_sequence_id_in_the_prompt_does_not_stop(pair, plain):
    target, draft = pair
    result = speculate((with_eos(target, 7), draft), PROMPTS, ignore_eos=False)
    assert 7 in PROMPTS[0]
    assert 7 not in plain.token_ids[0]
    assert result.token_ids[0] == plain.token_ids[0]


def test_ignore_eos_goes_on_but_stop_ids_still_count(pair, plain):
    target, draft = pair
    eos, stop = plain.token_ids[2][4], plain.token_ids[2][9]
    assert plain.token_ids[2].index(eos) < plain.token_ids[2].index(stop)
    result = speculate((with_eos(target, eos), draft), PROMPTS, stop_token_ids=[stop])
    assert result.token_ids[2] == plain.token_ids[2][: plain.token_ids[2].index(stop) + 1]
    assert result.stop_reasons[2] == stop


def test_ignored_end_of_sequence_id_can_be_a_stop_id(pair, plain):
    target, draft = pair
    eos = plain.token_ids[2][4]
    result = speculate((with_eos(target, eos), draft), PROMPTS, stop_token_ids=[eos])
    assert result.token_ids[2] == plain.token_ids[2][: plain.token_ids[2].index(eos) + 1]
    assert (result.finish_reasons[2], result.stop_reasons[2]) == ("stop", eos)


def test_text_of_a_stop_id_is_shown_only_on_request(pair, plain):
    stop = plain.token_ids[2][9]
    hidden = speculate(pair, PROMPTS, stop_token_ids=[stop])
    shown = speculate(pair, PROMPTS, stop_token_ids=[stop], include_stop_str_in_output=True)
    decode = pair[0].tokenizer.decode
    assert hidden.token_ids == shown.token_ids
    assert hidden.texts[2] == decode(hidden.token_ids[2][:-1])
    assert shown.texts[2] == decode(shown.token_ids[2])


def test_stop_id_that_is_the_last_of_the_budget_is_a_stop(pair, plain):
    stop = plain.token_ids[2][9]
    place = plain.token_ids[2].index(stop)
    result = speculate(pair, PROMPTS, max_new_tokens=place + 1, stop_token_ids=[stop])
    assert result.finish_reasons[2] == "stop"


@pytest.mark.parametrize("speculative", [False, True])
def test_output_ends_with_the_context(tiny, speculative):
    target, draft = tiny
    context = target.config.max_position_embeddings
    lengths = [1, 200, 252, 253, 254, 255]
    prompts = [np.random.default_rng(n).integers(0, 7, n).tolist() for n in lengths]
    options = {"max_new_tokens": 10**9, "max_num_seqs": 4}
    result = generate(target, prompts, **options)
    if speculative:
        wanted, result = result, speculative_generate(target, draft, prompts, num_speculative_tokens=3, **options)
        assert result.token_ids == wanted.token_ids
        assert max(result.metrics.total.accepted_lengths) > 1
    assert [len(ids) for ids in result.token_ids] == [context - n for n in lengths]
    assert set(result.finish_reasons) == {"length"}
    check_identities(result)


def test_prompt_that_fills_the_context_is_refused(tiny):
    for length in (256, 257, 500):
        with pytest.raises(ValueError, match=f"prompt 0 has {length} tokens.*max_model_len 256"):
            generate(tiny[0], [1] * length, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"prompt 1 has 48 tokens.*max_model_len 48"):
        generate(tiny[0], [[1], [1] * 48], max_new_tokens=1, max_model_len=48)


def test_target_without_tokenizer_has_no_texts(tiny):
    result = generate(tiny[0], TINY_PROMPTS, max_new_tokens=4, max_num_seqs=4)
    assert result.texts == [None] * 4
    with pytest.raises(ValueError, match="prompt 0 is text, but the target has no tokenizer"):
        generate(tiny[0], "hello", max_new_tokens=4)
    with pytest.raises(ValueError, match=r"stop \['x'\] needs a tokenizer"):
        generate(tiny[0], [1], max_new_tokens=4, stop="x")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be at least 0, got -1"),
        ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens must be an integer, got 2.5"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens must be an integer"),
        ({"max_model_len": 257}, ValueError, "max_model_len 257 exceeds the 256 tokens"),
        ({"max_model_len": 1}, ValueError, "max_model_len must be an integer of at least 2, got 1"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"prefill_chunk": 0}, ValueError, "prefill_chunk must be an integer of at least 1, got 0"),
        ({"temperature": -0.7}, ValueError, "temperature must be a finite number of at least 0, got -0.7"),
        ({"seed": [1, 2, 3]}, ValueError, "seed has 3 entries for 1 prompts; give one for all"),
        ({"seed": "12"}, TypeError, "seed must be an integer or a list of them, got '12'"),
        ({"logprobs_mode": "logits"}, ValueError, "logprobs_mode must be 'raw_logprobs' or 'processed_logprobs', got 'logits'"),
        ({"logit_bias": {7: 1.0}}, ValueError, "logit_bias has 7; ids of this model are 0 to 6"),
        ({"allowed_token_ids": [1, 9]}, ValueError, "allowed_token_ids has 9; ids of this model are 0 to 6"),
        (
            {"allowed_token_ids": [5], "stop_token_ids": [5, 6], "min_tokens": 2},
            ValueError,
            r"allowed_token_ids \[5\] are all ids that end the output",
        ),
        ({"stop_token_ids": [7]}, ValueError, "stop_token_ids has 7; ids of this model are 0 to 6"),
        ({"num_speculative_tokens": 0}, ValueError, "num_speculative_tokens must be at least 1, got 0"),
        ({"tree": {"total_tokens": 4, "depth": 1, "top_k": 2}}, ValueError, "give one of them"),
        ({"num_speculative_tokens": None, "tree": [[7]]}, ValueError, "tree top_k 8 exceeds the 7 tokens"),
        ({"num_speculative_token": 3}, TypeError, "num_speculative_token"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(tiny, options, error, message):
    settings = {"max_new_tokens": 4, "num_speculative_tokens": 3} | options
    with pytest.raises(error, match=message):
        speculative_generate(*tiny, [[1, 2]], **settings)


def test_models_that_were_not_loaded_are_refused(tiny, target):
    with pytest.raises(TypeError, match="target must be what load_target returns, got 'some/repo'"):
        generate("some/repo", [[1]], max_new_tokens=1)
    with pytest.raises(TypeError, match="draft must be what load_draft returns"):
        speculative_generate(tiny[0], "some/repo", [[1]], max_new_tokens=1, num_speculative_tokens=1)
    with pytest.raises(ValueError, match=r"tiny head is for a target of hidden_size 32, but .* has 64"):
        speculative_generate(target, tiny[1], [[1]], max_new_tokens=1, num_speculative_tokens=1)


@pytest.mark.parametrize("in_place", [True, False])
def test_new_parameters_are_used_by_the_next_call(tiny, in_place):
    """Engines are kept between calls, but never with weights that were replaced in the meantime."""
    target, _ = tiny
    options = {"max_new_tokens": 8, "max_num_seqs": 4}
    before = generate(target, TINY_PROMPTS, **options).token_ids
    norm, old = target.model.norm, target.model.norm.weight
    values = old[...]
    try:
        if in_place:
            norm.weight[...] = -values
        else:
            norm.weight = nnx.Param(-values)
        changed = generate(target, TINY_PROMPTS, **options).token_ids
    finally:
        norm.weight = old
        norm.weight[...] = values
    assert changed != before
    assert generate(target, TINY_PROMPTS, **options).token_ids == before


def test_llm_says_the_same(pair, plain):
    tree = {"total_tokens": 8, "depth": 3, "top_k": 2}
    target, draft = pair
    trees = speculate(pair, PROMPTS, num_speculative_tokens=None, tree=tree)
    assert trees.token_ids == plain.token_ids
    assert max(trees.metrics.total.accepted_lengths) > 2
    assert trees.metrics.total.drafted == 7 * trees.metrics.total.rounds
    config = {"method": "eagle3", "model": str(draft.path), "tree": tree}
    llm = LLM(str(target.path), dtype="float32", max_num_seqs=4, speculative_config=config)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == plain.token_ids
    assert [o.metrics.accepted_lengths for o in outputs] == [m.accepted_lengths for m in trees.metrics]
