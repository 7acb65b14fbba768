"""`eagle-jax generate`."""

import io
import json

import numpy as np
import pytest

from eagle_jax import generate, load_draft, load_target, speculative_generate
from eagle_jax.cli.generate import read_prompts
from eagle_jax.cli.session import UsageError

SMALL = ("--max-tokens", "12", "--ignore-eos")


@pytest.fixture(scope="module")
def expected(chat_model):
    """What the Python API says to the same chat."""
    target = load_target(chat_model)
    return generate(target, "the fox", max_new_tokens=12, chat=True, ignore_eos=True)


def test_the_answer_is_that_of_the_python_api_and_alone_on_standard_output(command, chat_model, expected):
    code, out, err = command("generate", "the fox", "--model", chat_model, *SMALL)
    assert code == 0
    assert out == expected.texts[0] + "\n"
    assert "Running on cpu" in err
    assert "12 tokens" in err


@pytest.mark.parametrize("shape", [(), ("--tree", "8,2,3")])
def test_a_draft_head_changes_the_rounds_and_not_the_answer(command, chat_model, head, expected, shape):
    code, out, err = command("generate", "the fox", "--model", chat_model, "--draft", head, *shape, *SMALL)
    assert code == 0
    assert out == expected.texts[0] + "\n"
    assert "accepted length" in err


def test_a_stream_prints_the_same_text(command, chat_model, head, expected):
    code, out, _ = command("generate", "the fox", "--stream", "--model", chat_model, "--draft", head, *SMALL)
    assert code == 0
    assert out == expected.texts[0] + "\n"


def test_without_chat_the_text_itself_is_continued(command, chat_model):
    target = load_target(chat_model)
    plain = generate(target, "the fox", max_new_tokens=12, ignore_eos=True)
    code, out, err = command("generate", "the fox", "--no-chat", "--verbose", "--model", chat_model, *SMALL)
    assert code == 0
    assert out == plain.texts[0] + "\n"
    assert "Prompt 0: 'the fox'" in err


def test_verbose_shows_the_rendered_prompt(command, chat_model):
    _, _, err = command("generate", "the fox", "--verbose", "--model", chat_model, *SMALL)
    assert r"'<user>the fox\n<assistant>'" in err


def test_a_model_without_a_template_is_not_chatted_with(command, text_model):
    code, _, err = command("generate", "the fox", "--verbose", "--model", text_model, *SMALL)
    assert code == 0
    assert "Prompt 0: 'the fox'" in err


def test_quiet_says_nothing_beside_the_answer(command, chat_model, expected):
    assert command("generate", "the fox", "--quiet", "--model", chat_model, *SMALL) == (0, expected.texts[0] + "\n", "")


def test_json_holds_everything_a_program_needs(command, chat_model, head):
    code, out, _ = command(
        "generate", "the fox", "--json", "--model", chat_model, "--draft", head, "--num-speculative-tokens", "3", *SMALL
    )
    assert code == 0
    found = json.loads(out)
    target = load_target(chat_model)
    draft = load_draft(head, target)
    result = speculative_generate(
        target, draft, "the fox", max_new_tokens=12, num_speculative_tokens=3, chat=True, ignore_eos=True
    )
    [output] = found["outputs"]
    assert output == {
        "prompt": "<user>the fox\n<assistant>",
        "prompt_token_ids": result.prompt_token_ids[0],
        "text": result.texts[0],
        "token_ids": result.token_ids[0],
        "finish_reason": "length",
        "stop_reason": None,
        "seed": None,
        "accepted_lengths": result.metrics[0].accepted_lengths,
    }
    assert found["model"] == chat_model
    assert found["draft"] == head
    assert found["tree"] == {"total_tokens": 4, "depth": 2, "top_k": 1}
    assert found["dtype"] == "float32"
    assert found["backend"]["platform"] == "cpu"
    assert set(found["attention"].values()) == {"xla_blocked"}
    assert found["metrics"]["rounds"] == result.metrics.total.rounds
    assert found["metrics"]["mean_acceptance_length"] == pytest.approx(result.metrics.mean_acceptance_length)
    assert len(found["metrics"]["acceptance_rates"]) == 3
    assert found["timing"]["output_tokens"] == 12
    assert found["timing"]["tokens_per_second"] > 0


def test_json_of_plain_decoding_has_null_where_nothing_was_drafted(command, chat_model):
    _, out, _ = command("generate", "the fox", "--json", "--model", chat_model, "--max-tokens", "1", "--ignore-eos")
    found = json.loads(out)
    assert found["draft"] is None
    assert found["tree"] is None
    assert found["metrics"]["mean_acceptance_length"] is None


def test_a_stop_text_ends_the_answer(command, chat_model, expected):
    stop = expected.texts[0][7:9]
    code, out, _ = command("generate", "the fox", "--json", "--stop", stop, "--model", chat_model, *SMALL)
    assert code == 0
    [output] = json.loads(out)["outputs"]
    assert output["text"] == expected.texts[0].split(stop)[0]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)


