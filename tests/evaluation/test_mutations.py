"""Faults of a head that leave the text right: `--test` must fail for each, on the released head and its real target.

pytest -m slow -s tests/evaluation/test_mutations.py       prints what each fault does to the acceptance
"""

import dataclasses

import jax
import pytest

from eagle_jax import Draft, Target, load_draft, load_target
from eagle_jax.decoding.tree import TreeConfig
from eagle_jax.evaluation import Configuration, EvaluationSettings, Report, evaluate, find_datasets
from eagle_jax.evaluation.expectations import check_models, compare, find_expectation
from eagle_jax.loading import CheckpointError
from eagle_jax.loading.demo_target import packaged_target
from eagle_jax.loading.shipped import shipped_head

HEAD = "smollm2-135m-instruct-eagle3"
NAME = f"{HEAD}-chain3"


class Identity:
    """In the place of a norm."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def without(norm: str):
    """The head without one of its norms."""

    def change(target: Target) -> Draft:
        draft = load_draft(shipped_head(HEAD), target)
        place = draft.head.layers[0] if hasattr(draft.head.layers[0], norm) else draft.head
        assert getattr(place, norm) is not None
        setattr(place, norm, Identity())
        return draft

    return change


def shifted(target: Target) -> Draft:
    layers = load_draft(shipped_head(HEAD), target).config.capture_layers
    ids = {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers], "use_aux_hidden_state": True}
    draft = load_draft(shipped_head(HEAD), target, config_overrides={"eagle_config": ids}, layer_id_convention="input")
    assert draft.config.capture_layers == tuple(layer + 1 for layer in layers)
    return draft


MUTATIONS = {
    "capture layers shifted by one": shifted,
    "rope base of the target": lambda target: load_draft(
        shipped_head(HEAD), target, rope_theta=float(target.config.rope.theta)
    ),
    "hidden_norm left out": without("hidden_norm"),
    "input_norm left out": without("input_norm"),
}


@pytest.fixture(scope="module")
def target():
    try:
        return load_target(packaged_target(), dtype="float32")
    except CheckpointError as error:
        pytest.skip(f"SmolLM2 is out of reach: {error}")


def run(target: Target, draft: Draft):
    """Checks of the shipped expectation."""
    expectation, _ = find_expectation(NAME)
    wanted = expectation.settings
    datasets = [d.select(wanted["num_prompts"]) for d in find_datasets(wanted["dataset_name"])]
    configuration = Configuration(shape=TreeConfig.chain(wanted["num_spec_tokens"]))
    settings = EvaluationSettings(output_len=wanted["output_len"])
    evaluation = evaluate(target, draft, [configuration], datasets, settings)
    return compare(expectation, Report(evaluation).total(configuration).acceptance, target, draft)


@pytest.mark.slow
def test_the_released_head_passes(target):
    draft = load_draft(shipped_head(HEAD), target)
    check_models(find_expectation(NAME)[0], target, draft)
    checks = run(target, draft)
    for check in checks:
        print(dataclasses.asdict(check))
    assert all(check.passed for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_that_leaves_the_text_right_fails(target, name):
    checks = run(target, MUTATIONS[name](target))
    print(f"\n{name}:")
    for check in checks:
        print(f"  {'passed' if check.passed else 'FAILED'}  {check.what}: {check.expected} -> {check.found}")
    # The log-probabilities must notice it by themselves: the acceptance may not.
    assert not checks[-1].passed
    assert "log-probabilities" in checks[-1].what
