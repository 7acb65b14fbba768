"""The evaluation loop: every request of every dataset in every configuration, group by group, kept as soon as it is measured."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from eagle_jax.engine.config import EngineConfig
from eagle_jax.entrypoints.decoder import Decoder
from eagle_jax.entrypoints.prompts import Prompt
from eagle_jax.evaluation.datasets import Dataset, Question
from eagle_jax.evaluation.errors import EvaluationError
from eagle_jax.evaluation.rows import Group, LeftOut, Row, Rows, RowsFile
from eagle_jax.evaluation.settings import Configuration, EvaluationSettings
from eagle_jax.loading import Draft, Target
from eagle_jax.metrics import Timing
from eagle_jax.outputs import RequestOutput
from eagle_jax.sampling import SamplingParams

GROUPS_OF = 4
"""Requests of a call for each slot, where several run side by side: enough that slots rarely idle, few enough to lose little when
interrupted. With one slot a call holds one request, which is then timed by itself."""
WARM_UP_TOKENS = 16
MARKUP_TOKENS = 32
"""What a chat template puts around a turn and the answer before it, at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured, and how."""

    settings: dict[str, Any]
    """Target, head, device, datasets and everything else that the figures depend on, as JSON values."""
    configurations: tuple[Configuration, ...]
    rows: Rows
    complete: bool
    """False if the time limit came first."""
    measured: int
    """Calls that this run made; the others were in the rows file."""
    draft_name: str | None
    target_name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where an evaluation stands."""

    done: int
    total: int
    """Calls of the whole evaluation, those that were in the rows file included."""
    group: Group


def evaluate(
    target: Target,
    draft: Draft | None,
    configurations: Sequence[Configuration],
    datasets: Sequence[Dataset],
    settings: EvaluationSettings | None = None,
    *,
    rows_path: Path | None = None,
    time_limit: float | None = None,
    on_group: Callable[[Progress], None] | None = None,
    on_request: Callable[[Row, Prompt], None] | None = None,
) -> Evaluation:
    """Measures configurations on datasets.

    Configurations take turns, group by group, so that a machine that becomes slower does so for all of them.

    Args:
      target: the target.
      draft: the draft head; may be None if every configuration is plain.
      configurations: what to measure (`make_configurations`).
      datasets: the prompts (`find_datasets`). A turn goes through the chat template if the target has one, else it is
        continued as it is.
      settings: everything else; None takes the defaults.
      rows_path: keeps rows, and goes on with what an earlier run left there.
      time_limit: no call is begun after so many seconds; the same call later goes on.
      on_group: told about every call.
      on_request: told about every request that this run measured.

    Raises:
      EvaluationError: rows of other settings; a configuration that drafts without a draft head; several turns without a chat
        template; nothing left to measure.
      ValueError: as `speculative_generate`.
    """
    settings = EvaluationSettings() if settings is None else settings
    run = _Run(target, draft, configurations, datasets, settings)
    file = RowsFile(rows_path, run.describe())
    complete = run.measure(file, time_limit, on_group, on_request)
    if complete and not file.rows.requests:
        raise EvaluationError(f"no request was measured: {file.rows.left_out[0].reason}")
    return Evaluation(
        settings=file.settings,
        configurations=tuple(configurations),
        rows=file.rows,
        complete=complete,
        measured=run.measured,
        target_name=target.name,
        draft_name=None if draft is None else draft.name,
    )


def head_digest(draft: Draft) -> str:
    """SHA-256 of a head's weights: of its model.safetensors, or of all its weight files one after the other."""
    digest = hashlib.sha256()
    files = sorted(draft.path.glob("*.safetensors")) or sorted(draft.path.glob("*.bin"))
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def target_digest(target: Target) -> str:
    """Tells loaded targets apart by their norms and first embeddings: a quantised file of a model is another target."""
    digest = hashlib.sha256(repr((target.config.num_hidden_layers, target.config.hidden_size)).encode())
    norms = [leaf.get_value() for _, leaf in nnx.to_flat_state(nnx.state(target.model)) if leaf.get_value().ndim == 1]
    for array in (target.model.embed.weight[...][:64], *norms):
        digest.update(np.asarray(jax.device_get(array), np.float32).tobytes())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class _Request:
    question: Question
    index: int
    """Place in the dataset."""


