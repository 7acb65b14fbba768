"""`eagle-jax sweep`: many shapes of drafts on one device, and which of them to use there."""

import argparse
import itertools

from eagle_jax.cli import measure
from eagle_jax.cli.options import add_integer
from eagle_jax.cli.session import UsageError
from eagle_jax.drafters.tree import TreeConfig

CHAINS = {"cpu": (1, 2, 3, 4, 5)}
TREES: dict[str, tuple[tuple[int, ...], ...]] = {"cpu": ((8, 16), (2, 4), (2, 4))}
"""What is tried where nothing is asked for: (total_tokens, depth, top_k). On a CPU each row of a forward costs time."""
DEFAULT_CHAINS: tuple[int, ...] = (2, 3, 4, 5, 7)
DEFAULT_TREES: tuple[tuple[int, ...], ...] = ((16, 32, 60), (5, 7), (4, 10))
PROMPTS, OUTPUT_LEN = 16, 128


DESCRIPTION = (
    "Measure chains and trees of many sizes against plain decoding on the same prompts: tokens a second, "
    "accepted length, and the setting to use on this device. Every combination of --total-tokens, --depth and --tree-top-k "
    "that is a tree is measured. Without any shape a few chains and trees that suit the device are."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    measure.add_model_options(parser)
    shapes = parser.add_argument_group("what is drafted")
    add_integer(
        shapes,
        "--num-spec-tokens --num-speculative-tokens",
        "chains of K tokens a round",
        dest="num_spec_tokens",
        nargs="+",
        metavar="K",
    )
    add_integer(shapes, "--total-tokens", "nodes of a tree with the root", nargs="+", least=3)
    add_integer(shapes, "--depth", "expansions of a tree after the first level", nargs="+", metavar="D")
    add_integer(shapes, "--tree-top-k", "children of a node; --top-k is of sampling", nargs="+", least=2, metavar="K")
    measure.add_dataset_options(parser, prompts=PROMPTS, output_len=OUTPUT_LEN)
    measure.add_sampling_options(parser)
    measure.add_report_options(parser)
    parser.set_defaults(plain=True, turns=None, print_output=False)


def run(options: argparse.Namespace) -> int:
    """Measures and recommends; 1 if something was left for the next run."""
    measure.check_report_options(options)
    if options.num_prompts is None:
        options.num_prompts = PROMPTS
    if options.output_len is None:
        options.output_len = OUTPUT_LEN
    trees = read_trees(options)  # what cannot be a tree is an error before anything is loaded
    datasets = measure.read_datasets(options)
    models = measure.Models(options)
    platform, vocabulary = models.backend.platform, models.draft.config.draft_vocab_size
    chains = options.num_spec_tokens or ()
    if not chains and not trees:
        chains = CHAINS.get(platform, DEFAULT_CHAINS)
        trees = grid(*TREES.get(platform, DEFAULT_TREES))
    if too_wide := [tree for tree in trees if tree.top_k > vocabulary]:
        raise UsageError(f"--tree-top-k {too_wide[0].top_k} exceeds the {vocabulary} tokens that the head can draft")
    return measure.measure_and_report(models, datasets, chains, trees)


def read_trees(options: argparse.Namespace) -> list[TreeConfig]:
    """The trees that the options name.

    Raises:
      UsageError: some but not all three sizes, or no combination of them is a tree.
    """
    sizes = {"--total-tokens": options.total_tokens, "--depth": options.depth, "--tree-top-k": options.tree_top_k}
    given = [name for name, values in sizes.items() if values]
    if not given:
        return []
    if missing := [name for name, values in sizes.items() if not values]:
        raise UsageError(f"trees have three sizes: {' and '.join(given)} need {' and '.join(missing)} as well")
    trees = grid(*sizes.values())
    if not trees:
        raise UsageError(
            "no combination of --total-tokens, --depth and --tree-top-k is a tree: K guesses at the first level and K * K at "
            "each of D more give 1 + K + D * K * K nodes at most, and D + 2 are needed to reach the deepest level"
        )
    return trees


def grid(totals: tuple[int, ...], depths: tuple[int, ...], widths: tuple[int, ...]) -> list[TreeConfig]:
    """Every combination that is a tree and whose depth its nodes can reach."""

    return [
        TreeConfig(total_tokens=total, depth=depth, top_k=width)
        for total, depth, width in itertools.product(totals, depths, widths)
        if depth + 2 <= total <= 1 + width + depth * width**2
    ]
