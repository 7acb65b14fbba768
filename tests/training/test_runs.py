"""Whole runs on a tiny target: what the trainer reports is what decoding measures, and a run can be cut anywhere."""

import dataclasses
import json

import numpy as np
import pytest
import runs

from eagle_jax import load_draft, speculative_generate
from eagle_jax.cli.app import build_parser
from eagle_jax.cli.session import UsageError
from eagle_jax.cli.train import make_config
from eagle_jax.training.config import ExistingHead
from eagle_jax.training.conversations import Conversation, DataError
from eagle_jax.training.losses import LossConfig
from eagle_jax.training.optimizers import OptimizerConfig
from eagle_jax.training.trainer import RunError, train


def measured(folder, depth: int, **options):
    draft = load_draft(folder, runs.target(), **options)
    result = speculative_generate(
        runs.target(),
        draft,
        [{"prompt_token_ids": runs.PROMPT}],
        max_new_tokens=runs.TOKENS,
        num_speculative_tokens=depth,
    )
    (row,) = result.metrics
    assert result.token_ids[0] == runs.answer()
    return row


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=pytest.mark.slow) for m in ("eagle3.1", "eagle3", "eagle")],
)
def test_an_overfitted_head_is_accepted_in_decoding_as_the_trainer_says(tmp_path, method):
    result = train(
        runs.target(), [runs.conversation()], tmp_path, runs.config(method, total_steps=160), log_every=80,
        tensorboard=False, say=runs.silent,
    )  # fmt: skip
    assert result.finished
    assert result.accepted_length > 3
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluation = next(r for r in rows if r["kind"] == "evaluation" and r["step"] == result.best_step)
    for folder in (result.head, result.speculators):
        row = measured(folder, 3)
        assert sum(row.accepted_lengths) / row.rounds == pytest.approx(result.accepted_length, abs=0.15)
        rates = np.array(row.accepted_at_depth) / row.rounds
        np.testing.assert_allclose(rates, evaluation["rate_at_depth"], atol=0.08)
    assert (tmp_path / "course.png").stat().st_size > 10_000


def test_a_run_that_is_cut_after_every_step_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    config = runs.config(feature_noise=0.1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = {"log_every": 1, "tensorboard": False, "picture": False, "say": runs.silent}
    assert train(runs.target(), [runs.conversation()], whole, config, **options).finished
    for step in (1, 2, 3):
        result = train(runs.target(), [runs.conversation()], parts, config, max_seconds=0, **options)
        assert (result.step, result.finished) == (step, step == 3)
    for name in ("head/model.safetensors", "head/config.json", "head-speculators/model.safetensors"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()

    def course(folder):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if k not in ("time", "tokens_per_second")} for row in rows]

    assert course(parts) == course(whole)
    with pytest.raises(RunError, match="another steps: 3, not 2"):
        train(runs.target(), [runs.conversation()], parts, dataclasses.replace(config, steps=2), **options)
    other = dataclasses.replace(runs.conversation(), tokens=runs.conversation().tokens[::-1].copy())
    with pytest.raises(RunError, match="another data"):
        train(runs.target(), [other], parts, config, **options)


@pytest.mark.parametrize("method", ["eagle3.1", pytest.param("eagle", marks=pytest.mark.slow)])
def test_a_head_is_trained_further_from_where_it_is(tmp_path, method):
    options = {"log_every": 1, "tensorboard": False, "picture": False, "say": runs.silent}
    first = train(runs.target(), [runs.conversation()], tmp_path / "first", runs.config(method), **options)
    head = ExistingHead(path=str(first.head), method="eagle" if method == "eagle" else "eagle3")
    # A step of no length: what comes out is what went in, its draft vocabulary too.
    still = runs.config(method, head=head, total_steps=1, optimizer=OptimizerConfig(learning_rate=1e-30))
    same = train(runs.target(), [runs.conversation()], tmp_path / "same", still, **options)
    for name in ("head/model.safetensors", "head/config.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    assert same.accepted_length == first.accepted_length
    more = dataclasses.replace(still, optimizer=OptimizerConfig(learning_rate=4e-3), total_steps=4)
    train(runs.target(), [runs.conversation()], tmp_path / "more", more, **options)
    losses = {}
    for folder in ("first", "more"):
        rows = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        losses[folder] = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses["more"][-1] < losses["more"][0] < losses["first"][-1] < losses["first"][0]
    other = ExistingHead(path=head.path, method="eagle3" if method == "eagle" else "eagle")
    wrong = dataclasses.replace(still, head=other, loss=LossConfig(feature_weight=0.0))
    with pytest.raises(ValueError, match=f"method '{other.method}' contradicts the tensors"):
        train(runs.target(), [runs.conversation()], tmp_path / "wrong", wrong, **options)


@pytest.mark.parametrize(
    "option",
    ["--draft-vocab-size 8", "--capture-layers 0 1", "--num-hidden-layers 1", "--rope-theta 5e5", "--random-lm-head"],
)
def test_options_that_shape_a_new_head_do_not_go_with_an_old_one(option):
    start = ["train", "--model", "m", "--data", "d", "--output", "o", "--epochs", "1", "--from-head", "h"]
    with pytest.raises(UsageError, match=f"{option.split()[0]} is for new heads; h brings its own"):
        make_config(build_parser().parse_args([*start, *option.split()]))
    for method, head in (("eagle3", "eagle3"), ("eagle3.1", "eagle3"), ("eagle", "eagle")):
        config = make_config(build_parser().parse_args([*start, "--method", method]))
        assert config.head == ExistingHead(path="h", method=head)


def test_a_head_that_the_format_cannot_say_is_refused_before_training(tmp_path):
    options = {"log_every": 1, "tensorboard": False, "picture": False, "say": runs.silent}
    first = train(runs.target(), [runs.conversation()], tmp_path / "first", runs.config(), **options)
    config = json.loads((first.head / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (first.head / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="cannot be trained further: its rope is"):
        train(
            runs.target(), [runs.conversation()], tmp_path / "more", runs.config(head=ExistingHead(path=str(first.head))),
            **options,
        )  # fmt: skip


def test_a_mask_without_a_token_is_an_error_that_names_the_sample():
    empty = Conversation(np.arange(5, dtype=np.int32), np.zeros(5, bool), "chats.jsonl line 7")
    with pytest.raises(DataError, match=r"chats\.jsonl line 7: the assistant mask is all zero"):
        empty.check(97)
    with pytest.raises(DataError, match="line 7: token id 97 is not one of the target's ids 0 to 96"):
        dataclasses.replace(empty, tokens=np.array([97] * 5, np.int32), assistant=np.ones(5, bool)).check(97)
