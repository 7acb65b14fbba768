"""`eagle-jax calibrate`: time the shapes of rounds that `--tree auto` chooses from."""

import argparse
import json
from typing import Any

from eagle_jax.cli import options as shared
from eagle_jax.cli.runtime import stage
from eagle_jax.cli.session import UsageError, start


def add_parser(commands: Any) -> None:
    """Adds the subcommand to what `ArgumentParser.add_subparsers` gave."""
    parser = commands.add_parser(
        "calibrate",
        help="measure the rounds that --tree auto chooses from on this device",
        description="Measure how long plain decoding and each chain and tree take a round on this device, for --tree auto. The "
        "first use does so itself; what was measured is kept in the cache directory and printed here.",
        allow_abbrev=False,
    )
    shared.add_model_options(parser)
    parser.add_argument(
        "--batch", type=shared.integer(1), default=1, metavar="N", help="sequences side by side (default: 1)"
    )
    parser.add_argument(
        "--tokens",
        type=shared.integer(2),
        default=2048,
        metavar="N",
        help="tokens of the longest sequence, prompt and output (default: %(default)s, or --max-model-len)",
    )
    parser.add_argument("--again", action="store_true", help="measure even if that was done before")
    parser.add_argument("--json", action="store_true", help="print the calibration as JSON")
    shared.add_reporting_options(parser)
    parser.set_defaults(run=run, tree="auto", num_speculative_tokens=None)


def run(options: argparse.Namespace) -> int:
    """Measures or reads, and prints."""
    session = start(options)
    if session.draft is None:
        raise UsageError("there is nothing to choose from without a draft head: give --draft for this --model")
    decoder = session.decoder(speculative=True, max_num_seqs=options.batch)
    tokens = min(options.tokens, decoder.config.max_model_len)
    with stage("Calibrating", quiet=options.quiet):
        calibration = decoder.calibrate(prompts=options.batch, tokens=tokens, again=options.again)
    report = {**calibration.to_dict(), "file": str(calibration.file)}
    if options.json:
        print(json.dumps(report, indent=1))
        return 0
    for candidate in report["candidates"]:
        print(f"{candidate['candidate']:20} {candidate['ms']:10.3f} ms   {candidate['plain_rounds']:.2f} plain rounds")
    print(f"Kept in {calibration.file}")
    return 0
