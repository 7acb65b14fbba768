"""What a checkpoint is and how it would be loaded, told without building an array."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eagle_jax.loading.containers import open_source
from eagle_jax.loading.draft import DraftPlan, plan_draft
from eagle_jax.loading.draft_capture import Convention
from eagle_jax.loading.draft_config import EMBEDDING, LM_HEAD, draft_kind, guess_target
from eagle_jax.loading.draft_format import read_head_config
from eagle_jax.loading.draft_names import RenamedSource
from eagle_jax.loading.draft_reader import TargetShape
from eagle_jax.loading.errors import CheckpointError
from eagle_jax.loading.gguf import GGUFSource
from eagle_jax.loading.hub import resolve
from eagle_jax.loading.memory import parameter_count
from eagle_jax.loading.placement import Match
from eagle_jax.loading.sources import TensorSource, read_json, same_values
from eagle_jax.loading.target import TargetPlan, check_tied_head, plan_target
from eagle_jax.models import DraftConfig, LlamaConfig, RopeConfig

Kind = Literal["target", "eagle3", "eagle", "unknown"]
_TITLES = {
    "target": "target model",
    "eagle3": "EAGLE-3 draft head",
    "eagle": "EAGLE-1/2 draft head",
    "unknown": "unknown",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """What `inspect_checkpoint` found. Tensor lists hold (name in the file, shape)."""

    kind: Kind
    path: str
    container: str
    """"safetensors", "torch" or "gguf"."""
    files: tuple[tuple[str, int], ...]
    """Name and bytes of each file with weights."""
    storage: Mapping[str, int]
    """Number of tensors by dtype or quantisation."""
    geometry: Mapping[str, Any]
    """The numbers of the configuration; empty if it could not be read."""
    rope: Mapping[str, Any]
    format: str | None
    """Of a head: "eagle" or "speculators", the layout of its config.json."""
    target: str | None
    """Of a head: the target that its config.json names."""
    num_speculative_tokens: int | None
    """Of a head: the length of the chain that its config.json asks for."""
    norms: tuple[str, ...]
    """Of a head: its optional norms and how they are used."""
    sharing: Mapping[str, str]
    """Of a head: whose embedding and output head are used."""
    parameters: int | None
    """Trained values that would be loaded; None without a configuration."""
    vocabulary: str | None
    """Of a head: how its ids map to the target's."""
    capture_layers: tuple[int, ...] | None
    """Of a head: hidden states of the target that it reads; None if they depend on a target that was not given."""
    capture_layers_guessed: bool
    capture_layers_from: str | None
    """Of a head: where these layers come from, and under which convention."""
    used: tuple[tuple[str, tuple[int, ...]], ...]
    unused: tuple[tuple[str, tuple[int, ...]], ...]
    """Tensors that would not be read, because they are known not to matter."""
    missing: tuple[tuple[str, tuple[int, ...]], ...]
    unexpected: tuple[tuple[str, tuple[int, ...]], ...]
    problems: tuple[str, ...]
    """Why it would not load; empty if it would."""
    notes: tuple[str, ...]
    """What would be decided while loading."""

    @property
    def loads(self) -> bool:
        """Whether the checkpoint would load."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report as values that JSON knows, with `loads` added."""
        return {"loads": self.loads, **_plain(dataclasses.asdict(self))}

    def to_text(self) -> str:
        """The report as lines for people."""
        size = sum(size for _, size in self.files)
        lines = [
            f"{_TITLES[self.kind]}: {self.path}",
            f"  format        {self.container}, {len(self.files)} file{'s' * (len(self.files) != 1)}, {size / 1e6:,.1f} MB",
            f"  stored as     {', '.join(f'{count} x {name}' for name, count in self.storage.items())}",
        ]
        if self.parameters is not None:
            lines.append(f"  parameters    {self.parameters:,}")
        # What is off or empty is not worth a line; norms have a line of their own.
        told = {key: value for key, value in self.geometry.items() if value not in (False, None, ())}
        lines += [f"  {key:<30} {value}" for key, value in told.items()]
        facts = {"config.json": self.format, "made for": self.target, "chain asked for": self.num_speculative_tokens}
        lines += [f"  {key:<13} {value}" for key, value in facts.items() if value is not None]
        if self.rope:
            lines.append("  rope          " + ", ".join(f"{key} {value}" for key, value in self.rope.items()))
        if self.vocabulary is not None:
            lines.append(f"  vocabulary    {self.vocabulary}")
        if self.capture_layers_from is not None:
            layers = "depend on the target" if self.capture_layers is None else str(list(self.capture_layers))
            lines.append(f"  captures      {layers}{' (guessed)' if self.capture_layers_guessed else ''}")
            lines.append(f"  from          {self.capture_layers_from}")
        if self.kind in ("eagle", "eagle3") and self.geometry:
            lines.append(f"  norms         {', '.join(self.norms) or 'as published'}")
        lines += [f"  {name.removesuffix('.weight'):<13} {words}" for name, words in self.sharing.items()]
        lines.append(f"  tensors       {len(self.used)} used, {len(self.unused)} not needed")
        lines += [f"  not needed    {name} {list(shape)}" for name, shape in self.unused]
        lines += [f"  note          {note}" for note in self.notes]
        lines += [f"  PROBLEM       {problem}" for problem in self.problems]
        lines.append("  would load" if self.loads else "  would NOT load")
        return "\n".join(lines)