class _Run:
    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        configurations: Sequence[Configuration],
        datasets: Sequence[Dataset],
        settings: EvaluationSettings,
    ):
        if not datasets:
            raise EvaluationError("there is nothing to measure on: datasets is empty")
        for configuration in configurations:
            if draft is None and configuration.shape is not None:
                raise EvaluationError(f"{configuration.name} needs a draft head")
        self.target, self.draft, self.datasets, self.settings = target, draft, datasets, settings
        self.configurations = configurations
        self.measured = 0
        self._warm: set[str] = set()
        self._tokens: int | None = None
        self._chat = target.tokenizer is not None and target.tokenizer.chat_template is not None
        if settings.turns > 1 and not self._chat:
            raise EvaluationError(f"turns {settings.turns} needs a chat template, which {target.name} does not have")
        self._decoders = {c.name: self._decoder(c) for c in configurations}

    def _decoder(self, configuration: Configuration) -> Decoder:
        draft = None if configuration.shape is None else self.draft
        config = EngineConfig.resolve(
            self.target,
            draft,
            tree=configuration.shape,
            max_model_len=self.settings.max_model_len,
            max_num_seqs=self.settings.max_num_seqs,
            rule=configuration.rule,
        )
        return Decoder(self.target, draft, config)

    def describe(self) -> dict[str, Any]:
        """The settings that the rows depend on."""
        devices = sorted(jax.tree.leaves(nnx.state(self.target.model))[0].devices(), key=lambda device: device.id)
        return {
            "target": self.target.name,
            "target_digest": target_digest(self.target),
            "draft": None if self.draft is None else self.draft.name,
            "draft_digest": None if self.draft is None else head_digest(self.draft),
            "dtype": str(self.target.model.dtype),
            "matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
            "device": devices[0].device_kind,
            "devices": len(devices),
            "jax": jax.__version__,
            "datasets": {dataset.name: dataset.digest for dataset in self.datasets},
            "questions": {dataset.name: len(dataset.questions) for dataset in self.datasets},
            **dataclasses.asdict(self.settings),
            "configurations": [configuration.to_json() for configuration in self.configurations],
        }

    def measure(
        self,
        file: RowsFile,
        time_limit: float | None,
        on_group: Callable[[Progress], None] | None,
        on_request: Callable[[Row, Prompt], None] | None,
    ) -> bool:
        """Measures what is missing; False if the time limit came first."""
        start = time.perf_counter()
        done = {(g.configuration, g.dataset, g.turn, g.index) for g in file.rows.groups}
        calls = list(self._calls())
        for dataset, turn, index, requests in calls:
            for configuration in self.configurations:
                if (configuration.name, dataset.name, turn, index) in done:
                    continue
                if time_limit is not None and time.perf_counter() - start >= time_limit:
                    return False
                rows, group, prompts = self._measure_group(file.rows, configuration, dataset, turn, index, requests)
                file.append(rows, group)
                self.measured += 1
                if on_request is not None:
                    for row in rows:
                        if isinstance(row, Row):
                            on_request(row, prompts[row.question_id])
                if on_group is not None:
                    total = len(calls) * len(self.configurations)
                    on_group(Progress(done=len(file.rows.groups), total=total, group=group))
        return True

    def _calls(self) -> Iterator[tuple[Dataset, int, int, list[_Request]]]:
        """Dataset, turn, index of the call, and its requests."""
        slots = self.settings.max_num_seqs
        size = 1 if slots == 1 else GROUPS_OF * slots
        for dataset in self.datasets:
            for turn in range(1, self.settings.turns + 1):
                requests = [_Request(q, i) for i, q in enumerate(dataset.questions) if q.num_turns >= turn]
                for index, first in enumerate(range(0, len(requests), size)):
                    yield dataset, turn, index, requests[first : first + size]

    def _measure_group(
        self,
        known: Rows,
        configuration: Configuration,
        dataset: Dataset,
        turn: int,
        index: int,
        requests: Sequence[_Request],
    ) -> tuple[list[Row | LeftOut], Group, dict[str, Prompt]]:
        decoder, name = self._decoders[configuration.name], configuration.name
        answers = {
            (row.question_id, row.turn): row.text
            for row in known.requests
            if row.configuration == name and row.dataset == dataset.name
        }
        rows: list[Row | LeftOut] = []
        wanted: list[tuple[_Request, Prompt]] = []
        for request in requests:
            found = self._prompt(decoder, request.question, turn, answers)
            need = None if isinstance(found, str) else len(found.token_ids) + self.settings.output_len
            if need is not None and need > decoder.config.max_model_len:
                found = f"prompt and output need {need} tokens, and max_model_len is {decoder.config.max_model_len}"
            if isinstance(found, str):
                rows.append(
                    LeftOut(
                        configuration=name,
                        dataset=dataset.name,
                        question_id=request.question.id,
                        turn=turn,
                        reason=f"{dataset.name} question {request.question.id}, turn {turn}: {found}",
                    )
                )
            else:
                wanted.append((request, found))
        if not wanted:
            return rows, _group(configuration, dataset, turn, index), {}
        params = [self._params(configuration, request.index) for request, _ in wanted]
        compile_seconds = 0.0
        if self._tokens is None:
            self._tokens = self._longest(decoder)
        if name not in self._warm:
            # What a process does for the first time takes longer, compiled or not.
            few = dataclasses.replace(params[0], max_tokens=min(WARM_UP_TOKENS, self.settings.output_len))
            compile_seconds = self._decode(decoder, [wanted[0][1]], [few])[1].compile_seconds
            self._warm.add(name)
        results, timing = self._decode(decoder, [prompt for _, prompt in wanted], params)
        seconds = timing.prefill_seconds + timing.decode_seconds
        alone = seconds if len(wanted) == 1 else None
        for (request, _), result in zip(wanted, results, strict=True):
            rows.append(_row(configuration, dataset, request.question, turn, index, result, alone))
        group = _group(
            configuration,
            dataset,
            turn,
            index,
            requests=len(wanted),
            output_tokens=timing.output_tokens,
            decoded_tokens=timing.decoded_tokens,
            prefill_seconds=timing.prefill_seconds,
            decode_seconds=timing.decode_seconds,
            compile_seconds=compile_seconds + timing.compile_seconds,
        )
        return rows, group, {request.question.id: prompt for request, prompt in wanted}

    def _decode(
        self, decoder: Decoder, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> tuple[list[RequestOutput], Timing]:
        slots = self.settings.max_num_seqs
        return decoder.run(prompts, params, progress=False, least_prompts=slots, least_tokens=self._tokens or 1)

    def _prompt(
        self, decoder: Decoder, question: Question, turn: int, answers: dict[tuple[str, int], str | None]
    ) -> Prompt | str:
        """The prompt of a turn, or why there is none."""
        if question.prompt is not None:
            return decoder.read([question.prompt])[0]
        if not self._chat:
            return decoder.read([question.turns[0]])[0]
        messages = []
        for earlier in range(1, turn):
            if (question.id, earlier) not in answers:
                return f"turn {earlier} was left out"
            messages.append({"role": "user", "content": question.turns[earlier - 1]})
            messages.append({"role": "assistant", "content": answers[question.id, earlier] or ""})
        messages.append({"role": "user", "content": question.turns[turn - 1]})
        return decoder.read([messages])[0]

    def _longest(self, decoder: Decoder) -> int:
        """Room for any request that is not left out: all of them run in the same programs, which are compiled once."""
        output_len, room = self.settings.output_len, decoder.config.max_model_len
        found = []
        for dataset in self.datasets:
            for question in dataset.questions:
                for turn in range(1, min(self.settings.turns, question.num_turns) + 1):
                    length = self._length(decoder, question, turn) + output_len
                    # Of a later turn it is the most that it can be.
                    found += [min(length, room)] if length <= room or turn > 1 else []
        return max(found, default=1)

    def _length(self, decoder: Decoder, question: Question, turn: int) -> int:
        first = self._prompt(decoder, question, 1, {})
        assert isinstance(first, Prompt)
        later = sum(len(self._words(text)) + MARKUP_TOKENS for text in question.turns[1:turn])
        return len(first.token_ids) + later + (turn - 1) * self.settings.output_len

    def _words(self, text: str) -> list[int]:
        assert self.target.tokenizer is not None
        return self.target.tokenizer.encode(text, add_special_tokens=False)

    def _params(self, configuration: Configuration, index: int) -> SamplingParams:
        settings = self.settings
        return SamplingParams(
            temperature=configuration.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=settings.seed + index,
            max_tokens=settings.output_len,
            ignore_eos=settings.ignore_eos,
        )


def _row(
    configuration: Configuration,
    dataset: Dataset,
    question: Question,
    turn: int,
    group: int,
    result: RequestOutput,
    seconds: float | None,
) -> Row:
    completion = result.outputs[0]
    return Row(
        configuration=configuration.name,
        dataset=dataset.name,
        question_id=question.id,
        category=question.category,
        turn=turn,
        group=group,
        prompt_tokens=len(result.prompt_token_ids),
        token_ids=completion.token_ids,
        text=completion.text,
        finish_reason=completion.finish_reason or "abort",
        accepted_lengths=result.metrics.accepted_lengths,
        accepted_at_depth=result.metrics.accepted_at_depth,
        drafted=result.metrics.drafted,
        plain_rounds=result.metrics.plain_rounds,
        seed=completion.seed,
        seconds=seconds,
    )


def _group(configuration: Configuration, dataset: Dataset, turn: int, index: int, **counts: Any) -> Group:
    zero = {field.name: 0 for field in dataclasses.fields(Group)}
    place = {"configuration": configuration.name, "dataset": dataset.name, "turn": turn, "index": index}
    return Group(**(zero | counts | place))
