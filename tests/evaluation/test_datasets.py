"""Evaluation sets: the shipped ones, files by path, and what is no dataset."""

import gzip
import json

import pytest

from eagle_jax.evaluation.datasets import SHIPPED, find_datasets, read_dataset
from eagle_jax.evaluation.errors import EvaluationError


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_set_has_80_questions_under_a_licence_that_allows_it(name):
    [found] = find_datasets([name])
    assert (found.name, len(found.questions)) == (name, 80)
    assert all(question.turns for question in found.questions)


def test_mt_bench_has_two_turns_and_eight_categories_of_ten():
    [found] = find_datasets([])
    assert found.name == "mt_bench"
    assert {question.num_turns for question in found.questions} == {2}
    categories = [question.category for question in found.questions]
    assert len(set(categories)) == 8
    assert all(categories.count(name) == 10 for name in categories)


def test_vllms_way_to_ask_for_mt_bench_gives_mt_bench():
    assert find_datasets(["hf"], ["philschmid/mt-bench"])[0].digest == find_datasets(["mt_bench"])[0].digest
    with pytest.raises(EvaluationError, match="nothing is fetched from the model hub"):
        find_datasets(["hf"], ["somebody/else"])


def test_a_part_is_taken_evenly_so_that_every_category_is_there():
    [found] = find_datasets(["mt_bench"])
    part = found.select(16)
    assert len(part.questions) == 16
    assert len({question.category for question in part.questions}) == 8
    assert found.select(100) == found.select(None) == found
    assert [q.category for q in found.select(3, ["math"]).questions] == ["math"] * 3
    assert part.digest != found.digest
    with pytest.raises(EvaluationError, match=r"no category 'maths'; it has 'writing'"):
        found.select(None, ["maths"])


def test_files_are_read_in_every_form(tmp_path):
    rows = [
        {"question_id": 7, "category": "a", "turns": ["one\u2028line", "two"]},
        {"prompt": "text"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt_token_ids": [1, 2]},
    ]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
    (tmp_path / "mine.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    [mine] = find_datasets([], [tmp_path / "mine.jsonl"])
    assert mine.name == "mine"
    assert [q.id for q in mine.questions] == ["7", "1", "2", "3"]
    assert [q.turns for q in mine.questions] == [("one\u2028line", "two"), ("text",), (), ()]
    assert mine.questions[2].prompt == [{"role": "user", "content": "hi"}]
    assert mine.questions[3].prompt == {"prompt_token_ids": [1, 2]}
    assert [q.num_turns for q in mine.questions] == [2, 1, 1, 1]
    assert read_dataset(tmp_path / "packed.jsonl.gz").digest == mine.digest


def test_a_known_set_is_found_in_a_folder_and_a_shipped_one_can_be_replaced(tmp_path):
    for name in ("spec_bench", "gsm8k"):
        (tmp_path / f"{name}.jsonl").write_text('{"turns": ["x"]}\n')
    found = find_datasets(["spec_bench", "gsm8k", "humaneval"], [tmp_path])
    assert [(d.name, len(d.questions)) for d in found] == [("spec_bench", 1), ("gsm8k", 1), ("humaneval", 80)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no question"),
        ("{", r"line 1 is not valid JSON"),
        ("[1]", r"line 1 is no question"),
        ('{"question": "x"}', r"line 1 has no prompt; a line must be"),
        ('{"turns": ["x"], "prompt": "y"}', r"has turns and prompt"),
        ('{"turns": []}', r"turns must hold text, got \[\]"),
        ('{"turns": [1]}', r"turns must hold text"),
        ('{"prompt_token_ids": []}', r"prompt_token_ids must be a list that is not empty"),
        ('{"question_id": 1, "prompt": "x"}\n{"question_id": 1, "prompt": "y"}', "question_id 1 twice"),
    ],
)
def test_what_is_no_dataset_is_refused_with_its_line(tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(EvaluationError, match=message):
        find_datasets([], [tmp_path / "bad.jsonl"])


@pytest.mark.parametrize(
    ("names", "paths", "message"),
    [
        (["spec_bench"], [], r"its licence does not allow it; give its file spec_bench\.jsonl"),
        (["nonsense"], [], r"'nonsense' is unknown; shipped are mt_bench"),
        (["custom"], [], "needs a file as dataset path"),
        (["hf"], [], "needs a dataset path, such as philschmid/mt-bench"),
        ([], ["/no/such/file"], "dataset path /no/such/file does not exist"),
    ],
)
def test_a_set_that_is_not_there_is_an_error_that_says_what_to_do(names, paths, message):
    with pytest.raises(EvaluationError, match=message):
        find_datasets(names, paths)
