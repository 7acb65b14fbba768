"""From the command line to loaded models: what `demo` and `generate` have in common."""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle_jax.cli.runtime import Backend, select_device, stage
from eagle_jax.engine.compilation_cache import keep_compiled_programs

if TYPE_CHECKING:
    from eagle_jax.drafters.tree import TreeConfig
    from eagle_jax.entrypoints.decoder import Decoder
    from eagle_jax.loading import Draft, Target

DEFAULT_HEAD = "smollm2-135m-instruct-eagle3"
DEFAULT_CHAIN_CPU, DEFAULT_CHAIN = 3, 5
"""Drafted tokens a round where the user does not say: on a CPU each row of a forward costs time, elsewhere a few are free."""


class UsageError(ValueError):
    """Options that do not go together, or a file that cannot be read."""


@dataclasses.dataclass(frozen=True)
class Session:
    """Loaded models on a device."""

    backend: Backend
    target: "Target"
    draft: "Draft | None"
    tree: "TreeConfig | Literal['auto'] | None"
    """None exactly when there is no draft."""
    max_model_len: int | None

    def decoder(self, *, speculative: bool, max_num_seqs: int | None = None) -> "Decoder":
        """Decodes with the draft head, or plainly."""
        from eagle_jax.engine.config import EngineConfig
        from eagle_jax.entrypoints.decoder import Decoder

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
    model, head = options.model, options.draft
    if model is None:
        head = DEFAULT_HEAD if head is None else head
    elif head is None:
        from eagle_jax.entrypoints.speculators import find_target

        # A speculators checkpoint in the place of a model is the head, and names the model.
        model, named, _ = find_target(model, None, revision=None, download_dir=None)
        head = None if not isinstance(named, Mapping) else str(named["model"])
    if plain:
        head = None
    if head is None and (options.num_speculative_tokens is not None or options.tree is not None):
        raise UsageError("--num-speculative-tokens and --tree need a draft head: give --draft")
    if options.quiet:
        logging.getLogger("eagle_jax").setLevel(logging.ERROR)
    if options.verbose:
        logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
        logging.getLogger("eagle_jax").setLevel(logging.INFO)

    def say(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr)

    backend = select_device(options.device)
    say(f"Running on {backend}")

    from eagle_jax.loading import default_target, load_draft, load_target
    from eagle_jax.speculative_config import default_tree

    tree = None if head is None else _tree(options, backend.platform)
    keep_compiled_programs()
    if model is None:
        with stage("Obtaining SmolLM2-135M-Instruct", quiet=options.quiet):
            model = default_target()
    bar = sys.stderr.isatty() and not options.quiet
    target = load_target(model, dtype=options.dtype, progress=bar)
    say(f"Target {target.name}, {target.model.dtype}")
    draft = None
    if head is not None:
        draft = load_draft(find_head(head), target, progress=bar)
        if draft.num_speculative_tokens is not None and options.num_speculative_tokens is None and options.tree is None:
            tree = default_tree(draft)
        say(f"Draft head {draft.name}, {describe(tree)}")
        for note in draft.notes if options.verbose else ():
            say(f"  {note}")
    return Session(backend, target, draft, tree, options.max_model_len)


def find_head(name: str) -> str | Path:
    """Folder of the released head of that name, unless a file or folder is called so; any other name is returned as it is."""
    from eagle_jax.loading.shipped import shipped_head, shipped_heads

    if not Path(name).exists() and name in shipped_heads():
        return shipped_head(name)
    return name


def describe(tree: "TreeConfig | Literal['auto'] | None") -> str:
    """A tree in words."""
    if tree is None:
        return "no draft"
    if isinstance(tree, str):
        return "plain rounds, chains or trees as it pays (auto)"
    if tree.top_k == 1:
        return f"a chain of {tree.total_tokens - 1} a round"
    return f"a tree of {tree.total_tokens} nodes a round (depth {tree.depth}, top_k {tree.top_k})"


def tree_to_json(tree: "TreeConfig | Literal['auto'] | None") -> dict[str, Any] | str | None:
    """A tree as reports hold it."""
    return tree if tree is None or isinstance(tree, str) else dataclasses.asdict(tree)


def _tree(options: argparse.Namespace, platform: str) -> "TreeConfig | Literal['auto']":
    from eagle_jax.drafters.tree import TreeConfig

    if isinstance(options.tree, str):
        return "auto"
    if options.tree is not None:
        return TreeConfig(**options.tree)
    return default_chain(options, platform)


def default_chain(options: argparse.Namespace, platform: str) -> "TreeConfig":
    """The chain that was asked for, or the platform's."""
    from eagle_jax.drafters.tree import TreeConfig

    length = options.num_speculative_tokens or (DEFAULT_CHAIN_CPU if platform == "cpu" else DEFAULT_CHAIN)
    return TreeConfig.chain(length)
