"""From the command line to loaded models."""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from eagle_jax.cli.runtime import Backend, select_device, stage
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.engine.compilation_cache import keep_compiled_programs
from eagle_jax.engine.config import EngineConfig
from eagle_jax.entrypoints.decoder import Decoder
from eagle_jax.entrypoints.speculators import find_target
from eagle_jax.loading import Draft, Target, default_target, load_draft, load_target
from eagle_jax.loading.demo_target import packaged_target
from eagle_jax.loading.shipped import shipped_head, shipped_heads
from eagle_jax.parallel import make_mesh
from eagle_jax.speculative_config import default_tree

DEFAULT_HEAD = "smollm2-135m-instruct-eagle3"
DEFAULT_CHAIN_CPU, DEFAULT_CHAIN = 3, 5
"""Drafted tokens a round where the user does not say: on a CPU each row of a forward costs time, elsewhere a few are free."""


class UsageError(ValueError):
    """Options that do not go together, or a file that cannot be read."""


@dataclasses.dataclass(frozen=True)
class Session:
    """Loaded models on a device."""

    backend: Backend
    target: Target
    draft: Draft | None
    tree: TreeConfig | Literal["auto"] | None
    """None exactly when there is no draft."""
    max_model_len: int | None

    def decoder(self, *, speculative: bool, max_num_seqs: int | None = None) -> Decoder:
        """Decodes with the draft head, or plainly."""

        draft, tree = (self.draft, self.tree) if speculative else (None, None)
        config = EngineConfig.resolve(
            self.target, draft, tree=tree, max_model_len=self.max_model_len, max_num_seqs=max_num_seqs
        )
        return Decoder(self.target, draft, config)


def start(options: argparse.Namespace, *, plain: bool = False) -> Session:
    """Selects the device and loads the models that the options name, and says so on standard error.

    Args:
      options: of `options.add_model_options` and `options.add_draft_shape_options`.
      plain: load no draft head, not even the default one.

    Raises:
      UsageError: options that do not go together.
      DeviceError, CheckpointError, ValueError: a device or a checkpoint that is not there or does not fit.
    """
    model, head = (find_models(options)[0], None) if plain else find_models(options)
    if head is None and (options.num_speculative_tokens is not None or options.tree is not None):
        raise UsageError("--num-speculative-tokens and --tree need a draft head: give --draft")
    backend = announce(options)
    tree = None if head is None else _tree(options, backend.platform)
    target, draft = load_models(options, model, head)
    if draft is not None:
        if draft.num_speculative_tokens is not None and options.num_speculative_tokens is None and options.tree is None:
            tree = default_tree(draft)
        say(options, f"Drafting {describe(tree)}")
    return Session(backend, target, draft, tree, options.max_model_len)


def find_models(options: argparse.Namespace) -> tuple[str | Path | None, str | None]:
    """Names of target and head: None of the default target, and where there is no head."""
    if options.model is None:
        return None, DEFAULT_HEAD if options.draft is None else options.draft
    if options.draft is not None:
        return options.model, options.draft
    # A speculators checkpoint in the place of a model is the head, and names the model.
    model, named, _ = find_target(options.model, None, revision=None, download_dir=None)
    return model, str(named["model"]) if isinstance(named, Mapping) else None


def announce(options: argparse.Namespace) -> Backend:
    """Selects the device, and sets how much is said."""
    if options.quiet:
        logging.getLogger("eagle_jax").setLevel(logging.ERROR)
    if options.verbose:
        logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
        logging.getLogger("eagle_jax").setLevel(logging.INFO)
    backend = select_device(options.device)
    say(options, f"Running on {backend}")
    return backend


def load_models(
    options: argparse.Namespace,
    model: str | Path | None,
    head: str | None,
    *,
    packaged: bool = False,
    method: Literal["eagle", "eagle3"] | None = None,
    tensor_parallel_size: int = 1,
) -> tuple[Target, Draft | None]:
    """Loads what `find_models` found.

    Args:
      options: of `options.add_model_options`.
      model: the target, or None for the default one.
      head: the draft head, or None.
      packaged: the default target is to be the file of the released head's expectations.
      method: what the head must be, None for what it is.
      tensor_parallel_size: devices that share the weights.
    """
    keep_compiled_programs()
    if model is None:
        with stage("Obtaining SmolLM2-135M-Instruct", quiet=options.quiet):
            model = packaged_target() if packaged else default_target()
    bar, mesh = sys.stderr.isatty() and not options.quiet, make_mesh(tensor_parallel_size)
    target = load_target(model, dtype=options.dtype or "auto", mesh=mesh, progress=bar)
    say(options, f"Target {target.name}, {target.model.dtype}")
    if head is None:
        return target, None
    draft = load_draft(find_head(head), target, method=method, progress=bar)
    say(options, f"Draft head {draft.name}")
    for note in draft.notes if options.verbose else ():
        say(options, f"  {note}")
    return target, draft


def say(options: argparse.Namespace, text: str) -> None:
    """A line on standard error, unless --quiet was given."""
    if not options.quiet:
        print(text, file=sys.stderr, flush=True)


def find_head(name: str) -> str | Path:
    """Folder of the released head of that name, unless a file or folder is called so; any other name is returned as it is."""

    if not Path(name).exists() and name in shipped_heads():
        return shipped_head(name)
    return name


def describe(tree: TreeConfig | Literal["auto"] | None) -> str:
    """A tree in words."""
    if tree is None:
        return "no draft"
    if isinstance(tree, str):
        return "plain rounds, chains or trees as it pays (auto)"
    if tree.top_k == 1:
        return f"a chain of {tree.total_tokens - 1} a round"
    return f"a tree of {tree.total_tokens} nodes a round (depth {tree.depth}, top_k {tree.top_k})"


def tree_to_json(tree: TreeConfig | Literal["auto"] | None) -> dict[str, Any] | str | None:
    """A tree as reports hold it."""
    return tree if tree is None or isinstance(tree, str) else dataclasses.asdict(tree)


def _tree(options: argparse.Namespace, platform: str) -> TreeConfig | Literal["auto"]:

    if isinstance(options.tree, str):
        return "auto"
    if options.tree is not None:
        return TreeConfig(**options.tree)
    return default_chain(options, platform)


def default_chain(options: argparse.Namespace, platform: str) -> TreeConfig:
    """The chain that was asked for, or the platform's."""

    length = options.num_speculative_tokens or (DEFAULT_CHAIN_CPU if platform == "cpu" else DEFAULT_CHAIN)
    return TreeConfig.chain(length)
