"""What a checkpoint is and how it would be loaded, told without building an array."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eagle_jax.loading.draft import EMBEDDING, plan_draft
from eagle_jax.loading.draft_config import TargetShape, draft_kind, guess_target, named_capture_layers
from eagle_jax.loading.draft_names import RenamedSource
from eagle_jax.loading.errors import CheckpointError
from eagle_jax.loading.gguf import GGUFSource
from eagle_jax.loading.hub import resolve
from eagle_jax.loading.memory import parameter_count
from eagle_jax.loading.placement import Match
from eagle_jax.loading.sources import TensorSource, open_source, read_json, same_values
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
    parameters: int | None
    """Trained values that would be loaded; None without a configuration."""
    vocabulary: str | None
    """Of a head: how its ids map to the target's."""
    capture_layers: tuple[int, ...] | None
    """Of a head: hidden states of the target that it reads; None if they depend on a target that was not given."""
    capture_layers_guessed: bool
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
        lines += [f"  {key:<30} {value}" for key, value in self.geometry.items()]
        if self.rope:
            lines.append("  rope          " + ", ".join(f"{key} {value}" for key, value in self.rope.items()))
        if self.vocabulary is not None:
            lines.append(f"  vocabulary    {self.vocabulary}")
        if self.kind == "eagle3" and self.geometry:
            layers = "depend on the target" if self.capture_layers is None else str(list(self.capture_layers))
            lines.append(f"  captures      {layers}{' (guessed)' if self.capture_layers_guessed else ''}")
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
) -> CheckpointReport:
    """Says what a checkpoint is, what would be loaded from it, and why it would not load.

    Args:
      path_or_repo: a folder, a `.gguf` file, or a repository of the model hub.
      target: for a head, the target that it is meant for, named in the same ways; without it the numbers in the head's own
        config.json stand in.
      revision: branch, tag or commit of a repository.
      download_dir: where repositories are kept, instead of the hub's own cache.

    Raises:
      CheckpointError: there is nothing to look at. What is wrong inside a checkpoint is in the report's `problems`.
    """
    path = resolve(path_or_repo, revision=revision, download_dir=download_dir)
    source = open_source(path)
    if isinstance(source, GGUFSource):
        return _inspect_target(path, source)
    if "fc.weight" not in (renamed := RenamedSource(source)).names():
        is_target = "model.embed_tokens.weight" in source.names()
        if is_target:
            return _inspect_target(path, source)
        return _report(
            "unknown",
            path,
            source,
            problems=["neither model.embed_tokens.weight (a target) nor fc.weight (a head) is there"],
        )
    goal = None if target is None else plan_target(resolve(target, download_dir=download_dir))
    return _inspect_draft(path, renamed, goal)


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


def _inspect_draft(path: Path, source: RenamedSource, goal: TargetPlan | None) -> CheckpointReport:
    kind = draft_kind(source)
    found: Kind = kind if kind in ("eagle3", "eagle") else "unknown"  # type: ignore[assignment]
    try:
        config = read_json(path / "config.json")
        shape = guess_target(config) if goal is None else _shape(goal.config)
        shared = goal is not None and EMBEDDING in source.names() and _same_embedding(source, goal)
        plan = plan_draft(source, config, shape, share_embedding=shared)
    except ValueError as error:
        return _report(found, path, source, problems=[str(error)])
    notes = list(plan.notes)
    if goal is None:
        notes.append(
            "looked at without its target, whose hidden size and vocabulary were taken from the head's config.json"
        )
    # EAGLE-1/2 heads read the last hidden state: nothing to guess, but its number is the target's depth.
    guessed = kind == "eagle3" and named_capture_layers(config, source) is None
    unknown = goal is None and (guessed or kind == "eagle")
    drafted = plan.config.draft_vocab_size
    return _report(
        found,
        path,
        source,
        config=plan.config,
        match=plan.match,
        problems=list(plan.match.problems),
        notes=notes,
        vocabulary=f"{drafted} of {plan.config.vocab_size} tokens"
        if drafted < plan.config.vocab_size
        else "the target's",
        capture_layers=None if unknown else plan.config.capture_layers,
        capture_layers_guessed=guessed,
    )


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
    capture_layers: tuple[int, ...] | None = None,
    capture_layers_guessed: bool = False,
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
        parameters=None if config is None else parameter_count(config),
        vocabulary=vocabulary,
        capture_layers=capture_layers,
        capture_layers_guessed=capture_layers_guessed,
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


def _same_embedding(source: RenamedSource, goal: TargetPlan) -> bool:
    name, float32 = "model.embed_tokens.weight", np.dtype(np.float32)
    shape = goal.source.shape(name)

    def rows(low: int, high: int) -> np.ndarray:
        return goal.source.read(name, (slice(low, high),)).astype(float32)

    return same_values(source, EMBEDDING, shape, rows, float32)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
