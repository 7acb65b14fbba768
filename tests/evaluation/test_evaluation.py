"""The evaluation loop against recorded runs of the PyTorch reference, whose statistics are computed here from their rounds."""

import dataclasses

import pytest
from support import golden

from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.evaluation import Configuration, Dataset, EvaluationSettings, Question, Report, evaluate
from eagle_jax.evaluation.errors import EvaluationError
from eagle_jax.evaluation.settings import make_configurations

TREE = TreeConfig(total_tokens=26, depth=3, top_k=4)
CHAIN = TreeConfig.chain(3)
TRACES = [t for t in golden.traces() if t.group == ("target_A", "head_A_e3", TREE) and t.name.startswith("greedy_")]


@pytest.fixture(scope="module")
def models():
    return golden.target("target_A"), golden.draft("head_A_e3", "target_A")


def prompts(*ids: list[int]) -> list[Dataset]:
    questions = [Question(id=str(i), category="", prompt={"prompt_token_ids": one}) for i, one in enumerate(ids)]
    return [Dataset(name="set", questions=tuple(questions))]


def statistics_of_rounds(accept_lengths: list[int], depth: int) -> dict:
    """What a report should say about rounds that accepted so many drafts, by counting."""
    rounds = len(accept_lengths)
    at_depth = [len([n for n in accept_lengths if n >= d]) for d in range(1, depth + 1)]
    reached = [rounds, *at_depth]
    return {
        "rounds": rounds,
        "accepted": sum(accept_lengths),
        "accepted_at_depth": at_depth,
        "mean_acceptance_length": pytest.approx(sum(n + 1 for n in accept_lengths) / rounds),
        "vllm_mean_acceptance_length": pytest.approx(1 + sum(accept_lengths) / rounds),
        "acceptance_rates": pytest.approx([n / rounds for n in at_depth]),
        "conditional_acceptance_rates": [
            pytest.approx(n / r) if r else None for n, r in zip(at_depth, reached, strict=False)
        ],
        "histogram": [accept_lengths.count(n) for n in range(depth + 1)],
    }


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)
def test_golden_traces_give_their_recorded_statistics(models, trace):
    accept_lengths = [entry["accept_length"] for entry in trace.rounds]
    settings = EvaluationSettings(output_len=len(trace.output), ignore_eos=True)
    evaluation = evaluate(*models, [Configuration(shape=TREE)], prompts(trace.prompt), settings)
    [row] = evaluation.rows.requests
    assert row.token_ids == trace.output
    found = Report(evaluation).total(evaluation.configurations[0]).to_json()
    expected = statistics_of_rounds(accept_lengths, TREE.max_depth)
    assert {name: found[name] for name in expected} == expected
    assert found["mean_acceptance_length"] == pytest.approx(trace.data["mean_acceptance_length"])
    assert found["drafted"] == (TREE.total_tokens - 1) * len(accept_lengths)
    # Nothing was cut: the first token, the accepted drafts, and one more a round.
    assert 1 + found["accepted"] + found["rounds"] == found["output_tokens"] == len(trace.output)
    assert found["acceptance_rates"] == sorted(found["acceptance_rates"], reverse=True)
    assert len(set(accept_lengths)) > 1, "accepted lengths must vary"


@pytest.mark.slow
def test_every_configuration_gives_the_text_of_plain_decoding_however_it_is_batched(models):
    ids = [trace.prompt for trace in TRACES]
    configurations = make_configurations([CHAIN, TREE], [0.0], plain=True)
    settings = EvaluationSettings(output_len=24, ignore_eos=True)
    one = evaluate(*models, configurations, prompts(*ids), settings)
    two = evaluate(*models, configurations, prompts(*ids), dataclasses.replace(settings, max_num_seqs=2))
    assert [g.requests for g in one.rows.groups] == [1] * 3 * len(ids)
    assert [g.requests for g in two.rows.groups] == [len(ids)] * 3
    for evaluation in (one, two):
        by_name = {c.name: [r for r in evaluation.rows.requests if r.configuration == c.name] for c in configurations}
        plain, *others = by_name.values()
        assert all(set(row.accepted_lengths) == {1} for row in plain)
        for rows in others:
            assert [row.token_ids for row in rows] == [row.token_ids for row in plain]
            assert all(len(row.token_ids) == 1 + sum(row.accepted_lengths) for row in rows)
            assert max(max(row.accepted_lengths) for row in rows) > 1
        report = Report(evaluation)
        for configuration in configurations[1:]:
            assert report.total(configuration).speed_up.ratio > 0
        assert report.recommendations[0].best in configurations
    assert all(row.seconds > 0 for row in one.rows.requests)
    assert all(row.seconds is None for row in two.rows.requests)
    # Configurations take turns.
    assert [g.configuration for g in one.rows.groups[:4]] == [
        "plain, T=0",
        "chain 3, T=0",
        "tree 26/3/4, T=0",
        "plain, T=0",
    ]


