"""Loading a draft head: EAGLE-1, -2 or -3, in EAGLE's format or that of speculators, from safetensors or torch files."""

import dataclasses
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from eagle_jax.loading.containers import open_source
from eagle_jax.loading.draft_capture import CONVENTIONS, Capture, Convention
from eagle_jax.loading.draft_config import EMBEDDING, LM_HEAD, draft_kind, read_draft_config
from eagle_jax.loading.draft_format import HeadConfig, read_head_config
from eagle_jax.loading.draft_names import RenamedSource
from eagle_jax.loading.draft_reader import TargetShape
from eagle_jax.loading.dtypes import parse_dtype
from eagle_jax.loading.eagle1_config import read_eagle1_config
from eagle_jax.loading.errors import CheckpointError, about
from eagle_jax.loading.hub import resolve
from eagle_jax.loading.placement import Match, Sharding, Table, fill, match_tensors
from eagle_jax.loading.progress import Progress
from eagle_jax.loading.shipped import shipped_head, shipped_heads
from eagle_jax.loading.sources import read_json, same_values
from eagle_jax.loading.tables import draft_unused, eagle1_table, eagle3_table, table_of_shards
from eagle_jax.loading.target import Target
from eagle_jax.loading.vocabulary import read_vocabulary
from eagle_jax.models import DraftConfig, DraftHead, make_head
from eagle_jax.models.eagle_config import DraftMethod
from eagle_jax.parallel.mesh import read_rows, replicate
from eagle_jax.parallel.partition import check_divisible, module_sharding

_log = logging.getLogger(__name__)

METHODS: tuple[DraftMethod, ...] = ("eagle", "eagle3")


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
    num_speculative_tokens: int | None = None
    """Length of the chain that the checkpoint asks for (speculators); None if it does not say."""


@dataclasses.dataclass(frozen=True)
class DraftPlan:
    """What a head's checkpoint holds and how it would be loaded; no weight has been read."""

    config: DraftConfig
    head: HeadConfig
    source: RenamedSource
    table: Table
    match: Match
    vocabulary: np.ndarray | None
    """Target id of each draft id, int32 `[Vd]`; None where they are the same ids."""
    capture: Capture
    sharing: Mapping[str, str]
    """Where the embedding and the output head come from, in words."""
    guesses: tuple[str, ...]
    """What the checkpoint leaves open: the head may draft badly if the guess is wrong."""
    notes: tuple[str, ...]
    """Other remarks."""


def load_draft(
    path_or_repo: str | Path,
    target: Target,
    *,
    dtype: Any = None,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    method: DraftMethod | None = None,
    rope_theta: float | None = None,
    layer_id_convention: Convention | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    tensor_parallel_size: int | None = None,
    sharding: Sharding | None = None,
    progress: Progress = False,
) -> Draft:
    """Loads an EAGLE draft head of any generation for a target; its tensors say which.

    An embedding or output head that is absent or equal to the target's is the target's array; a different one is kept. What a
    checkpoint leaves open, such as capture layers that it does not name, is logged as a warning and kept in `Draft.notes`.

    Args:
      path_or_repo: a folder with config.json and weights, the name of a shipped head, or a repository of the model hub.
      target: the target that the head drafts for.
      dtype: dtype of the head; None takes the target's, other values as in `load_target`.
      revision: branch, tag or commit of a repository.
      download_dir: where repositories are kept, instead of the hub's own cache.
      method: what the head must be, "eagle" (EAGLE-1/2) or "eagle3"; None takes what it is.
      rope_theta: rotary base to use instead of the one in the head's config.json (10000 where it has none; the target's base is
        never taken over, because heads are trained with their own).
      layer_id_convention: what layer numbers in the head's config.json mean: "input", the state that enters a layer (vLLM), or
        "output", the one that leaves it (SpecForge, ModelOpt); None takes what the numbers suggest.
      config_overrides: values for keys of the head's config.json, of its top level, that are wrong or missing there.
      tensor_parallel_size: devices that share the head: 1, or as many as share the target; None is as many. With 1 every device
        has the whole head, and of what it shares with the target a copy: drafting then needs no word between devices.
      sharding: where parameters go, one sharding or a function of path and shape, for computations of one's own; None is the
        default device, or what the target's mesh says.
      progress: True draws a bar, a function is called with (tensor, bytes read, bytes in all).

    Raises:
      CheckpointError: a head that cannot be found or read, is of another kind, was made for another target, contradicts its
        config.json, or holds other tensors than its configuration needs.
      ValueError: a wrong argument, or a head that cannot be split over so many devices.
      TypeError: `target` is no `Target`.
    """
    if not isinstance(target, Target):
        raise TypeError(f"target must be what load_target returns, not {target!r}")
    wanted = np.dtype(target.model.dtype) if dtype is None else parse_dtype(dtype)
    if rope_theta is not None and not rope_theta > 1:
        raise ValueError(f"rope_theta must be greater than 1, not {rope_theta!r}")
    if method is not None and method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, or None, not {method!r}")
    if layer_id_convention is not None and layer_id_convention not in CONVENTIONS:
        raise ValueError(
            f"layer_id_convention must be one of {', '.join(map(repr, CONVENTIONS))}, or None, not {layer_id_convention!r}"
        )
    shards = _draft_shards(tensor_parallel_size, target)
    if target.mesh is not None and sharding is not None:
        raise ValueError("sharding cannot be given for a target on a mesh, which says where parameters go")
    if not Path(path_or_repo).exists() and str(path_or_repo) in shipped_heads():
        path_or_repo = shipped_head(str(path_or_repo))
    path = resolve(path_or_repo, revision=revision, download_dir=download_dir)
    shape = TargetShape(
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        num_hidden_layers=target.config.num_hidden_layers,
    )
    source, raw = open_draft(path)
    with about(f"draft head {path_or_repo}"):
        plan = plan_draft(
            source,
            {**raw, **(config_overrides or {})},
            shape,
            shared=_shared_tensors(source, target, wanted),
            method=method,
            rope_theta=rope_theta,
            layer_id_convention=layer_id_convention,
        )
        plan.match.check()
        check_divisible(plan.config, shards, whose="the draft head", size_name="draft_tensor_parallel_size")
    constants: dict[str, Any] = {} if plan.vocabulary is None else {"vocabulary": plan.vocabulary}
    config = plan.config
    if shards < target.model.shards:
        copies = _copies_of_shared(config, target, wanted)
        config = dataclasses.replace(config, own_embedding=True, own_lm_head=True)
        constants |= copies

    def build() -> DraftHead:
        return make_head(config, dtype=wanted, rngs=nnx.Rngs(0), shards=shards)

    head = fill(
        build,
        table_of_shards(plan.table, build, config, shards),
        plan.source,
        wanted,
        constants=constants,
        sharding=sharding if target.mesh is None else module_sharding(target.mesh, shards),
        progress=progress,
    )
    for guess in plan.guesses:
        _log.warning("%s: %s", path_or_repo, guess)
    for note in plan.notes:
        _log.info("%s: %s", path_or_repo, note)
    return Draft(
        head=head,
        config=plan.config,
        name=str(path_or_repo),
        path=path,
        notes=plan.guesses + plan.notes,
        num_speculative_tokens=plan.head.num_speculative_tokens,
    )


def _draft_shards(asked: int | None, target: Target) -> int:
    """Devices that share the head.

    Raises:
      ValueError: neither 1 nor as many as share the target.
    """
    whole = target.model.shards
    if asked is None:
        return whole
    if isinstance(asked, bool) or not isinstance(asked, int) or asked not in (1, whole):
        raise ValueError(
            f"draft_tensor_parallel_size must be 1 or the target's tensor_parallel_size {whole}, got {asked!r}"
        )
    return asked


