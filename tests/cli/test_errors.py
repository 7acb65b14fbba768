"""What is refused, in one line and with exit code 2; and what is not ours to word."""

import pytest

from eagle_jax.cli import inspect


def fails(result: tuple[int, str, str], *parts: str) -> None:
    code, out, err = result
    assert code == 2, err
    assert out == ""
    last = err.rstrip("\n").splitlines()[-1]
    assert "error: " in last
    assert "Traceback" not in err
    for part in parts:
        assert part in last


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["generate"], "one of the arguments PROMPT --prompts-file is required"),
        (["generate", "a", "--prompts-file", "b"], "not allowed with argument"),
        (["generate", "a", "--json", "--stream"], "not allowed with argument"),
        (["generate", "a", "--max-tokens", "0"], "must be at least 1, got 0"),
        (["generate", "a", "--max-tokens", "many"], "'many' is not an integer"),
        (["generate", "a", "--tree", "60,7"], "'60,7' is not TOTAL,DEPTH,TOP_K"),
        (["generate", "a", "--tree", "60,7,ten"], "is not TOTAL,DEPTH,TOP_K"),
        (["generate", "a", "--tree", "60,7,10", "--num-speculative-tokens", "3"], "not allowed with argument"),
        (["generate", "a", "--num-speculative-tokens", "0"], "must be at least 1, got 0"),
        (["generate", "a", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["generate", "a", "--device", "npu"], "invalid choice: 'npu'"),
        (["generate", "a", "--max", "3"], "unrecognized arguments: --max 3"),
        (["generate", "a", "--quiet", "--verbose"], "not allowed with argument"),
        (["demo", "--repeats", "0"], "must be at least 1, got 0"),
        (["no-such-command"], "invalid choice"),
        ([], "required: COMMAND"),
    ],
)
def test_a_wrong_command_line(command, arguments, part):
    fails(command(*arguments), part)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--draft", "x", "--no-draft"], "--draft and --no-draft contradict each other"),
        (["--num-speculative-tokens", "3"], "give --draft"),
        (["--tree", "8,2,3", "--no-draft"], "give --draft"),
        (["--stop", ""], "stop"),
    ],
)
def test_options_that_do_not_go_together(command, chat_model, arguments, part):
    fails(command("generate", "the fox", "--model", chat_model, *arguments), part)


def test_a_tree_that_cannot_be_is_refused_before_anything_is_loaded(command):
    result = command("generate", "the fox", "--model", "/no/such/folder", "--draft", "x", "--tree", "9,0,2")
    fails(result, "total_tokens 9 (the root included) exceeds")


def test_the_demo_needs_a_head_for_another_model(command, chat_model):
    fails(command("demo", "--model", chat_model), "give --draft")


def test_a_stream_is_of_one_prompt(command, chat_model, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a\nb\n")
    result = command("generate", "--prompts-file", str(file), "--stream", "--model", chat_model)
    fails(result, "--stream prints one answer", "holds 2 prompts")


def test_a_missing_file_of_prompts(command):
    fails(command("generate", "--prompts-file", "/no/such/file"), "/no/such/file cannot be read")


def test_a_missing_model(command):
    fails(command("generate", "a", "--model", "/no/such/folder"), "'/no/such/folder'")


def test_a_repository_in_offline_mode(command, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    fails(command("generate", "a", "--model", "owner/name"), "owner/name is not in the cache", "HF_HUB_OFFLINE")


def test_a_head_of_another_target(command, chat_model):
    result = command("generate", "a", "--model", chat_model, "--draft", "smollm2-135m-instruct-eagle3")
    fails(result, "49152", "512")


def test_text_for_a_model_without_a_tokenizer(command, bare_model):
    fails(command("generate", "a", "--model", bare_model), "no tokenizer", "prompt_token_ids")


def test_an_empty_prompt(command, chat_model):
    fails(command("generate", "", "--model", chat_model), "prompt 0 is empty")


def test_a_prompt_that_does_not_fit(command, chat_model):
    fails(command("generate", "the fox " * 9, "--model", chat_model, "--max-model-len", "20"), "leaves no room", "20")


def test_more_context_than_the_model_has(command, chat_model):
    fails(command("generate", "a", "--model", chat_model, "--max-model-len", "513"), "max_model_len 513", "512")


@pytest.mark.parametrize("device", ["gpu", "tpu"])
@pytest.mark.parametrize("arguments", [["generate", "a"], ["demo"]])
def test_a_device_that_is_not_there(command, monkeypatch, device, arguments):
    monkeypatch.delenv("JAX_PLATFORMS")
    extra = {"gpu": "cuda", "tpu": "tpu"}[device]
    fails(
        command(*arguments, "--device", device),
        f"--device {device}: JAX finds no {device.upper()}",
        f"eagle-jax[{extra}]",
    )


def test_a_platform_that_the_environment_rules_out_is_named(command, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    fails(command("generate", "a", "--device", "gpu"), "--device gpu finds no device while JAX_PLATFORMS=cpu is set")


def raising(error: Exception):
    def run(options):
        raise error

    return run


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError, MemoryError, NotImplementedError])
def test_an_error_from_a_line_of_another_project_keeps_its_traceback(command, monkeypatch, error):
    monkeypatch.setattr(inspect, "run", raising(error("deep inside")))  # this test is not eagle_jax either
    with pytest.raises(error, match="deep inside"):
        command("inspect", "x")


def test_a_bug_of_ours_keeps_its_traceback(command, monkeypatch):
    monkeypatch.setattr(inspect, "run", lambda options: options.no_such_option)
    with pytest.raises(AttributeError):
        command("inspect", "x")


def test_the_traceback_is_there_on_request(command, monkeypatch):
    monkeypatch.setenv("EAGLE_JAX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="/no/such/folder"):
        command("inspect", "/no/such/folder")


def test_an_interruption_is_no_error(command, monkeypatch):
    monkeypatch.setattr(inspect, "run", raising(KeyboardInterrupt()))
    code, _, err = command("inspect", "x")
    assert (code, err) == (130, "eagle-jax: interrupted\n")