def test_an_evaluation_goes_on_where_it_was_interrupted(models, tmp_path):
    path = tmp_path / "rows.jsonl"
    ids = [trace.prompt for trace in TRACES]
    arguments = (*models, [Configuration(shape=TREE)], prompts(*ids), EvaluationSettings(output_len=8, ignore_eos=True))
    whole = evaluate(*arguments)

    def interrupt(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(*arguments, rows_path=path, on_group=interrupt)
    before = path.read_bytes()
    with path.open("ab") as file:
        file.write(before.splitlines()[1][:50])  # a call was being written
    stopped = evaluate(*arguments, rows_path=path, time_limit=0)
    assert (stopped.complete, stopped.measured, len(stopped.rows.requests)) == (False, 0, 2)
    assert any("not complete" in text for text in Report(stopped).warnings)
    resumed = evaluate(*arguments, rows_path=path)
    assert (resumed.complete, resumed.measured) == (True, len(ids) - 2)
    assert path.read_bytes().startswith(before)
    timeless = [dataclasses.replace(row, seconds=None) for row in resumed.rows.requests]
    assert timeless == [dataclasses.replace(row, seconds=None) for row in whole.rows.requests]
    assert evaluate(*arguments, rows_path=path).measured == 0
    with pytest.raises(EvaluationError, match=r"measured with another output_len: 8 there, 9 now"):
        evaluate(*arguments[:-1], EvaluationSettings(output_len=9, ignore_eos=True), rows_path=path)


def test_what_does_not_fit_is_left_out_and_reported(models):
    ids = [TRACES[0].prompt, [5] * 500]
    settings = EvaluationSettings(output_len=13, ignore_eos=True)
    evaluation = evaluate(*models, [Configuration(shape=TREE)], prompts(*ids), settings)
    assert [row.question_id for row in evaluation.rows.requests] == ["0"]
    [warning] = Report(evaluation).warnings
    assert warning == (
        "1 requests were left out; the first: set question 1, turn 1: prompt and output need 513 tokens, and max_model_len is 512"
    )
    with pytest.raises(EvaluationError, match="no request was measured"):
        evaluate(*models, [Configuration(shape=TREE)], prompts([5] * 500), settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": EvaluationSettings(turns=2)}, "turns 2 needs a chat template"),
        ({"draft": None}, "tree 26/3/4, T=0 needs a draft head"),
        ({"datasets": []}, "datasets is empty"),
    ],
)
def test_what_cannot_be_measured_is_an_error_before_anything_runs(models, change, message):
    arguments = {
        "target": models[0], "draft": models[1], "configurations": [Configuration(shape=TREE)], "datasets": prompts([5]),
    }  # fmt: skip
    with pytest.raises(EvaluationError, match=message):
        evaluate(**(arguments | change))


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(EvaluationError, match="output_len must be an integer of at least 1, got 0"):
        EvaluationSettings(output_len=0)
    with pytest.raises(EvaluationError, match="temperature must be at least 0"):
        Configuration(shape=CHAIN, temperature=-1)
    with pytest.raises(EvaluationError, match="chain 3, T=0 is asked for twice"):
        make_configurations([CHAIN, CHAIN], [0.0], plain=False)
    with pytest.raises(EvaluationError, match="nothing to measure"):
        make_configurations([], [0.0], plain=False)
