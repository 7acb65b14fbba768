"""`eagle-jax eval`: what it prints and writes, several turns, resuming, and regression tests."""

import argparse
import json
import sys

import pytest

from eagle_jax import load_target
from eagle_jax.cli.eval import add_options

SHAPES = ("--num-spec-tokens", "3", "--tree", "8,2,3")
SMALL = ("--output-len", "12", "--ignore-eos")


@pytest.fixture
def questions(tmp_path) -> str:
    rows = [
        {"question_id": 1, "category": "animals", "turns": ["the fox", "and the dog"]},
        {"question_id": 2, "category": "colours", "turns": ["the brown", "jumps over"]},
        {"question_id": 3, "category": "colours", "turns": ["lazy"]},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def models(chat_model, head) -> tuple[str, ...]:
    return ("--model-dir", chat_model, "--eagle-dir", head)


def read_rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_vllms_lines_tables_rows_report_page_and_pictures(command, models, questions, tmp_path):
    out_folder = tmp_path / "out"
    code, out, err = command(
        "eval",
        *models,
        "--dataset-path",
        questions,
        *SHAPES,
        "--plain",
        "--turns",
        "2",
        *SMALL,
        "--output",
        str(out_folder),
    )
    assert code == 0
    report = json.loads((out_folder / "report.json").read_text())
    for entry in report["configurations"][1:]:
        total = entry["total"]
        assert "\n".join([
            f"{entry['name']}:",
            "-" * 50,
            f"total_num_output_tokens: {total['output_tokens']}",
            f"num_drafts: {total['rounds']}",
            f"num_draft_tokens: {total['drafted']}",
            f"num_accepted_tokens: {total['accepted']}",
            f"mean acceptance length: {1 + total['accepted'] / total['rounds']:.2f}",
            "-" * 50,
            *(f"acceptance at token {i}: {rate:.2f}" for i, rate in enumerate(total["acceptance_rates"])),
        ]) in out  # fmt: skip
        assert total["speed_up"] > 0
        assert set(entry["datasets"]["mine"]["categories"]) == {"animals", "colours"}
        assert entry["datasets"]["mine"]["turns"]["2"]["requests"] == 2
    assert "accepted length by category" in out
    assert "Recommended here at temperature 0" in out
    assert "15/15 mine turn 2, tree 8/2/3, T=0" in err
    requests = [row for row in read_rows(out_folder) if row["kind"] == "request"]
    assert len(requests) == 3 * (3 + 2)
    assert all(len(row["token_ids"]) == 12 == 1 + sum(row["accepted_lengths"]) for row in requests)
    page = (out_folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert 'src="http' not in page
    assert report["recommendations"][0]["text"].split(":")[0] in page
    for name in ("speed.png", "acceptance_by_depth.png", "accepted_length_by_category.png", "accepted_lengths.png"):
        assert (out_folder / name).read_bytes().startswith(b"\x89PNG")


def test_the_second_turn_sees_the_models_own_first_answer(command, models, questions, tmp_path, chat_model):
    arguments = ("--dataset-path", questions, "--num-prompts", "1", "--tree", "8,2,3", "--turns", "2", *SMALL)
    code, out, err = command(
        "eval", *models, *arguments, "--print-output", "--verbose", "--output", str(tmp_path), "--no-pictures"
    )
    assert code == 0
    first, second = [row for row in read_rows(tmp_path) if row["kind"] == "request"]
    prompt = f"<user>the fox\n<assistant>{first['text']}\n<user>and the dog\n<assistant>"
    assert f"prompt: {prompt}\ngenerated text: {second['text']}\n" in out
    target = load_target(chat_model)
    assert second["prompt_tokens"] == len(target.tokenizer.encode(prompt, add_special_tokens=False))
    assert "Chat template:\n{% for message" in err
    assert "First prompt as it is rendered:\n<user>the fox" in err


def test_the_same_command_goes_on_and_other_settings_are_refused_by_name(command, models, questions, tmp_path):
    arguments = (
        "eval",
        *models,
        "--dataset-path",
        questions,
        "--tree",
        "8,2,3",
        "--no-pictures",
        "--output",
        str(tmp_path / "o"),
    )
    code, out, _ = command(*arguments, *SMALL, "--time-limit", "0", "--json")
    assert code == 1
    assert json.loads(out)["complete"] is False
    code, out, err = command(*arguments, *SMALL, "--json")
    assert code == 0
    total = json.loads(out)["configurations"][0]["total"]
    assert total["requests"] == 3
    assert 1 / 3 < total["draft_acceptance_rate"] * 7 < 4
    assert err.count("tokens/s") == 3
    code, again, err = command(*arguments, *SMALL, "--json")
    assert code == 0
    assert again == out
    assert "tokens/s" not in err
    code, _, err = command(*arguments, "--output-len", "13", "--ignore-eos")
    assert code == 2
    assert "measured with another output_len: 12 there, 13 now" in err


@pytest.mark.slow
def test_sampling_is_reproducible_and_the_same_for_every_shape(command, models, questions):
    arguments = (
        "eval",
        *models,
        "--dataset-path",
        questions,
        "--tree",
        "8,2,3",
        "--plain",
        "--temp",
        "0",
        "1",
        "--json",
        *SMALL,
    )
    names = ("plain, T=0", "tree 8/2/3, T=0", "plain, T=1", "tree 8/2/3, T=1")
    for seed in ("0", "5"):
        _, out, _ = command(*arguments, "--seed", seed)
        found = json.loads(out)
        assert tuple(entry["name"] for entry in found["configurations"]) == names
        assert found["settings"]["seed"] == int(seed)
        assert [r["temperature"] for r in found["recommendations"]] == [0, 1]
        assert all(entry["total"]["output_tokens"] == 36 for entry in found["configurations"])


def test_an_expectation_is_recorded_passes_and_fails(command, models, questions, tmp_path):
    file = tmp_path / "mine.json"
    arguments = ("eval", *models, "--test", str(file))
    settings = ("--dataset-path", questions, "--dataset-name", "custom", "--tree", "8,2,3", "--output-len", "12")
    code, _, err = command(*arguments, *settings)
    assert code == 2
    assert "does not exist; --record makes it" in err
    code, _, err = command(*arguments, *settings, "--record", "--json")
    assert code == 0, err
    recorded = json.loads(file.read_text())
    assert recorded["settings"] == {
        "dataset_name": ["mine"], "output_len": 12, "temp": 0.0, "dtype": "float32",
        "tree": {"total_tokens": 8, "depth": 2, "top_k": 3},
    }  # fmt: skip
    assert [len(chain["log_probs"]) for chain in recorded["draft_log_probs"]["chains"]] == [5] * 8

    def test() -> tuple[int, list[dict]]:
        code, out, err = command(*arguments, "--dataset-path", questions, "--json")
        assert code in (0, 1), err
        return code, json.loads(out)["tests"][0]["checks"]

    code, checks = test()
    assert code == 0
    assert [check["passed"] for check in checks] == [True] * 5
    changed = recorded | {"mean_acceptance_length": recorded["mean_acceptance_length"] * 1.03}
    changed["acceptance_rates"] = [rate * 1.06 for rate in recorded["acceptance_rates"]]
    changed["draft_log_probs"] = json.loads(json.dumps(recorded["draft_log_probs"]))
    changed["draft_log_probs"]["chains"][5]["log_probs"][4] += 2e-3
    file.write_text(json.dumps(changed))
    code, checks = test()
    assert code == 1
    assert [check["passed"] for check in checks] == [False] * 5
    for name in ("target_digest", "draft_digest"):
        file.write_text(json.dumps(recorded | {name: "0" * 64}))
        code, _, err = command(*arguments, "--dataset-path", questions)
        assert code == 2
        assert "record the expectation anew: eagle-jax eval --test mine --record" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-prompts", "0"), "--num-prompts must be at least 1, or -1 for all, got 0"),
        (("--tp", "3"), "tensor_parallel_size"),
        (("--dataset-name", "alpaca"), "'alpaca' does not come with the package"),
        (("--temp", "-1"), "must be at least 0, got -1"),
        (("--top-p", "2"), "must be from 0 to 1, got 2"),
        (("--num-spec-tokens", "3", "3"), "chain 3, T=0 is asked for twice"),
        (("--temp", "1", "--tree", "8,2,3", "--rejection-sample-method", "block"), "'block' works on chains"),
        (("--record",), "--record writes expectations, which --test must name"),
        (("--test", "no-such"), "expectation 'no-such' is unknown; shipped are"),
        (("--test", "llama-3.1-8b-eagle3", "--num-spec-tokens", "4"), "--num-spec-tokens [4] contradicts expectation"),
        (("--test", "llama-3.1-8b-eagle3"), "is about meta-llama/Llama-3.1-8B-Instruct with"),
        (("--test",), "nothing was recorded for"),
    ],
)
def test_wrong_options_are_errors_that_say_what_is_right(command, models, questions, arguments, message):
    paths = () if "--dataset-name" in arguments else ("--dataset-path", questions)
    code, _, err = command("eval", *models, *paths, *arguments)
    assert code == 2
    assert message in err


def test_without_matplotlib_the_extra_is_named_before_anything_is_measured(command, models, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = command("eval", *models, "--output", str(tmp_path))
    assert code == 2
    assert err == "eagle-jax: error: pictures need matplotlib: pip install 'eagle-jax[eval]', or give --no-pictures\n"


def test_a_target_without_a_head_cannot_be_measured(command, chat_model):
    code, _, err = command("eval", "--model-dir", chat_model)
    assert code == 2
    assert "give --eagle-dir for this --model-dir" in err


def test_the_flags_of_vllms_script_are_there():
    parser = argparse.ArgumentParser()
    add_options(parser)
    text = parser.format_help()
    for flag in (
        "--method", "--model-dir", "--eagle-dir", "--num-spec-tokens", "--tp", "--dataset-name", "--dataset-path",
        "--num-prompts", "--temp", "--top-p", "--top-k", "--output-len", "--max-model-len", "--max-num-seqs", "--print-output",
        "--test", "--seed",
    ):  # fmt: skip
        assert flag in text
