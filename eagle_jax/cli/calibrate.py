"""`eagle-jax calibrate`: time the shapes of rounds that `--tree auto` chooses from."""

import argparse
import json

from eagle_jax.cli import options as shared
from eagle_jax.cli.options import add_integer, add_switch
from eagle_jax.cli.runtime import stage
from eagle_jax.cli.session import UsageError, start

DESCRIPTION = (
    "Measure how long plain decoding and each chain and tree take a round on this device, for --tree auto. The "
    "first use does so itself; what was measured is kept in the cache directory and printed here."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    shared.add_model_options(parser)
    add_integer(parser, "--batch", "sequences side by side", default=1)
    add_integer(
        parser,
        "--tokens",
        "tokens of the longest sequence, prompt and output (default: %(default)s, or --max-model-len)",
        default=2048,
        least=2,
    )
    add_switch(parser, "--again", "measure even if that was done before")
    add_switch(parser, "--json", "print the calibration as JSON")
    shared.add_reporting_options(parser)
    parser.set_defaults(tree="auto", num_speculative_tokens=None)


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
