"""Loading a target of any family from safetensors, torch or GGUF files, with its tokenizer and generation defaults."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle_jax.loading.containers import open_source
from eagle_jax.loading.dtypes import parse_dtype
from eagle_jax.loading.errors import CheckpointError, about
from eagle_jax.loading.gguf import GGUFSource
from eagle_jax.loading.gguf_target import GGUFTargetSource, gguf_config
from eagle_jax.loading.hub import resolve
from eagle_jax.loading.placement import Match, Sharding, Table, fill, match_tensors
from eagle_jax.loading.progress import Progress
from eagle_jax.loading.sources import TensorSource, read_json, same_values
from eagle_jax.loading.tables import llama_table, llama_unused, table_of_shards
from eagle_jax.models import Llama, LlamaConfig
from eagle_jax.parallel.mesh import check_mesh, model_shards
from eagle_jax.parallel.partition import check_divisible, module_sharding
from eagle_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A loaded target model and what belongs to it."""

    model: Llama
    config: LlamaConfig
    tokenizer: Tokenizer | None
    """None where the checkpoint has no tokenizer; prompts must be token ids then."""
    name: str
    """What the caller asked for: a repository or a path."""
    path: Path
    """The folder or GGUF file that was read."""
    generation_config: Mapping[str, Any]
    """The parsed generation_config.json, the sampling defaults of the model; empty if there is none."""
    mesh: Mesh | None = None
    """The devices that hold it; None is one."""


@dataclasses.dataclass(frozen=True)
class TargetPlan:
    """What a target checkpoint holds and how it would be loaded; no weight has been read."""

    config: LlamaConfig
    source: TensorSource
    """The tensors under their Hugging Face names."""
    table: Table
    match: Match
    generation_config: Mapping[str, Any]


def load_target(
    path_or_repo: str | Path,
    *,
    dtype: Any = "auto",
    revision: str | None = None,
    download_dir: str | Path | None = None,
    ignore_config_keys: Iterable[str] = (),
    mesh: Mesh | None = None,
    sharding: Sharding | None = None,
    progress: Progress = False,
) -> Target:
    """Loads a target: a Llama, Mistral, Qwen2 or Qwen3 (`eagle_jax.models.families`).

    Args:
      path_or_repo: a folder with config.json and safetensors or torch weights, a `.gguf` file, or a repository of the model hub.
      dtype: "auto" (float32 on CPU, float16 on NVIDIA GPUs before Ampere, bfloat16 on other accelerators), "float32", "bfloat16",
        "float16", or one of these dtypes.
      revision: branch, tag or commit of a repository.
      download_dir: where repositories are kept, instead of the hub's own cache.
      ignore_config_keys: unknown keys of config.json, or settings in its blocks such as "rope_scaling.attn_factor" (or keys
        such as "llama.note" of a GGUF file), that are known not to matter.
      mesh: the devices that share the weights and the work, as `eagle_jax.parallel.make_mesh` makes it; None is one device. Each
        process reads what its own devices hold.
      sharding: where parameters go, one sharding or a function of path and shape, for computations of one's own; None is the
        default device, or what `mesh` says.
      progress: True draws a bar, a function is called with (tensor, bytes read, bytes in all).

    Raises:
      CheckpointError: a checkpoint that cannot be found or read, whose configuration is not supported, or whose tensors are
        not exactly those of its configuration.
      ValueError: a wrong argument, or a model that cannot be split over so many devices.
    """
    wanted, mesh = parse_dtype(dtype), check_mesh(mesh)
    if mesh is not None and sharding is not None:
        raise ValueError("mesh and sharding exclude each other: a mesh says where parameters go")
    path = resolve(path_or_repo, revision=revision, download_dir=download_dir)
    with about(f"target {path_or_repo}"):
        plan = plan_target(path, ignore_config_keys=ignore_config_keys)
        plan.match.check()
        check_divisible(plan.config, model_shards(mesh), whose="the target")
        check_tied_head(plan)
    tokenizer = _tokenizer(path, plan.source)
    config = plan.config
    if not config.eos_token_ids and tokenizer is not None and tokenizer.eos_token_id is not None:
        config = dataclasses.replace(config, eos_token_ids=(tokenizer.eos_token_id,))
    shards = model_shards(mesh)

    def build() -> Llama:
        return Llama(config, dtype=wanted, rngs=nnx.Rngs(0), shards=shards)

    model = fill(
        build,
        table_of_shards(plan.table, build, config, shards),
        plan.source,
        wanted,
        sharding=sharding if mesh is None else module_sharding(mesh, shards),
        progress=progress,
    )
    return Target(
        model=model,
        config=config,
        tokenizer=tokenizer,
        name=str(path_or_repo),
        path=path,
        generation_config=plan.generation_config,
        mesh=mesh,
    )


def plan_target(path: Path, *, ignore_config_keys: Iterable[str] = ()) -> TargetPlan:
    """Reads configuration and tensor list of a target, and matches them.

    Args:
      path: a folder or a `.gguf` file.
      ignore_config_keys: see `load_target`.

    Raises:
      CheckpointError: files that cannot be read.
      ValueError: a configuration that is not supported.
    """
    source = open_source(path)
    generation: Mapping[str, Any] = {}
    if isinstance(source, GGUFSource):
        config = gguf_config(source, ignore_config_keys)
        source = GGUFTargetSource(source, config)
    else:
        if (path / "generation_config.json").is_file():
            generation = read_json(path / "generation_config.json")
        config = LlamaConfig.from_dict(read_json(path / "config.json"), generation, ignore_config_keys)
    table = llama_table(config)
    unused = llama_unused(config) | ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return TargetPlan(config, source, table, match_tensors(table, source, unused), generation)


def check_tied_head(plan: TargetPlan) -> None:
    """Makes sure that a head which a tied checkpoint stores all the same is its embedding.

    Raises:
      CheckpointError: it is something else, so the file and its configuration contradict each other.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not plan.config.tie_word_embeddings or head not in plan.source.names():
        return

    def rows(low: int, high: int) -> np.ndarray:
        return plan.source.read(embedding, (slice(low, high),))

    if not same_values(plan.source, head, plan.source.shape(embedding), rows):
        raise CheckpointError(
            f"config.json says tie_word_embeddings, but the checkpoint's {head} {plan.source.shape(head)} differs from "
            f"{embedding} {plan.source.shape(embedding)}; set tie_word_embeddings to false in config.json to use both"
        )


def _tokenizer(path: Path, source: TensorSource) -> Tokenizer | None:
    if source.container != "gguf":
        return Tokenizer.from_folder(path)
    return Tokenizer.from_gguf_metadata(source.metadata) if "tokenizer.ggml.model" in source.metadata else None
