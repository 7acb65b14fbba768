"""Intervals and speeds on examples worked by hand or by another library, and the rows file."""

import json
import math

import numpy as np
import pytest

from eagle_jax.evaluation.errors import EvaluationError
from eagle_jax.evaluation.report import loses, vllm_lines
from eagle_jax.evaluation.rows import Group, LeftOut, Row, RowsFile
from eagle_jax.evaluation.statistics import Acceptance, Speed, SpeedUp, ratio_interval


def row(question: str, lengths: list[int], at_depth: list[int], **changes) -> Row:
    fields = {
        "configuration": "c", "dataset": "d", "question_id": question, "category": "", "turn": 1, "group": 0, "prompt_tokens": 3,
        "token_ids": list(range(1 + sum(lengths))), "text": "t\u2028\n", "finish_reason": "length", "accepted_lengths": lengths,
        "accepted_at_depth": at_depth, "drafted": 3 * len(lengths), "plain_rounds": 0, "seed": None, "seconds": None,
    }  # fmt: skip
    return Row(**(fields | changes))


def group(index: int, tokens: int, seconds: float, configuration: str = "c", turn: int = 1) -> Group:
    return Group(
        configuration=configuration, dataset="d", turn=turn, index=index, requests=1, output_tokens=tokens,
        decoded_tokens=tokens - 1, prefill_seconds=0.25 * seconds, decode_seconds=0.75 * seconds, compile_seconds=9.0,
    )  # fmt: skip


def test_acceptance_of_rows_adds_up_and_prints_as_vllm_does():
    found = Acceptance.of([row("1", [4, 1, 3], [2, 2, 1]), row("2", [2], [1, 0, 0])], depth=3)
    assert (found.requests, found.output_tokens) == (2, 9 + 3)
    assert found.metrics.mean_acceptance_length == 10 / 4
    assert found.vllm_acceptance_length == 1 + 6 / 4
    assert vllm_lines(found) == [
        "-" * 50,
        "total_num_output_tokens: 12",
        "num_drafts: 4",
        "num_draft_tokens: 12",
        "num_accepted_tokens: 6",
        "mean acceptance length: 2.50",
        "-" * 50,
        "acceptance at token 0: 0.75",
        "acceptance at token 1: 0.50",
        "acceptance at token 2: 0.25",
    ]


def test_without_rounds_there_is_nothing_to_divide_by():
    found = Acceptance.of([row("1", [], [0, 0, 0])], depth=3)
    assert math.isnan(found.metrics.mean_acceptance_length)
    assert found.interval is None
    assert vllm_lines(found)[-1] == "acceptance at token 2: 0.00"


def test_the_interval_is_that_of_a_bootstrap_over_questions():
    rng = np.random.default_rng(3)
    rounds = rng.integers(5, 40, 60)
    emitted = (rounds * rng.normal(2.5, 0.5, 60).clip(1, 4)).round()
    low, high = ratio_interval(emitted.tolist(), rounds.tolist())
    # The same by resampling indices, with other random numbers.
    index = rng.integers(0, 60, (20_000, 60))
    other = np.percentile(emitted[index].sum(1) / rounds[index].sum(1), [2.5, 97.5])
    assert (low, high) == pytest.approx(tuple(other), abs=0.02)
    assert low < emitted.sum() / rounds.sum() < high
    assert high - low > 0.1
    assert ratio_interval([2.0], [1.0]) is None
    assert ratio_interval([2.0, 4.0, 0.0], [1.0, 2.0, 0.0]) == (2, 2)


def test_both_turns_of_a_question_are_resampled_together():
    rows = [row(str(q), [1 + q % 3] * 5, [0, 0, 0], turn=turn) for q in range(9) for turn in (1, 2)]
    once = [row(str(q), [1 + q % 3] * 10, [0, 0, 0]) for q in range(9)]
    assert Acceptance.of(rows, 3).interval == Acceptance.of(once, 3).interval


def test_speed_leaves_compilation_out():
    speed = Speed.of([group(0, 10, 1.0), group(1, 30, 3.0)])
    assert (speed.seconds, speed.tokens_per_second, speed.decode_tokens_per_second) == (4, 10, 38 / 3)
    assert math.isnan(Speed.of([]).tokens_per_second)


def test_a_speed_up_compares_the_calls_that_both_have():
    fast = [group(i, 10, 1.0) for i in range(6)]
    plain = [group(i, 10, 2.0, "plain") for i in range(5)]
    assert SpeedUp.of(fast, plain) == SpeedUp(ratio=2, interval=(2, 2))
    assert SpeedUp.of(fast[:1], plain) == SpeedUp(ratio=2, interval=None)
    assert SpeedUp.of(fast[5:], plain) is None
    assert SpeedUp.of([group(0, 10, 1.0, turn=2)], plain) is None


def test_speculation_loses_only_where_the_whole_interval_says_so():
    assert not loses(SpeedUp(ratio=0.9, interval=(0.7, 1.1)))
    assert loses(SpeedUp(ratio=0.9, interval=(0.8, 0.99)))
    assert loses(SpeedUp(ratio=0.9, interval=None))
    assert not loses(SpeedUp(ratio=1.1, interval=None))


OUT = LeftOut(configuration="c", dataset="d", question_id="3", turn=1, reason="long")


def test_rows_are_found_again_and_what_an_interruption_left_is_dropped(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    first = RowsFile(path, {"dtype": "float32", "trees": (1, 2)})
    first.append([row("1", [2], [1, 0, 0]), OUT], group(0, 5, 1.0))
    whole = path.read_bytes()
    first.append([row("2", [3], [1, 1, 0])], group(1, 5, 1.0))
    everything = path.read_bytes()
    for end in range(len(whole), len(everything), 23):
        path.write_bytes(everything[:end])
        again = RowsFile(path, {"dtype": "float32", "trees": [1, 2]})
        assert [r.question_id for r in again.rows.requests] == ["1"]
        assert again.rows.left_out == [OUT]
        assert again.rows.groups == first.rows.groups[:1]
        assert path.read_bytes() == whole
    again.append([row("2", [3], [1, 1, 0])], group(1, 5, 1.0))
    assert path.read_bytes() == everything
    assert RowsFile(path, {"dtype": "float32", "trees": [1, 2]}).rows == first.rows


def test_a_setting_that_differs_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    RowsFile(path, {"dtype": "float32", "seed": 1})
    with pytest.raises(EvaluationError, match=r'measured with another dtype: "float32" there, "bfloat16" now'):
        RowsFile(path, {"dtype": "bfloat16", "seed": 1})
    with pytest.raises(EvaluationError, match=r"another seed: 1 there, null now"):
        RowsFile(path, {"dtype": "float32"})
    with pytest.raises(EvaluationError, match=r"another turns: null there, 2 now"):
        RowsFile(path, {"dtype": "float32", "seed": 1, "turns": 2})


@pytest.mark.parametrize(
    "content", ['{"kind": "request"}\n', "nonsense\n", '{"kind": "settings"}\n{"kind": "other"}\n', "[]\n", "mine"]
)
def test_another_file_is_not_overwritten(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(EvaluationError, match=r"rows\.jsonl, line"):
        RowsFile(path, {})
    assert path.read_text() == content


def test_nothing_is_kept_without_a_file():
    file = RowsFile(None, {"a": (1,)})
    file.append([row("1", [2], [1, 0, 0])], group(0, 5, 1.0))
    assert len(file.rows.requests) == 1
    assert json.dumps(file.settings) == '{"a": [1]}'