def _copies_of_shared(config: DraftConfig, target: Target, dtype: np.dtype) -> dict[str, Any]:
    """What the head reads of the target, whole on every device, by the path that it has in a head of its own."""
    model = target.model
    shared = {"embed.weight": (not config.own_embedding, model.embed.weight[...])}
    lm_head = model.embed.weight if model.lm_head is None else model.lm_head.weight
    shared["lm_head.weight"] = (not config.own_lm_head, lm_head[...])
    assert target.mesh is not None
    copy = replicate(target.mesh, target.config.vocab_size, dtype)
    return {path: copy(array) for path, (is_shared, array) in shared.items() if is_shared}


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
    shared: Collection[str] = (),
    method: DraftMethod | None = None,
    rope_theta: float | None = None,
    layer_id_convention: Convention | None = None,
) -> DraftPlan:
    """Derives the head's configuration, matches its tensors, and reads its vocabulary map.

    Args:
      source: the head's tensors.
      config: its parsed config.json.
      target: the target it is for.
      shared: its tensors (`EMBEDDING`, `LM_HEAD`) that equal the target's, which are used instead.
      method: see `load_draft`.
      rope_theta: see `load_draft`.
      layer_id_convention: see `load_draft`.

    Raises:
      CheckpointError: see `load_draft`; tensors that do not match are in `DraftPlan.match`.
    """
    kind = draft_kind(source)
    head = read_head_config(config)
    if kind == "unknown":
        raise CheckpointError(
            f"this is no EAGLE head: it has neither {source.stored_name('fc.weight')} [h, n * H] nor "
            f"{source.stored_name('layers.0.hidden_norm.weight')} [h]"
        )
    for said, key in ((head.method, head.method_key), (method, f"method {method!r}")):
        if said not in (None, kind):
            raise CheckpointError(
                f"{key} contradicts the tensors, which are those of an {kind!r} head: {_evidence(source)}"
            )
    if kind == "eagle3":
        made, capture, notes = read_draft_config(
            head, source, target, shared=shared, rope_theta=rope_theta, layer_id_convention=layer_id_convention
        )
        table = eagle3_table(made, source.names())
    else:
        if layer_id_convention is not None:
            raise CheckpointError(
                f"layer_id_convention {layer_id_convention!r} means nothing to an EAGLE-1/2 head: it reads the last hidden state"
            )
        made, capture, notes = read_eagle1_config(head, source, target, shared=shared, rope_theta=rope_theta)
        table = eagle1_table(made, source.names())
    guesses = [*head.guesses, *([capture.guess] if capture.guess else [])]
    vocabulary = read_vocabulary(source, made.draft_vocab_size, target.vocab_size)
    if vocabulary is not None and (np.diff(vocabulary) < 0).any():
        guesses.append(f"{source.stored_name('d2t')} maps to target ids that do not ascend; published maps do")
    match = match_tensors(table, source, draft_unused(made))
    if vocabulary is not None:
        match = dataclasses.replace(
            match, used=(*match.used, "d2t"), unused=tuple(name for name in match.unused if name != "d2t")
        )
    sharing = {
        name: _OWN if own else _EQUAL if name in source.names() else _ABSENT
        for name, own in ((EMBEDDING, made.own_embedding), (LM_HEAD, made.own_lm_head))
    }
    notes += [
        f"{source.stored_name(name)}: {words}" for name, words in sharing.items() if _is_remarkable(kind, name, words)
    ]
    return DraftPlan(made, head, source, table, match, vocabulary, capture, sharing, tuple(guesses), tuple(notes))


_OWN, _ABSENT, _EQUAL = "the head's own", "the target's, the head has none", "the target's, which the head's equals"


def _is_remarkable(kind: str, name: str, words: str) -> bool:
    """Whether it differs from what is usual: EAGLE-3 heads take the target's embedding, EAGLE-1/2 heads its output head."""
    usual = {("eagle3", EMBEDDING): _ABSENT, ("eagle3", LM_HEAD): _OWN, ("eagle", LM_HEAD): _ABSENT}
    return words != usual.get((kind, name), _EQUAL)


def _evidence(source: RenamedSource) -> str:
    """The tensors by which a head's kind is known."""
    shown = [
        n
        for n in ("layers.0.hidden_norm.weight", "fc.weight", "layers.0.self_attn.q_proj.weight")
        if n in source.names()
    ]
    return ", ".join(f"{source.stored_name(name)} {source.shape(name)}" for name in shown)


def _shared_tensors(source: RenamedSource, target: Target, dtype: np.dtype) -> set[str]:
    """Which of embedding and output head the head stores as the target has them, value for value in the head's dtype."""
    model = target.model
    lm_head = model.embed.weight if model.lm_head is None else model.lm_head.weight

    def is_shared(name: str, weight: nnx.Param) -> bool:
        shape = (target.config.vocab_size, weight.shape[1])

        def rows(low: int, high: int) -> np.ndarray:
            return read_rows(weight[...], low, high).astype(dtype)

        return name in source.names() and same_values(source, name, shape, rows, dtype)

    return {n for n, w in ((EMBEDDING, model.embed.weight), (LM_HEAD, lm_head)) if is_shared(n, w)}