def test_a_file_of_prompts_is_answered_in_order(command, chat_model, expected, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("the dog\n\nthe fox\n")
    code, out, _ = command("generate", "--prompts-file", str(file), "--json", "--model", chat_model, *SMALL)
    assert code == 0
    dog, fox = json.loads(out)["outputs"]
    assert dog["prompt"] == "<user>the dog\n<assistant>"
    assert fox["token_ids"] == expected.token_ids[0]
    _, out, _ = command("generate", "--prompts-file", str(file), "--model", chat_model, *SMALL)
    assert out == (
        f"[0] '<user>the dog\\n<assistant>'\n{dog['text']}\n\n[1] '<user>the fox\\n<assistant>'\n{expected.texts[0]}\n"
    )


def test_a_model_without_a_tokenizer_continues_token_ids(command, bare_model, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [5, 9, 300]}\n')
    target = load_target(bare_model)
    wanted = generate(target, np.array([5, 9, 300]), max_new_tokens=12, ignore_eos=True).token_ids[0]
    for how in ((), ("--stream",)):
        code, out, _ = command("generate", "--prompts-file", str(file), *how, "--model", bare_model, *SMALL)
        assert code == 0
        assert [int(part) for part in out.strip("[]\n ").replace(",", " ").split()] == wanted


def test_lines_of_a_jsonl_file_can_be_texts_chats_and_ids(tmp_path):
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "hi\u2028there"}]
    file.write_text(
        "\n".join([
            json.dumps({"prompt": "text"}),
            json.dumps({"messages": chat}, ensure_ascii=False),
            json.dumps({"prompt_token_ids": [1, 2]}),
        ]),
        encoding="utf-8",
    )  # fmt: skip
    assert read_prompts(str(file)) == ["text", chat, {"prompt_token_ids": [1, 2]}]


def test_prompts_come_from_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\r\ntwo\n"))
    assert read_prompts("-") == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompt"),
        (" \n\n", "holds no prompt"),
        ("{", "line 1 is not valid JSON"),
        ('{"prompt": "a"}\n["b"]', "line 2 is not one of"),
        ('{"prompt": "a", "messages": []}', "line 1 is not one of"),
        ('{"text": "a"}', "line 1 is not one of"),
        ('{"messages": "a"}', "messages must be a list"),
        ('{"messages": []}', "messages must be a list"),
        ('{"prompt": 3}', "prompt must be a text"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path, content, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_prompts(str(file))


def test_a_file_that_is_not_text_is_refused(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(str(file))


def test_sampling_options_are_those_of_the_python_api(command, chat_model, head):
    options = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 7}
    target = load_target(chat_model)
    wanted = generate(target, "the fox", max_new_tokens=12, chat=True, ignore_eos=True, **options)
    given = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    code, out, err = command("generate", "the fox", "--model", chat_model, "--draft", head, *given, *SMALL)
    assert (code, out) == (0, wanted.texts[0] + "\n")
    assert "seed 7" in err
    unseeded = given[: given.index("--seed")]
    _, out, err = command("generate", "the fox", "--json", "--model", chat_model, "--draft", head, *unseeded, *SMALL)
    assert f"seed {json.loads(out)['outputs'][0]['seed']}" in err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--temperature", "-1"), "temperature must be"),
        (("--temperature", "warm"), "'warm' is not a number"),
        (("--top-p", "0"), "top_p must be"),
        (("--top-k", "1.5"), "'1.5' is not an integer"),
        (("--seed", str(2**63)), "seed must be"),
        (("--min-p", "nan"), "'nan' is not finite"),
    ],
)
def test_sampling_options_that_cannot_be_are_refused_before_anything_is_loaded(command, option, message):
    code, out, err = command("generate", "the fox", "--model", "nowhere", *option)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.slow
def test_a_speculators_checkpoint_alone_is_target_and_head(command, chat_model, head, expected, tmp_path):
    made = str(tmp_path / "head")
    code, _, _ = command(
        "convert", head, made, "--to", "speculators", "--verifier", chat_model, "--num-speculative-tokens", "3"
    )
    assert code == 0
    code, out, err = command("generate", "the fox", "--json", "--model", made, *SMALL)
    assert code == 0
    report = json.loads(out)
    assert (report["model"], report["draft"]) == (chat_model, made)
    assert report["tree"] == {"total_tokens": 4, "depth": 2, "top_k": 1}
    assert report["outputs"][0]["text"] == expected.texts[0]
    assert "a chain of 3 a round" in err
    code, out, err = command("generate", "the fox", "--quiet", "--model", made, "--num-speculative-tokens", "3", *SMALL)
    assert (code, out, err) == (0, expected.texts[0] + "\n", "")
