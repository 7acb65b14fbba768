"""`eagle-jax train`: a draft head for a target, from what the target answered."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from eagle_jax.cli.options import DEVICES, integer
from eagle_jax.cli.runtime import select_device
from eagle_jax.cli.session import UsageError
from eagle_jax.engine.compilation_cache import keep_compiled_programs


def add_parser(commands: Any) -> None:
    """Adds the subcommand to what `ArgumentParser.add_subparsers` gave."""
    parser = commands.add_parser(
        "train",
        help="train a draft head for a target",
        description="Train a draft head. The target is frozen and run in every step. The run is kept in a folder: give the same "
        "command again to go on with one that was interrupted. Needs pip install 'eagle-jax[train]'.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="the target: a folder, a .gguf file or a repository"
    )
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="PATH",
        help="folders that `eagle-jax synthesize` wrote, or .jsonl files of chats (`messages`, or `conversations`)",
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder of the run")
    head = parser.add_argument_group("head")
    head.add_argument(
        "--method", choices=("eagle3.1", "eagle3", "eagle"), default="eagle3.1", help="(default: %(default)s)"
    )
    head.add_argument(
        "--from-head",
        metavar="HEAD",
        help="train this head further: a folder, a released head or a repository; it brings its own shape and draft vocabulary "
        "(with --method eagle if it is EAGLE-1/2)",
    )
    head.add_argument(
        "--draft-vocab-size",
        type=integer(1),
        metavar="N",
        help="draft the N tokens that answers have most (default: all)",
    )
    head.add_argument(
        "--capture-layers",
        type=integer(0),
        nargs="+",
        metavar="N",
        help="the target's layers whose inputs the head reads (default: EAGLE-3's three)",
    )
    head.add_argument("--num-hidden-layers", type=integer(1), metavar="N", help="(default: 1)")
    head.add_argument("--rope-theta", type=float, metavar="X", help="rotary base of the head (default: the target's)")
    head.add_argument(
        "--random-lm-head", action="store_true", help="start the output head at random, not from the target's rows"
    )
    loss = parser.add_argument_group("loss")
    loss.add_argument(
        "--steps", type=integer(1), metavar="K", help="steps of training-time test (default: 7, 1 for eagle)"
    )
    loss.add_argument(
        "--decay", type=float, default=0.8, metavar="X", help="weight of each step to the one before (default: 0.8)"
    )
    loss.add_argument(
        "--loss", choices=("cross_entropy", "lk_hybrid"), default="cross_entropy", help="(default: %(default)s)"
    )
    loss.add_argument("--eta", type=float, default=3.0, metavar="X", help="of lk_hybrid (default: %(default)s)")
    loss.add_argument(
        "--token-weight", type=float, metavar="X", help="of the loss of tokens (default: 1, 0.1 for eagle)"
    )
    loss.add_argument(
        "--feature-weight", type=float, metavar="X", help="of the loss of features (eagle alone; default: 1)"
    )
    loss.add_argument(
        "--feature-noise", type=float, default=0.0, metavar="X", help="uniform noise on features (default: %(default)s)"
    )
    course = parser.add_argument_group("course")
    length = course.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=float, metavar="X", help="passes over the data")
    length.add_argument("--train-tokens", type=integer(1), metavar="N", help="tokens of the run, padding included")
    length.add_argument("--total-steps", type=integer(1), metavar="N", help="steps of the optimiser")
    course.add_argument(
        "--sequence-length",
        type=integer(2),
        default=1024,
        metavar="T",
        help="tokens of a packed row (default: %(default)s)",
    )
    course.add_argument(
        "--batch-rows", type=integer(1), default=32, metavar="B", help="packed rows of a batch (default: %(default)s)"
    )
    course.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="(default: %(default)s)")
    course.add_argument(
        "--learning-rate", type=float, default=1e-3, metavar="X", help="at its peak (default: %(default)s)"
    )
    course.add_argument(
        "--muon-learning-rate",
        type=float,
        default=1e-2,
        metavar="X",
        help="of the matrices under muon (default: %(default)s)",
    )
    course.add_argument(
        "--warmup", type=float, default=0.04, metavar="X", help="share of the steps (default: %(default)s)"
    )
    course.add_argument("--weight-decay", type=float, default=0.0, metavar="X", help="(default: %(default)s)")
    course.add_argument(
        "--clip", type=float, default=1.0, metavar="X", help="norm of the gradient; 0: any (default: %(default)s)"
    )
    course.add_argument("--seed", type=integer(0), default=0, metavar="N", help="(default: %(default)s)")
    watch = parser.add_argument_group("evaluation")
    watch.add_argument(
        "--held-out",
        type=integer(0),
        default=200,
        metavar="N",
        help="conversations kept for evaluation (default: %(default)s)",
    )
    watch.add_argument(
        "--evaluation-depth", type=integer(1), default=7, metavar="N", help="drafts of a round (default: %(default)s)"
    )
    watch.add_argument(
        "--evaluate-every", type=integer(1), default=500, metavar="N", help="steps (default: %(default)s)"
    )
    watch.add_argument(
        "--patience", type=integer(1), metavar="N", help="stop when the accepted length is no better for N evaluations"
    )
    watch.add_argument("--log-every", type=integer(1), default=20, metavar="N", help="steps (default: %(default)s)")
    watch.add_argument(
        "--checkpoint-every", type=integer(1), default=1000, metavar="N", help="steps (default: %(default)s)"
    )
    watch.add_argument(
        "--no-tensorboard", action="store_true", help="write no event files; metrics.jsonl has the same numbers"
    )
    watch.add_argument("--no-picture", action="store_true", help="draw no course.png at the end")
    watch.add_argument("--json", action="store_true", help="print the result as JSON")
    watch.add_argument("--quiet", action="store_true", help="say nothing on standard error")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", choices=DEVICES, help="fail unless there is one (default: what JAX chooses)")
    machine.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the target, and of the head's computation",
    )
    machine.add_argument(
        "--data-parallel", type=integer(1), default=1, metavar="N", help="devices that split the batch"
    )
    machine.add_argument(
        "--model-parallel", type=integer(1), default=1, metavar="N", help="devices that split the weights"
    )
    machine.add_argument(
        "--attention", choices=("auto", "xla", "cudnn"), default="auto", help="of the target (default: %(default)s)"
    )
    machine.add_argument(
        "--loss-chunk",
        type=integer(1),
        default=4096,
        metavar="N",
        help="tokens whose logits are alive at once (default: %(default)s)",
    )
    machine.add_argument(
        "--remat", action="store_true", help="spare memory: compute draft steps again in the backward pass"
    )
    machine.add_argument("--max-minutes", type=float, metavar="X", help="write a checkpoint and stop after so long")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Trains; the exit code is 0 when the run is finished and 1 when --max-minutes cut it."""
    needed = ["optax", "orbax.checkpoint"]
    needed += [] if options.no_tensorboard else ["tensorboardX"]
    needed += [] if options.no_picture else ["matplotlib"]
    require(needed)
    select_device(options.device)

    from eagle_jax.loading import load_target
    from eagle_jax.training.conversations import read_conversations
    from eagle_jax.training.trainer import train

    config = make_config(options)
    say = _silent if options.quiet else _say
    keep_compiled_programs()
    target = load_target(options.model, dtype=options.dtype, progress=sys.stderr.isatty() and not options.quiet)
    conversations = read_conversations(
        options.data,
        tokenizer=target.tokenizer,
        vocab_size=target.config.vocab_size,
        eos_ids=target.config.eos_token_ids,
    )
    result = train(
        target,
        conversations,
        options.output,
        config,
        data_parallel=options.data_parallel,
        model_parallel=options.model_parallel,
        log_every=options.log_every,
        checkpoint_every=options.checkpoint_every,
        max_seconds=None if options.max_minutes is None else 60 * options.max_minutes,
        tensorboard=not options.no_tensorboard,
        picture=not options.no_picture,
        say=say,
    )
    if options.json:
        values = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(result).items()}
        print(json.dumps(values, indent=2))
    elif result.head is not None:
        print(f"{result.head}: accepted length {result.accepted_length:.3f} at step {result.best_step}")
    if not result.finished:
        say(f"interrupted at step {result.step}; the same command goes on")
    return 0 if result.finished else 1


