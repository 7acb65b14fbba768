"""Regression tests of acceptance: what was measured once for a target, a head and settings, and what is measured now.

An expectation is a JSON file. Those in `data/expectations` come with the package: of the released head, and of heads that
vLLM tests with, whose values vLLM publishes.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.evaluation.errors import EvaluationError
from eagle_jax.evaluation.probe import DraftedChain, draft_chains
from eagle_jax.evaluation.run import head_digest, target_digest
from eagle_jax.evaluation.statistics import Acceptance
from eagle_jax.loading import Draft, Target

FOLDER = Path(__file__).parent / "data" / "expectations"
SETTINGS = ("dataset_name", "num_prompts", "output_len", "temp", "num_spec_tokens", "tree", "dtype", "turns")
"""Settings that an expectation pins, by the names of the command's options."""

PROBE_CHAT = (
    "Why is the sky blue?",
    "The sky is blue because the molecules of the air scatter short waves of light more than long ones. The light of the sun has "
    "all colours, and what reaches the eye from the rest of the sky is mostly blue.",
)
"""A question and an answer, behind whose beginnings drafts are recorded."""
PROBE_TOKENS, PROBE_POSITIONS = 5, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftLogProbs:
    """What the head drafted behind beginnings of a text when the expectation was recorded."""

    token_ids: list[int]
    """The text."""
    chains: list[DraftedChain]
    tolerance: float = 1e-3
    """Most that a log-probability may differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a target and a head accept under certain settings."""

    name: str
    about: str
    """Who measured it, and where."""
    target: str
    """Repository or file name of the target."""
    draft: str
    """Repository or name of the head."""
    settings: Mapping[str, Any]
    """Values of `SETTINGS`."""
    mean_acceptance_length: float
    """1 + accepted / drafts."""
    tolerance: float
    """Most that the length may be off in either direction, relative."""
    acceptance_rates: list[float] | None = None
    """By draft position; None where only the length is known."""
    rates_tolerance: float = 0.05
    """Most that a rate may be below what is expected, relative."""
    target_digest: str | None = None
    """`target_digest`; None where the expectation comes from elsewhere."""
    draft_digest: str | None = None
    """`head_digest`."""
    draft_log_probs: DraftLogProbs | None = None

    @staticmethod
    def read(path: Path) -> "Expectation":
        """Reads a file.

        Raises:
          EvaluationError: it cannot be read or is no expectation.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            probe = value.pop("draft_log_probs", None)
            if probe is not None:
                chains = [DraftedChain(**chain) for chain in probe.pop("chains")]
                probe = DraftLogProbs(**probe, chains=chains)
            found = Expectation(name=path.stem, **value, draft_log_probs=probe)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise EvaluationError(f"expectation {path} cannot be read: {error!r}") from error
        if unknown := [name for name in found.settings if name not in SETTINGS]:
            raise EvaluationError(
                f"expectation {path} has the unknown setting {unknown[0]!r}; it has {', '.join(SETTINGS)}"
            )
        return found

    def write(self, path: Path) -> None:
        """Writes a file."""
        value = dataclasses.asdict(self)
        del value["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    @property
    def packaged_target(self) -> bool:
        """Whether the target is the GGUF file that `eagle_jax.loading.demo_target.packaged_target` obtains."""
        from eagle_jax.loading.demo_target import WHEEL_MEMBER

        return self.target == Path(WHEEL_MEMBER).name

    def belongs_to(self, target: str | None, draft: str | None) -> bool:
        """Whether it is about this pair, by the last parts of their names; None fits everything."""
        return all(
            given is None or _last(given) == _last(own) for given, own in ((target, self.target), (draft, self.draft))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison."""

    what: str
    expected: str
    found: str
    passed: bool


def shipped_expectations() -> list[Expectation]:
    """Those that come with the package."""
    return [Expectation.read(path) for path in sorted(FOLDER.glob("*.json"))]


def find_expectation(name: str) -> tuple[Expectation | None, Path]:
    """An expectation and its file, by the name of a shipped one or by the path of a `.json` file, which need not exist.

    Raises:
      EvaluationError: an unknown name, or a file that cannot be read.
    """
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if path.is_file():
        return Expectation.read(path), path
    if not name.endswith(".json"):
        known = ", ".join(path.stem for path in sorted(FOLDER.glob("*.json")))
        raise EvaluationError(f"expectation {name!r} is unknown; shipped are {known}, others are files ending in .json")
    return None, path


def check_models(expectation: Expectation, target: Target, draft: Draft) -> None:
    """Makes sure that these are the models the expectation was recorded with.

    Raises:
      EvaluationError: they are others; the message says what to do.
    """
    for what, recorded, found in (
        ("target", expectation.target_digest, target_digest(target)),
        ("draft head", expectation.draft_digest, head_digest(draft)),
    ):
        if recorded not in (None, found):
            raise EvaluationError(
                f"expectation {expectation.name} was recorded with another {what} than "
                f"{target.name if what == 'target' else draft.name}: {recorded[:12]}... there, {found[:12]}... here. If it was "
                f"replaced on purpose, record the expectation anew: eagle-jax eval --test {expectation.name} --record"
            )


def compare(expectation: Expectation, acceptance: Acceptance, target: Target, draft: Draft) -> list[Check]:
    """Compares what was measured now, and the draft log-probabilities of the stored prompt, with what is expected."""
    expected, found = expectation.mean_acceptance_length, acceptance.vllm_acceptance_length
    change = found / expected - 1
    checks = [
        Check(
            what=f"mean acceptance length, within {100 * expectation.tolerance:g} %",
            expected=f"{expected:.3f}",
            found=f"{found:.3f} ({100 * change:+.1f} %)",
            passed=abs(change) <= expectation.tolerance,
        )
    ]
    rates = acceptance.metrics.acceptance_rates
    if expectation.acceptance_rates is not None:
        if len(rates) != len(expectation.acceptance_rates):
            raise EvaluationError(
                f"expectation {expectation.name} has {len(expectation.acceptance_rates)} acceptance_rates, for drafts of "
                f"{len(rates)} tokens"
            )
        for position, (least, rate) in enumerate(zip(expectation.acceptance_rates, rates, strict=True)):
            checks.append(
                Check(
                    what=f"acceptance at token {position}, at most {100 * expectation.rates_tolerance:g} % less",
                    expected=f"{least:.4f}",
                    found=f"{rate:.4f}",
                    passed=rate >= least * (1 - expectation.rates_tolerance),
                )
            )
    if expectation.draft_log_probs is not None:
        checks.append(_compare_log_probs(expectation.draft_log_probs, target, draft))
    return checks


def _compare_log_probs(expected: DraftLogProbs, target: Target, draft: Draft) -> Check:
    chains = expected.chains
    now = draft_chains(target, draft, expected.token_ids, [c.length for c in chains], len(chains[0].tokens))
    what = f"draft log-probabilities of a text, within {expected.tolerance:g}"
    words = f"{len(chains)} chains of {len(chains[0].tokens)} tokens"
    for old, new in zip(chains, now, strict=True):
        if old.tokens != new.tokens:
            at = next(i for i, (a, b) in enumerate(zip(old.tokens, new.tokens, strict=True)) if a != b)
            text = f"behind token {old.length} it drafts {new.tokens[at]} at depth {at + 1}, not {old.tokens[at]}"
            return Check(what=what, expected=words, found=text, passed=False)
    off = max(
        float(np.abs(np.subtract(old.log_probs, new.log_probs)).max()) for old, new in zip(chains, now, strict=True)
    )
    return Check(
        what=what, expected=words, found=f"the same tokens, off by up to {off:.1e}", passed=off <= expected.tolerance
    )


def record(
    previous: Expectation | None,
    name: str,
    settings: Mapping[str, Any],
    acceptance: Acceptance,
    target: Target,
    draft: Draft,
    *,
    about: str,
) -> Expectation:
    """What was measured now as an expectation; tolerances are those of the previous one.

    Draft log-probabilities are recorded for float32 models, where they are the same to 1e-3 on every device.
    """
    probe = None
    if str(target.model.dtype) == "float32":
        text = _probe_text(target)
        lengths = [len(text) - 4 * i for i in reversed(range(min(PROBE_POSITIONS, len(text) // 4)))]
        chains = draft_chains(target, draft, text, lengths, PROBE_TOKENS)
        rounded = [dataclasses.replace(c, log_probs=[round(x, 6) for x in c.log_probs]) for c in chains]
        probe = DraftLogProbs(token_ids=text, chains=rounded)
    return Expectation(
        name=name,
        about=about,
        target=target.name if previous is None else previous.target,
        draft=draft.name if previous is None else previous.draft,
        settings=dict(settings),
        mean_acceptance_length=round(acceptance.vllm_acceptance_length, 6),
        tolerance=0.02 if previous is None else previous.tolerance,
        acceptance_rates=[round(rate, 6) for rate in acceptance.metrics.acceptance_rates],
        target_digest=target_digest(target),
        draft_digest=head_digest(draft),
        draft_log_probs=probe,
    )


def _probe_text(target: Target) -> list[int]:
    tokenizer = target.tokenizer
    if tokenizer is None:
        return [token % target.config.vocab_size for token in range(3, 60)]
    question, answer = PROBE_CHAT
    if tokenizer.chat_template is None:
        return tokenizer.encode(f"{question} {answer}")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}])
    return [*prompt, *tokenizer.encode(answer, add_special_tokens=False)]


def _last(name: str) -> str:
    return Path(name).name.lower()


def check_settings_given(expectation: Expectation, given: Mapping[str, Any]) -> None:
    """Makes sure that settings asked for are those of the expectation.

    Args:
      expectation: pins its settings.
      given: values by the names of `SETTINGS`; None is not given.

    Raises:
      EvaluationError: one contradicts the expectation; the message names it.
    """
    for name in SETTINGS:
        value = given.get(name)
        if value is not None and _plain(value) != _plain(expectation.settings.get(name)):
            raise EvaluationError(
                f"--{name.replace('_', '-')} {value} contradicts expectation {expectation.name}, which was recorded with "
                f"{expectation.settings.get(name)}"
            )


def _plain(value: Any) -> Any:
    """Lists of one entry and the entry alone are the same."""
    if isinstance(value, Mapping):
        return sorted(value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _plain(value[0]) if len(value) == 1 else [_plain(entry) for entry in value]
    return value
