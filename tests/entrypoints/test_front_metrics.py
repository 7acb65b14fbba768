"""Statistics according to their definitions, on examples worked by hand."""

import math

import pytest

from eagle_jax.metrics import AcceptanceMetrics, BatchMetrics, Counter, CumulativeCounters, Timing, Vector

# Three rounds of a chain of 3: 3 drafts accepted, none, 2; the last round is cut to 1 of its 3 tokens.
ROW = AcceptanceMetrics(accepted_lengths=[4, 1, 1], accepted_at_depth=[2, 2, 1], drafted=9)
OTHER = AcceptanceMetrics(accepted_lengths=[2], accepted_at_depth=[1, 0, 0], drafted=3)
NOTHING = AcceptanceMetrics(accepted_lengths=[], accepted_at_depth=[0, 0, 0], drafted=0)


def test_one_request():
    assert ROW.rounds == 3
    assert ROW.accepted == 5
    assert ROW.mean_acceptance_length == 2
    assert ROW.draft_acceptance_rate == 5 / 9
    assert ROW.acceptance_rates == [2 / 3, 2 / 3, 1 / 3]
    assert ROW.conditional_acceptance_rates == [2 / 3, 1, 1 / 2]
    assert ROW.histogram == [2, 0, 0, 1]


def test_requests_together():
    total = AcceptanceMetrics.total([ROW, OTHER, NOTHING])
    assert total == AcceptanceMetrics(accepted_lengths=[4, 1, 1, 2], accepted_at_depth=[3, 2, 1], drafted=12)
    assert total.mean_acceptance_length == 2
    assert AcceptanceMetrics.total([]).rounds == 0


def test_without_rounds_rates_are_not_a_number():
    for value in (NOTHING.mean_acceptance_length, NOTHING.draft_acceptance_rate, *NOTHING.acceptance_rates):
        assert math.isnan(value)
    assert OTHER.conditional_acceptance_rates[:2] == [1, 0]
    assert math.isnan(OTHER.conditional_acceptance_rates[2])


def test_batch_is_a_sequence_of_its_rows():
    timing = Timing(
        compile_seconds=9.0,
        prefill_seconds=1.0,
        decode_seconds=3.0,
        prompt_tokens=8,
        output_tokens=12,
        decoded_tokens=9,
    )
    batch = BatchMetrics([ROW, OTHER], timing)
    assert list(batch) == [ROW, OTHER]
    assert (len(batch), batch[0], batch[-1], batch[:1]) == (2, ROW, OTHER, (ROW,))
    assert batch.mean_acceptance_length == batch.total.mean_acceptance_length == 2
    assert (batch.timing.tokens_per_second, batch.timing.decode_tokens_per_second) == (3, 3)


def test_counters_have_the_names_that_vllm_users_read():
    counters = CumulativeCounters(3)
    counters.add(ROW, prompt_tokens=5, output_tokens=7)
    counters.add(OTHER, prompt_tokens=2, output_tokens=3)
    assert counters.read() == [
        Counter("vllm:prompt_tokens", 7),
        Counter("vllm:generation_tokens", 10),
        Counter("vllm:spec_decode_num_drafts", 4),
        Counter("vllm:spec_decode_num_draft_tokens", 12),
        Counter("vllm:spec_decode_num_accepted_tokens", 6),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", [3, 2, 1]),
    ]


def test_plain_decoding_has_no_draft_counters():
    counters = CumulativeCounters(None)
    counters.add(
        AcceptanceMetrics(accepted_lengths=[1], accepted_at_depth=[], drafted=0), prompt_tokens=5, output_tokens=2
    )
    assert [counter.name for counter in counters.read()] == ["vllm:prompt_tokens", "vllm:generation_tokens"]


@pytest.mark.parametrize("depth", [1, 4])
def test_reading_does_not_hand_out_the_counters_themselves(depth):
    counters = CumulativeCounters(depth)
    counters.read()[-1].values[0] = 99
    assert counters.read()[-1].values == [0] * depth