def make_config(options: argparse.Namespace) -> Any:
    """The configuration that the options ask for.

    Raises:
      UsageError: --from-head together with an option that shapes a new head.
    """
    from eagle_jax.training.config import ExistingHead, HeadConfig, TrainingConfig
    from eagle_jax.training.losses import LossConfig
    from eagle_jax.training.optimizers import OptimizerConfig

    one = options.method == "eagle"

    def default(value: Any, of_eagle: Any, else_: Any) -> Any:
        return value if value is not None else of_eagle if one else else_

    head: HeadConfig | ExistingHead
    if options.from_head is None:
        head = HeadConfig(
            method=options.method,
            draft_vocab_size=options.draft_vocab_size,
            capture_layers=None if options.capture_layers is None else tuple(options.capture_layers),
            num_hidden_layers=options.num_hidden_layers or 1,
            rope_theta=options.rope_theta,
        )
    else:
        for name in ("draft_vocab_size", "capture_layers", "num_hidden_layers", "rope_theta", "random_lm_head"):
            if getattr(options, name):
                raise UsageError(f"--{name.replace('_', '-')} is for new heads; {options.from_head} brings its own")
        head = ExistingHead(path=options.from_head, method="eagle" if one else "eagle3")

    return TrainingConfig(
        head=head,
        steps=default(options.steps, 1, 7),
        decay=options.decay,
        loss=LossConfig(
            kind=options.loss,
            eta=options.eta,
            token_weight=default(options.token_weight, 0.1, 1.0),
            feature_weight=default(options.feature_weight, 1.0, 0.0),
        ),
        optimizer=OptimizerConfig(
            kind=options.optimizer,
            learning_rate=options.learning_rate,
            muon_learning_rate=options.muon_learning_rate,
            warmup=options.warmup,
            weight_decay=options.weight_decay,
            clip=options.clip,
        ),
        init_from_embedding=not options.random_lm_head,
        feature_noise=options.feature_noise,
        sequence_length=options.sequence_length,
        batch_rows=options.batch_rows,
        total_steps=options.total_steps,
        train_tokens=options.train_tokens,
        epochs=options.epochs,
        held_out=options.held_out,
        evaluation_depth=options.evaluation_depth,
        evaluate_every=options.evaluate_every,
        patience=options.patience,
        seed=options.seed,
        attention=options.attention,
        loss_chunk=options.loss_chunk,
        remat=options.remat,
    )


def require(modules: list[str]) -> None:
    """Makes sure that optional dependencies are installed.

    Raises:
      UsageError: one is not; it says how to get it.
    """
    import importlib.util

    if missing := [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None]:
        raise UsageError(
            f"{', '.join(missing)} is not installed: pip install 'eagle-jax[train]' (without tensorboardX: --no-tensorboard, "
            "without matplotlib: --no-picture)"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass
