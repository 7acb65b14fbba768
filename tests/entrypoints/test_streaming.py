"""The deltas of a stream are the output, piece by piece."""

import collections

import pytest
from support.pairs import PROMPTS, TINY_PROMPTS

from eagle_jax import SamplingParams, generate, speculative_generate, stream_generate
from eagle_jax.entrypoints import decoder

OPTIONS = {"num_speculative_tokens": 4, "max_num_seqs": 4}


def collect(deltas):
    texts, ids, ends = collections.defaultdict(str), collections.defaultdict(list), {}
    for delta in deltas:
        assert delta.index not in ends, "a delta behind the last one"
        texts[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
        if delta.finish_reason is not None:
            ends[delta.index] = delta
    return [texts[i] for i in sorted(ends)], [ids[i] for i in sorted(ends)], [ends[i] for i in sorted(ends)]


@pytest.mark.parametrize("rounds", [1, 3])
def test_deltas_concatenate_to_the_output(pair, rounds):
    whole = speculative_generate(*pair, PROMPTS, max_new_tokens=40, ignore_eos=True, **OPTIONS)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    deltas = list(stream_generate(*pair, PROMPTS, params, rounds_per_dispatch=rounds, **OPTIONS))
    texts, ids, ends = collect(deltas)
    assert texts == whole.texts
    assert ids == whole.token_ids
    assert [end.finish_reason for end in ends] == whole.finish_reasons
    assert [end.metrics for end in ends] == list(whole.metrics)
    assert len(deltas) > 2 * len(PROMPTS)
    assert max(whole.metrics.total.accepted_lengths) > 1


@pytest.mark.parametrize("seconds", [1e6, 1e-9])
def test_dispatches_become_longer_or_shorter_by_the_clock(pair, monkeypatch, seconds):
    """At first four rounds, and then at most twice as many as before; the second is launched before the first is read."""
    monkeypatch.setattr(decoder, "SECONDS_PER_DISPATCH", seconds)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    whole = generate(pair[0], PROMPTS[:1], max_new_tokens=60, ignore_eos=True).token_ids[0]
    deltas = list(stream_generate(pair[0], None, PROMPTS[:1], params))
    assert [token for delta in deltas for token in delta.token_ids] == whole
    sizes = [len(delta.token_ids) for delta in deltas]
    assert sizes[0] == 1, "the token that the prefill gave comes first"
    if seconds > 1:
        assert sizes[1:] == [4, 4, 8, 16, 27]
    else:
        assert sizes[1:4] == [4, 4, 1]
        assert set(sizes[3:]) == {1}


def test_deltas_stop_before_a_stop_string(pair):
    [*_, last] = generate(pair[0], PROMPTS, max_new_tokens=40, ignore_eos=True, max_num_seqs=4).texts
    stop = last[20:24]
    whole = speculative_generate(*pair, PROMPTS, max_new_tokens=40, ignore_eos=True, stop=stop, **OPTIONS)
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=stop)
    texts, ids, ends = collect(stream_generate(*pair, PROMPTS, params, **OPTIONS))
    assert (texts, ids) == (whole.texts, whole.token_ids)
    assert [end.metrics for end in ends] == list(whole.metrics)
    assert ends[-1].stop_reason == stop


def test_plain_decoding_streams_too(pair):
    whole = generate(pair[0], PROMPTS, max_new_tokens=12, max_num_seqs=4)
    texts, ids, _ = collect(stream_generate(pair[0], None, PROMPTS, SamplingParams(max_tokens=12), max_num_seqs=4))
    assert (texts, ids) == (whole.texts, whole.token_ids)


def test_streams_can_be_left_and_can_run_beside_each_other(pair):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    whole = speculative_generate(*pair, PROMPTS, max_new_tokens=30, ignore_eos=True, **OPTIONS)
    left = stream_generate(*pair, PROMPTS, params, rounds_per_dispatch=1, **OPTIONS)
    next(left)
    left.close()
    first = stream_generate(*pair, PROMPTS, params, rounds_per_dispatch=1, **OPTIONS)
    second = stream_generate(*pair, PROMPTS, params, rounds_per_dispatch=1, **OPTIONS)
    beginning = [next(first), next(second), next(first), next(second)]
    middle = speculative_generate(*pair, PROMPTS, max_new_tokens=30, ignore_eos=True, **OPTIONS)
    assert middle.token_ids == whole.token_ids
    assert collect([beginning[0], beginning[2], *first])[1] == whole.token_ids
    assert collect([beginning[1], beginning[3], *second])[1] == whole.token_ids


def test_errors_come_at_once(pair):
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        stream_generate(*pair, [[]], SamplingParams(), **OPTIONS)
    with pytest.raises(ValueError, match="rounds_per_dispatch must be an integer of at least 1, got 0"):
        stream_generate(*pair, PROMPTS, SamplingParams(), rounds_per_dispatch=0, **OPTIONS)
    with pytest.raises(ValueError, match="num_speculative_tokens cannot be given without a draft"):
        stream_generate(pair[0], None, PROMPTS, SamplingParams(), num_speculative_tokens=3)
    with pytest.raises(ValueError, match="leaves no room"):
        stream_generate(*pair, [1] * 512, SamplingParams(), **OPTIONS)


def test_target_without_tokenizer_streams_ids(tiny):
    params = SamplingParams(max_tokens=6)
    deltas = list(stream_generate(tiny[0], None, TINY_PROMPTS, params, max_num_seqs=4, rounds_per_dispatch=2))
    assert {delta.text for delta in deltas} == {""}
    assert [len(ids) for ids in collect(deltas)[1]] == [6] * 4
    assert len(deltas) > 4