def inspect_checkpoint(
    path_or_repo: str | Path,
    target: str | Path | None = None,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    layer_id_convention: Convention | None = None,
) -> CheckpointReport:
    """Says what a checkpoint is, what would be loaded from it, and why it would not load.

    Args:
      path_or_repo: a folder, a `.gguf` file, or a repository of the model hub.
      target: for a head, the target that it is meant for, named in the same ways; without it the numbers in the head's own
        config.json stand in.
      revision: branch, tag or commit of a repository.
      download_dir: where repositories are kept, instead of the hub's own cache.
      layer_id_convention: as in `load_draft`.

    Raises:
      CheckpointError: there is nothing to look at. What is wrong inside a checkpoint is in the report's `problems`.
    """
    path = resolve(path_or_repo, revision=revision, download_dir=download_dir)
    source = open_source(path)
    if isinstance(source, GGUFSource):
        return _inspect_target(path, source)
    try:
        renamed = RenamedSource(source)
    except CheckpointError as error:
        return _report("unknown", path, source, problems=[str(error)])
    if draft_kind(renamed) == "unknown":
        is_target = "model.embed_tokens.weight" in source.names()
        if is_target:
            return _inspect_target(path, source)
        return _report(
            "unknown",
            path,
            source,
            problems=[
                "neither model.embed_tokens.weight (a target) nor fc.weight or layers.0.hidden_norm.weight (a head) is there"
            ],
        )
    goal = None if target is None else plan_target(resolve(target, download_dir=download_dir))
    return _inspect_draft(path, renamed, goal, layer_id_convention)


def _inspect_target(path: Path, source: TensorSource) -> CheckpointReport:
    try:
        plan = plan_target(path)
    except ValueError as error:
        return _report("target", path, source, problems=[str(error)])
    problems, notes = list(plan.match.problems), []
    if not problems:
        try:
            check_tied_head(plan)
        except CheckpointError as error:
            problems.append(str(error))
    if not plan.config.eos_token_ids:
        notes.append("no end-of-sequence id in the configuration; the tokenizer's is used, if it has one")
    return _report("target", path, plan.source, config=plan.config, match=plan.match, problems=problems, notes=notes)


def _inspect_draft(
    path: Path, source: RenamedSource, goal: TargetPlan | None, convention: Convention | None
) -> CheckpointReport:
    kind: Kind = "eagle3" if draft_kind(source) == "eagle3" else "eagle"
    try:
        config = read_json(path / "config.json")
        shape = guess_target(read_head_config(config)) if goal is None else _shape(goal.config)
        shared = set() if goal is None else _shared_tensors(source, goal)
        plan = plan_draft(source, config, shape, shared=shared, layer_id_convention=convention)
    except ValueError as error:
        return _report(kind, path, source, problems=[str(error)])
    notes = [*plan.guesses, *plan.notes]
    if goal is None:
        notes.append(
            "looked at without its target, whose hidden size and vocabulary were taken from the head's config.json; what equals "
            "the target's cannot be told"
        )
    drafted, vocabulary = plan.config.draft_vocab_size, plan.config.vocab_size
    return _report(
        kind,
        path,
        source,
        config=plan.config,
        match=plan.match,
        problems=list(plan.match.problems),
        notes=notes,
        vocabulary=f"{drafted} of {vocabulary} tokens" if drafted < vocabulary else "the target's",
        draft=plan,
    )


