"""Loading a draft head: EAGLE-1, -2 or -3 in the community format, from safetensors or torch files."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from eagle_jax.loading.draft_config import TargetShape, draft_kind, read_draft_config
from eagle_jax.loading.draft_names import RenamedSource
from eagle_jax.loading.dtypes import parse_dtype
from eagle_jax.loading.eagle1_config import read_eagle1_config
from eagle_jax.loading.errors import CheckpointError, about
from eagle_jax.loading.hub import resolve
from eagle_jax.loading.placement import Match, Sharding, Table, fill, match_tensors
from eagle_jax.loading.progress import Progress
from eagle_jax.loading.shipped import shipped_head, shipped_heads
from eagle_jax.loading.sources import open_source, read_json, same_values
from eagle_jax.loading.tables import draft_unused, eagle1_table, eagle3_table
from eagle_jax.loading.target import Target
from eagle_jax.loading.vocabulary import read_vocabulary
from eagle_jax.models import DraftConfig, DraftHead, make_head

_log = logging.getLogger(__name__)

EMBEDDING = "embed_tokens.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A loaded draft head."""

    head: DraftHead
    config: DraftConfig
    name: str
    """What the caller asked for: a repository or a path."""
    path: Path
    """The folder that was read."""
    notes: tuple[str, ...]
    """What had to be decided while loading: guessed capture layers, a shared embedding, wrong numbers in config.json."""


@dataclasses.dataclass(frozen=True)
class DraftPlan:
    """What a head's checkpoint holds and how it would be loaded; no weight has been read."""

    config: DraftConfig
    source: RenamedSource
    table: Table
    match: Match
    vocabulary: np.ndarray | None
    """Target id of each draft id, int32 `[Vd]`; None where they are the same ids."""
    notes: tuple[str, ...]


def load_draft(
    path_or_repo: str | Path,
    target: Target,
    *,
    dtype: Any = None,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    rope_theta: float | None = None,
    sharding: Sharding | None = None,
    progress: Progress = False,
) -> Draft:
    """Loads an EAGLE draft head of any generation for a target; its tensors say which.

    A head that stores an embedding equal to the target's shares the target's array; a different one is kept.

    Args:
      path_or_repo: a folder with config.json and weights, the name of a shipped head, or a repository of the model hub.
      target: the target that the head drafts for.
      dtype: dtype of the head; None takes the target's, other values as in `load_target`.
      revision: branch, tag or commit of a repository.
      download_dir: where repositories are kept, instead of the hub's own cache.
      rope_theta: rotary base to use instead of the one in the head's config.json (10000 where it has none; the target's base is
        never taken over, because heads are trained with their own).
      sharding: where parameters go, one sharding or a function of path and shape; None is the default device.
      progress: True draws a bar, a function is called with (tensor, bytes read, bytes in all).

    Raises:
      CheckpointError: a head that cannot be found or read, is of another kind, was made for another target, contradicts its
        config.json, or holds other tensors than its configuration needs.
      ValueError: a wrong argument.
      TypeError: `target` is no `Target`.
    """
    if not isinstance(target, Target):
        raise TypeError(f"target must be what load_target returns, not {target!r}")
    wanted = np.dtype(target.model.dtype) if dtype is None else parse_dtype(dtype)
    if rope_theta is not None and not rope_theta > 1:
        raise ValueError(f"rope_theta must be greater than 1, not {rope_theta!r}")
    if not Path(path_or_repo).exists() and str(path_or_repo) in shipped_heads():
        path_or_repo = shipped_head(str(path_or_repo))
    path = resolve(path_or_repo, revision=revision, download_dir=download_dir)
    shape = TargetShape(
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        num_hidden_layers=target.config.num_hidden_layers,
    )
    source, raw = open_draft(path)
    shared = _shares_embedding(source, target, wanted)
    with about(f"draft head {path_or_repo}"):
        plan = plan_draft(source, raw, shape, share_embedding=shared, rope_theta=rope_theta)
        plan.match.check()
    head = fill(
        lambda: make_head(plan.config, dtype=wanted, rngs=nnx.Rngs(0)),
        plan.table,
        plan.source,
        wanted,
        constants={} if plan.vocabulary is None else {"vocabulary": plan.vocabulary},
        sharding=sharding,
        progress=progress,
    )
    for note in plan.notes:
        _log.info("%s: %s", path_or_repo, note)
    return Draft(head=head, config=plan.config, name=str(path_or_repo), path=path, notes=plan.notes)


def open_draft(path: Path) -> tuple[RenamedSource, Mapping[str, Any]]:
    """Opens a head's tensors under canonical names, and its config.json.

    Raises:
      CheckpointError: files that cannot be read, or a GGUF file.
    """
    source = open_source(path)
    if source.container == "gguf":
        raise CheckpointError(f"{path} is GGUF, which is read for targets only; give the head as safetensors")
    return RenamedSource(source), read_json(path / "config.json")


def plan_draft(
    source: RenamedSource,
    config: Mapping[str, Any],
    target: TargetShape,
    *,
    share_embedding: bool = False,
    rope_theta: float | None = None,
) -> DraftPlan:
    """Derives the head's configuration, matches its tensors, and reads its vocabulary map.

    Args:
      source: the head's tensors.
      config: its parsed config.json.
      target: the target it is for.
      share_embedding: its stored embedding equals the target's, which is used instead.
      rope_theta: see `load_draft`.

    Raises:
      CheckpointError: see `load_draft`; tensors that do not match are in `DraftPlan.match`.
    """
    kind = "eagle3" if "speculators_model_type" in config else draft_kind(source)
    if kind == "unknown":
        raise CheckpointError("this is no EAGLE head: it has no tensor fc.weight [h, n * H]")
    stored = EMBEDDING in source.names()
    read_config = read_draft_config if kind == "eagle3" else read_eagle1_config
    made, notes = read_config(
        config, source, target, own_embedding=stored and not share_embedding, rope_theta=rope_theta
    )
    if stored:
        notes.append(
            f"{EMBEDDING} equals the target's, which is shared"
            if share_embedding
            else f"the head keeps its own {EMBEDDING}"
        )
    vocabulary = read_vocabulary(source, made.draft_vocab_size, target.vocab_size)
    table = (eagle3_table if kind == "eagle3" else eagle1_table)(made, source.names())
    match = match_tensors(table, source, draft_unused(made))
    if vocabulary is not None:
        match = dataclasses.replace(
            match, used=(*match.used, "d2t"), unused=tuple(name for name in match.unused if name != "d2t")
        )
    return DraftPlan(made, source, table, match, vocabulary, tuple(notes))


def _shares_embedding(source: RenamedSource, target: Target, dtype: np.dtype) -> bool:
    """Whether the head stores the embedding that the target has, value for value in the head's dtype."""
    if EMBEDDING not in source.names():
        return False
    weight = target.model.embed.weight[...]

    def rows(low: int, high: int) -> np.ndarray:
        return np.asarray(weight[low:high]).astype(dtype)

    return same_values(source, EMBEDDING, weight.shape, rows, dtype)
