"""`eagle-jax eval --test`: acceptance now against acceptance recorded before."""

import argparse
import copy
import dataclasses
import json
from pathlib import Path

import jax

from eagle_jax import __version__
from eagle_jax.cli import measure
from eagle_jax.cli.session import DEFAULT_HEAD, UsageError
from eagle_jax.evaluation import Report
from eagle_jax.evaluation.expectations import (
    SETTINGS,
    Check,
    Expectation,
    check_models,
    check_settings_given,
    compare,
    find_expectation,
    record,
    shipped_expectations,
)

_NOT_WITH_TESTS = [
    "plain",
    "category",
    "ignore_eos",
    "rejection_sample_method",
    "draft_sample_method",
    "top_p",
    "seed",
    "tp",
]
_SAVED_SETTINGS = ("num_prompts", "output_len", "turns")


@dataclasses.dataclass(frozen=True)
class _Outcome:
    name: str
    checks: list[Check]
    file: Path | None
    """Where it was recorded."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def run_tests(options: argparse.Namespace) -> int:
    """Runs, or records, every expectation asked for; 1 if one fails."""

    outcomes = []
    found = _find(options)
    for expectation, path in found:
        chosen = options if expectation is None else _with_settings(options, expectation)
        if len(found) > 1 and options.output is not None:
            chosen.output = options.output / path.stem
        if chosen.dtype == "float32":  # products of a GPU or TPU are less precise unless they are told
            jax.config.update("jax_default_matmul_precision", "highest")
        outcome = _run_one(expectation, path, chosen)
        if outcome is None:
            return 1
        outcomes.append(outcome)
    if options.json:
        print(json.dumps({
            "passed": all(outcome.passed for outcome in outcomes),
            "tests": [
                {"name": o.name, "passed": o.passed, "checks": [dataclasses.asdict(c) for c in o.checks],
                 "recorded": None if o.file is None else str(o.file)}
                for o in outcomes
            ],
        }, indent=2))  # fmt: skip
    else:
        for outcome in outcomes:
            _print(outcome)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _find(options: argparse.Namespace) -> list[tuple[Expectation | None, Path]]:
    """The expectations to run, and their files.

    Raises:
      UsageError: there is none, or one does not go with the other options.
    """

    if options.test:
        found = [find_expectation(name) for name in options.test]
    else:
        draft = DEFAULT_HEAD if options.model is None and options.draft is None else options.draft
        fitting = [e for e in shipped_expectations() if e.belongs_to(options.model, draft)]
        if not fitting:
            known = "; ".join(f"{e.name} ({e.target} with {e.draft})" for e in shipped_expectations())
            raise UsageError(
                f"nothing was recorded for {options.model} with {draft}; there are {known}. "
                "Record your own: --test FILE.json --record"
            )
        found = [find_expectation(e.name) for e in fitting]
    for expectation, path in found:
        if expectation is None:
            if not options.record:
                raise UsageError(f"expectation {path} does not exist; --record makes it from the settings given")
        else:
            check_settings_given(expectation, {name: getattr(options, name) for name in SETTINGS})
            if not expectation.belongs_to(options.model, options.draft):
                raise UsageError(
                    f"expectation {expectation.name} is about {expectation.target} with {expectation.draft}, not about "
                    f"{options.model or expectation.target} with {options.draft or expectation.draft}"
                )
    for name in _NOT_WITH_TESTS:
        if name == "tp" and options.tp == 1:
            continue
        if getattr(options, name) not in (None, False, []):
            raise UsageError(f"--{name.replace('_', '-')} does not go with --test")
    return found


def _with_settings(options: argparse.Namespace, expectation: Expectation) -> argparse.Namespace:
    """The options with the settings of an expectation in them."""
    chosen = copy.copy(options)
    for name, value in expectation.settings.items():
        wrapped = [value] if name in ("temp", "num_spec_tokens", "tree") else value
        setattr(chosen, name, wrapped)
    if options.model is None and not expectation.packaged_target:
        chosen.model = expectation.target
    if options.draft is None:
        chosen.draft = expectation.draft
    return chosen


def _run_one(expectation: Expectation | None, path: Path, options: argparse.Namespace) -> _Outcome | None:
    """One expectation; None if the time limit came first."""

    datasets = measure.read_datasets(options)
    configurations = measure.read_configurations(options, *measure.read_shapes(options))
    if len(configurations) > 1:
        raise UsageError("an expectation is about one shape at one temperature")
    models = measure.Models(options, packaged=expectation is not None and expectation.packaged_target)
    if expectation is not None and not options.record:
        check_models(expectation, models.target, models.draft)
    evaluation = measure.measure(models, configurations, datasets)
    report = Report(evaluation)
    measure.write_report(report, options)
    if not options.json:
        measure.print_report(report, options)
    if not evaluation.complete:
        return None
    acceptance = report.total(configurations[0]).acceptance
    name = path.stem
    if not options.record:
        assert expectation is not None
        return _Outcome(name, compare(expectation, acceptance, models.target, models.draft), None)
    settings = {
        "dataset_name": [dataset.name for dataset in datasets],
        **{key: getattr(options, key) for key in _SAVED_SETTINGS if getattr(options, key) is not None},
        "temp": configurations[0].temperature,
        "dtype": str(models.target.model.dtype),
        **({"num_spec_tokens": options.num_spec_tokens[0]} if options.num_spec_tokens else {}),
        **({"tree": options.tree[0]} if options.tree else {}),
    }
    about = f"Measured by eagle_jax {__version__} on {evaluation.settings['device']}, jax {evaluation.settings['jax']}."
    record(expectation, name, settings, acceptance, models.target, models.draft, about=about).write(path)
    return _Outcome(name, [], path)


def _print(outcome: _Outcome) -> None:
    if outcome.file is not None:
        print(f"Recorded {outcome.name} in {outcome.file}")
        return
    print(f"Test {outcome.name}: {'passed' if outcome.passed else 'FAILED'}")
    for check in outcome.checks:
        print(
            f"  {'ok    ' if check.passed else 'FAILED'}  {check.what}: expected {check.expected}, found {check.found}"
        )