def _norms(config: DraftConfig) -> tuple[str, ...]:
    """The optional norms of a head, in the order in which they are applied."""
    names = {
        "norm_before_fc": "over all features before fc",
        "fc_norm": "over each feature before fc",
        "embedding_norm": "over the embedding before fc",
        "hidden_norm": "over the feature before fc",
        "first_input_norm": "before the attention of layer 0",
        "norm_before_residual": "the residual starts normed",
        "norm_output": "the normed output is fed back",
        "final_norm": "over the output, which is fed back normed",
        "head_norm": "before the output head alone",
    }
    return tuple(f"{name} ({words})" for name, words in names.items() if getattr(config, name))


def _report(
    kind: Kind,
    path: Path,
    source: TensorSource,
    *,
    config: LlamaConfig | DraftConfig | None = None,
    match: Match | None = None,
    problems: list[str] | None = None,
    notes: list[str] | None = None,
    vocabulary: str | None = None,
    draft: DraftPlan | None = None,
) -> CheckpointReport:
    def with_shapes(names: tuple[str, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((source.stored_name(name), source.shape(name)) for name in names)

    storage: dict[str, int] = {}
    for name in source.names():
        storage[source.storage(name)] = storage.get(source.storage(name), 0) + 1
    geometry = {} if config is None else dataclasses.asdict(config)
    standard = dataclasses.asdict(RopeConfig())
    rope = {
        key: value
        for key, value in geometry.pop("rope", {}).items()
        if key in ("rope_type", "theta") or value != standard[key]
    }
    geometry.pop("capture_layers", None)
    return CheckpointReport(
        kind=kind,
        path=str(path),
        container=source.container,
        files=tuple((file.name, file.stat().st_size) for file in source.files),
        storage=storage,
        geometry=geometry,
        rope=rope,
        format=None if draft is None else draft.head.format,
        target=None if draft is None else draft.head.verifier,
        num_speculative_tokens=None if draft is None else draft.head.num_speculative_tokens,
        norms=() if draft is None else _norms(draft.config),
        sharing={} if draft is None else draft.sharing,
        parameters=None if config is None else parameter_count(config),
        vocabulary=vocabulary,
        capture_layers=draft.capture.layers if draft is not None and draft.capture.known else None,
        capture_layers_guessed=draft is not None and draft.capture.guess is not None,
        capture_layers_from=None if draft is None else draft.capture.origin,
        used=() if match is None else with_shapes(match.used),
        unused=() if match is None else with_shapes(match.unused),
        missing=() if match is None else tuple((source.stored_name(p.tensor), p.shape) for p in match.missing),
        unexpected=() if match is None else with_shapes(match.unexpected),
        problems=tuple(problems or ()),
        notes=tuple(notes or ()),
    )


def _shape(config: LlamaConfig) -> TargetShape:
    return TargetShape(
        hidden_size=config.hidden_size, vocab_size=config.vocab_size, num_hidden_layers=config.num_hidden_layers
    )


def _shared_tensors(source: RenamedSource, goal: TargetPlan) -> set[str]:
    """Which of embedding and output head the head stores as the target's files have them."""
    float32 = np.dtype(np.float32)
    embedding = "model.embed_tokens.weight"
    pairs = {EMBEDDING: embedding, LM_HEAD: embedding if goal.config.tie_word_embeddings else "lm_head.weight"}

    def is_shared(name: str, theirs: str) -> bool:
        def rows(low: int, high: int) -> np.ndarray:
            return goal.source.read(theirs, (slice(low, high),)).astype(float32)

        there = name in source.names() and theirs in goal.source.names()
        return there and same_values(source, name, goal.source.shape(theirs), rows, float32)

    return {name for name, theirs in pairs.items() if is_shared(name, theirs)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
