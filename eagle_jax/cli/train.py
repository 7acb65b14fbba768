"""`eagle-jax train`: a draft head for a target, from what the target answered."""

import argparse
import dataclasses
import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from eagle_jax.cli import session
from eagle_jax.cli.options import add, add_device_option, add_integer, add_number, add_switch
from eagle_jax.cli.runtime import select_device
from eagle_jax.cli.session import UsageError
from eagle_jax.engine.compilation_cache import keep_compiled_programs
from eagle_jax.loading import load_target

DESCRIPTION = (
    "Train a draft head. The target is frozen and run in every step. The run is kept in a folder: give the same "
    "command again to go on with one that was interrupted. Needs pip install 'eagle-jax[train]'."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    add(parser, "--model", "the target: a folder, a .gguf file or a repository", required=True, metavar="PATH")
    add(
        parser,
        "--data",
        "folders that `eagle-jax synthesize` wrote, or .jsonl files of chats (`messages`, or `conversations`)",
        required=True,
        nargs="+",
        metavar="PATH",
    )
    add(parser, "--output", "folder of the run", required=True, metavar="FOLDER")
    head = parser.add_argument_group("head")
    add(head, "--method", "", choices=("eagle3.1", "eagle3", "eagle"), default="eagle3.1")
    add(
        head,
        "--from-head",
        "train this head further: a folder, a released head or a repository; it brings its own shape and draft vocabulary "
        "(with --method eagle if it is EAGLE-1/2)",
        metavar="HEAD",
    )
    add_integer(head, "--draft-vocab-size", "draft the N tokens that answers have most (default: all)")
    add_integer(
        head,
        "--capture-layers",
        "the target's layers whose inputs the head reads (default: EAGLE-3's three)",
        nargs="+",
        least=0,
    )
    add_integer(head, "--num-hidden-layers", "(default: 1)")
    add_number(head, "--rope-theta", "rotary base of the head (default: the target's)")
    add_switch(head, "--random-lm-head", "start the output head at random, not from the target's rows")
    loss = parser.add_argument_group("loss")
    add_integer(loss, "--steps", "steps of training-time test (default: 7, 1 for eagle)", metavar="K")
    add_number(loss, "--decay", "weight of each step to the one before", default=0.8)
    add(loss, "--loss", "", choices=("cross_entropy", "lk_hybrid"), default="cross_entropy")
    add_number(loss, "--eta", "of lk_hybrid", default=3.0)
    add_number(loss, "--token-weight", "of the loss of tokens (default: 1, 0.1 for eagle)")
    add_number(loss, "--feature-weight", "of the loss of features (eagle alone; default: 1)")
    add_number(loss, "--feature-noise", "uniform noise on features", default=0.0)
    course = parser.add_argument_group("course")
    length = course.add_mutually_exclusive_group(required=True)
    add_number(length, "--epochs", "passes over the data")
    add_integer(length, "--train-tokens", "tokens of the run, padding included")
    add_integer(length, "--total-steps", "steps of the optimiser")
    add_integer(course, "--sequence-length", "tokens of a packed row", default=1024, least=2, metavar="T")
    add_integer(course, "--batch-rows", "packed rows of a batch", default=32, metavar="B")
    add(course, "--optimizer", "", choices=("adamw", "muon"), default="adamw")
    add_number(course, "--learning-rate", "at its peak", default=1e-3)
    add_number(course, "--muon-learning-rate", "of the matrices under muon", default=1e-2)
    add_number(course, "--warmup", "share of the steps", default=0.04)
    add_number(course, "--weight-decay", "", default=0.0)
    add_number(course, "--clip", "norm of the gradient; 0: any", default=1.0)
    add_integer(course, "--seed", "", default=0, least=0)
    watch = parser.add_argument_group("evaluation")
    add_integer(watch, "--held-out", "conversations kept for evaluation", default=200, least=0)
    add_integer(watch, "--evaluation-depth", "drafts of a round", default=7)
    add_integer(watch, "--evaluate-every", "steps", default=500)
    add_integer(watch, "--patience", "stop when the accepted length is no better for N evaluations")
    add_integer(watch, "--log-every", "steps", default=20)
    add_integer(watch, "--checkpoint-every", "steps", default=1000)
    add_switch(watch, "--no-tensorboard", "write no event files; metrics.jsonl has the same numbers")
    add_switch(watch, "--no-picture", "draw no course.png at the end")
    add_switch(watch, "--json", "print the result as JSON")
    add_switch(watch, "--quiet", "say nothing on standard error")
    machine = parser.add_argument_group("machine")
    add_device_option(machine)
    add(
        machine,
        "--dtype",
        "of the target, and of the head's computation",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
    )
    add_integer(machine, "--data-parallel", "devices that split the batch", default=1)
    add_integer(machine, "--model-parallel", "devices that split the weights", default=1)
    add(machine, "--attention", "of the target", choices=("auto", "xla", "cudnn"), default="auto")
    add_integer(machine, "--loss-chunk", "tokens whose logits are alive at once", default=4096)
    add_switch(machine, "--remat", "spare memory: compute draft steps again in the backward pass")
    add_number(machine, "--max-minutes", "write a checkpoint and stop after so long")


def run(options: argparse.Namespace) -> int:
    """Trains; the exit code is 0 when the run is finished and 1 when --max-minutes cut it."""
    needed = ["optax", "orbax.checkpoint"]
    needed += [] if options.no_tensorboard else ["tensorboardX"]
    needed += [] if options.no_picture else ["matplotlib"]
    require(needed)
    select_device(options.device)

    from eagle_jax.training.conversations import read_conversations
    from eagle_jax.training.trainer import train

    config = make_config(options)
    say = functools.partial(session.say, options)
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

    if missing := [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None]:
        raise UsageError(
            f"{', '.join(missing)} is not installed: pip install 'eagle-jax[train]' (without tensorboardX: --no-tensorboard, "
            "without matplotlib: --no-picture)"
        )
