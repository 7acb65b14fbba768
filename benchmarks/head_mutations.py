"""What faults of a head that leave the text right do to its acceptance, and that `eagle-jax eval --test` notices them.

    python benchmarks/head_mutations.py --out mutations.json

Each fault is put into the released head for SmolLM2 after loading, and the shipped expectation is checked: 16 prompts of
MT-bench, a chain of 3, float32, and the stored log-probabilities. `--only` runs some of them. Figures are written after each.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
from flax import nnx

from eagle_jax import Draft, Target, load_draft, load_target
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.evaluation import Configuration, EvaluationSettings, Report, evaluate, find_datasets
from eagle_jax.evaluation.expectations import compare, find_expectation
from eagle_jax.loading.demo_target import packaged_target

HEAD = "smollm2-135m-instruct-eagle3"
EXPECTATION = f"{HEAD}-chain3"


class Identity(nnx.Module):
    """In the place of a norm."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def right(target: Target) -> Draft:
    return load_draft(HEAD, target)


def shifted(target: Target) -> Draft:
    layers = load_draft(HEAD, target).config.capture_layers
    ids = {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers]}
    draft = load_draft(HEAD, target, config_overrides=ids, layer_id_convention="input")
    assert draft.config.capture_layers == tuple(layer + 1 for layer in layers)
    return draft


def rope_of_target(target: Target) -> Draft:
    theta = float(target.config.rope.theta)
    assert load_draft(HEAD, target).config.rope.theta != theta
    return load_draft(HEAD, target, rope_theta=theta)


def without(norm: str) -> Callable[[Target], Draft]:
    def change(target: Target) -> Draft:
        draft = load_draft(HEAD, target)
        layer = draft.head.layers[0]
        place = layer if hasattr(layer, norm) else draft.head
        assert getattr(place, norm) is not None
        setattr(place, norm, Identity())
        return draft

    return change


HEADS: dict[str, Callable[[Target], Draft]] = {
    "none": right,
    "capture layers shifted by one": shifted,
    "rope base of the target": rope_of_target,
    "hidden_norm left out": without("hidden_norm"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    expectation, _ = find_expectation(EXPECTATION)
    assert expectation is not None
    wanted = expectation.settings
    target = load_target(packaged_target(), dtype=wanted["dtype"])
    datasets = [dataset.select(wanted["num_prompts"]) for dataset in find_datasets(wanted["dataset_name"])]
    configuration = Configuration(shape=TreeConfig.chain(wanted["num_spec_tokens"]))
    settings = EvaluationSettings(output_len=wanted["output_len"])
    found: dict[str, list[dict]] = {}
    for name in args.only:
        draft = HEADS[name](target)
        evaluation = evaluate(target, draft, [configuration], datasets, settings)
        checks = compare(expectation, Report(evaluation).total(configuration).acceptance, target, draft)
        found[name] = [dataclasses.asdict(check) for check in checks]
        print(f"fault: {name}", flush=True)
        for check in checks:
            print(
                f"  {'ok    ' if check.passed else 'FAILED'}  {check.what}: {check.expected} -> {check.found}",
                flush=True,
            )
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
