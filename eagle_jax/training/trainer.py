"""A training run from data to an exported head: resumable, watched, and stopped by the accepted length."""

import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.loading import Draft, Target, load_draft
from eagle_jax.models import DraftConfig
from eagle_jax.training.acceptance import SimulatedRounds, spans, walk
from eagle_jax.training.attention import PackedImplementation, cudnn_refusal
from eagle_jax.training.batch import PackedBatch
from eagle_jax.training.checkpoints import Checkpoints
from eagle_jax.training.config import ExistingHead, TrainingConfig
from eagle_jax.training.conversations import Conversation
from eagle_jax.training.export import export_head, export_speculators
from eagle_jax.training.head import HeadTemplate, initial_parameters, split_head
from eagle_jax.training.optimizers import make_optimizer
from eagle_jax.training.packing import Packer, fit, prefetch
from eagle_jax.training.records import METRICS, Recorder, draw_course, say_on_stderr
from eagle_jax.training.sharding import TrainingMesh
from eagle_jax.training.step import EvaluationStep, Frozen, Metrics, Programs, StepConfig, TrainState, make_programs
from eagle_jax.training.vocabulary import choose_vocabulary, count_tokens

SETTINGS, VOCABULARY, CHECKPOINTS, HEAD, SPECULATORS, PICTURE = (
    "settings.json", "vocabulary.npy", "checkpoints", "head", "head-speculators", "course.png",
)  # fmt: skip
_EVALUATED_WITHOUT_HELD_OUT = 200


class RunError(ValueError):
    """A run that cannot go on in its folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How a head does on conversations of the target."""

    greedy: SimulatedRounds
    """Over answers that the target wrote greedily, or at a temperature that is not known."""
    sampled: SimulatedRounds
    """Over answers that were sampled; drafts are greedy all the same."""
    chains: dict[int, float]
    """Accepted length of chains of so many drafts, over the greedy answers, or over all where there is none."""

    @property
    def accepted_length(self) -> float:
        """Of the longest chain: what runs are judged by."""
        return self.chains[max(self.chains)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What came out of a run."""

    head: Path | None
    """Folder of the best head in EAGLE's format; None if the run was interrupted before its first evaluation."""
    speculators: Path | None
    """The same in the format of speculators."""
    step: int
    """Steps done."""
    finished: bool
    """False: the time given was up, and the same call goes on from the last checkpoint."""
    accepted_length: float
    """Of the best head, see `Evaluation.accepted_length`."""
    best_step: int
    tokens_per_second: float
    """In training, padding left out, without compilation and evaluations; of this call."""


def train(
    target: Target,
    conversations: Sequence[Conversation],
    output: str | Path,
    config: TrainingConfig,
    *,
    data_parallel: int = 1,
    model_parallel: int = 1,
    log_every: int = 20,
    checkpoint_every: int = 1000,
    max_seconds: float | None = None,
    tensorboard: bool = True,
    picture: bool = True,
    say: Callable[[str], None] = say_on_stderr,
) -> TrainingResult:
    """Trains a draft head for a target, or goes on with the run in `output`.

    Args:
      target: what `load_target` returned; it is frozen, and run in every step.
      conversations: what it answered (`eagle_jax.training.conversations.read_conversations`).
      output: folder of the run: settings, metrics, checkpoints, the best head in both formats, a picture.
      config: everything that decides what is computed; a run goes on only with the one that it was started with.
      data_parallel: devices over which batches are split.
      model_parallel: devices over which the weights are split.
      log_every: steps between two lines.
      checkpoint_every: steps between two checkpoints.
      max_seconds: write a checkpoint and return when so much time has passed.
      tensorboard: write event files too.
      picture: draw loss and accepted length at the end.
      say: takes lines for people.

    Raises:
      DataError, ValueError: data or settings that do not fit together.
      RunError: `output` holds a run with other settings or data.
      FloatingPointError: the loss is no longer finite.
    """
    return _Run(
        target,
        conversations,
        Path(output),
        config,
        TrainingMesh.make(data_parallel, model_parallel),
        say,
    ).train(
        log_every=log_every,
        checkpoint_every=checkpoint_every,
        max_seconds=max_seconds,
        tensorboard=tensorboard,
        picture=picture,
    )


class _Run:
    """The state of `train`."""

    def __init__(
        self,
        target: Target,
        conversations: Sequence[Conversation],
        output: Path,
        config: TrainingConfig,
        mesh: TrainingMesh,
        say: Callable[[str], None],
    ):
        self.target, self.output, self.config, self.mesh, self.say = target, output, config, mesh, say
        self.existing: Draft | None = None
        self.draft: DraftConfig
        if isinstance(config.head, ExistingHead):
            self.existing = _load_existing(config.head, target)
            self.draft = self.existing.config
        else:
            self.draft = config.head.build(target.config)
        _check_length(target, config)
        if mesh.mesh is not None and config.batch_rows % mesh.mesh.shape["data"]:
            raise ValueError(
                f"batch_rows {config.batch_rows} is no multiple of data_parallel {mesh.mesh.shape['data']}"
            )
        kept, cut, lost = fit(conversations, config.sequence_length)
        if not kept:
            raise ValueError(
                f"no conversation has an answer of two tokens within sequence_length {config.sequence_length}; there are "
                f"{len(conversations)}"
            )
        self.training, self.evaluated = _split(kept, config)
        self.fingerprint = _fingerprint(kept)
        say(
            f"{len(self.training)} conversations, {sum(len(c.tokens) for c in self.training)} tokens, of which "
            f"{sum(int(c.assistant.sum()) for c in self.training)} are answers; {len(self.evaluated)} held out; {cut} cut to "
            f"{config.sequence_length} tokens, {lost} left out because that took their answer"
        )
        self.packer = Packer(self.training, config.sequence_length, config.batch_rows, config.seed)
        self.total = config.count_steps(self.packer.batches_per_epoch())
        output.mkdir(parents=True, exist_ok=True)
        self._check_settings()
        self.vocabulary = self._vocabulary()
        if self.existing is not None:
            self._check_format(self.existing)
        self.template = HeadTemplate(self.draft)
        self.optimizer = make_optimizer(config.optimizer, self.total)
        self.step_config = self._step_config()
        graph, weights = nnx.split(target.model)
        flat = nnx.to_flat_state(weights)
        self.mesh = dataclasses.replace(mesh, axes=self.template.axes)
        placed = [
            (path, v.replace(jax.device_put(v.get_value(), mesh.sharding(v.get_metadata("axes"), v.get_value().shape))))
            for path, v in flat
        ]
        where = mesh.sharding((), ())
        self.frozen = Frozen(nnx.from_flat_state(placed), jax.device_put(jnp.asarray(self.vocabulary), where))
        self.programs: Programs = make_programs(
            graph,
            self.template,
            self.step_config,
            self.optimizer,
            seed=config.seed,
            evaluation_steps=config.evaluation_depth,
            mesh=self.mesh,
        )
        self.best: dict[str, Any] = {"accepted_length": -math.inf, "step": 0, "worse": 0}

    def train(
        self, *, log_every: int, checkpoint_every: int, max_seconds: float | None, tensorboard: bool, picture: bool
    ) -> TrainingResult:
        started = time.perf_counter()
        checkpoints = Checkpoints(self.output / CHECKPOINTS)
        state = self._start(checkpoints)
        step = int(state.step)
        recorder = Recorder(self.output, first_step=step, tensorboard=tensorboard, say=self.say)
        batches = prefetch(self.packer.batches(step), self.mesh.batch)
        stopped = self._is_over()
        clock = _Clock()
        compiler = ThreadPoolExecutor(1)
        try:
            if step < self.total and not stopped:
                evaluation_step = self._compile_evaluation(compiler, state)
            while step < self.total and not stopped:
                state, metrics = self.programs.train(state, self.frozen, next(batches))
                step += 1
                clock.add(metrics)
                if step % log_every == 0 or step == self.total:
                    self._log(recorder, step, metrics, clock)
                if step % self.config.evaluate_every == 0 or step == self.total:
                    clock.pause(metrics)
                    self._evaluate(recorder, step, state, evaluation_step)
                    stopped = self._is_over()
                    if stopped:
                        self.say(f"step {step}: no better for {self.config.patience} evaluations, stopping")
                    clock.resume()
                out_of_time = max_seconds is not None and time.perf_counter() - started > max_seconds
                if step % checkpoint_every == 0 or step == self.total or stopped or out_of_time:
                    clock.pause(metrics)
                    checkpoints.save(state, self.best)
                    clock.resume()
                if out_of_time:
                    break
        finally:
            compiler.shutdown(cancel_futures=True)
            batches.close()
            recorder.close()
            checkpoints.close()
        finished = stopped or step >= self.total
        head = self.output / HEAD if (self.output / HEAD).is_dir() else None
        speculators = None
        if finished and head is not None:
            speculators = export_speculators(
                head,
                self.output / SPECULATORS,
                self.draft,
                verifier=self.target.name,
                num_speculative_tokens=min(self.config.steps, 5),
            )
        if finished and picture:
            draw_course(self.output / METRICS, self.output / PICTURE)
        return TrainingResult(
            head=head,
            speculators=speculators,
            step=step,
            finished=finished,
            accepted_length=self.best["accepted_length"],
            best_step=self.best["step"],
            tokens_per_second=clock.tokens_per_second,
        )

    def _compile_evaluation(self, compiler: ThreadPoolExecutor, state: TrainState) -> EvaluationStep:
        """Compiles the program of evaluations beside that of training: later the device would idle for it, up to a minute."""
        # Described, not passed: the first step of training consumes the state.
        arguments = (state.parameters, self.frozen, self.mesh.batch(self.packer.assemble([])))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arguments)
        compiled = compiler.submit(lambda: self.programs.evaluate.lower(*shapes).compile())
        return lambda *args: compiled.result()(*args)

    def _start(self, checkpoints: Checkpoints) -> TrainState:
        if self.existing is not None:
            parameters, _ = split_head(self.existing.head)
            self.existing = None  # the state has copies: these would stay on the device all through the run
        else:
            parameters = initial_parameters(
                self.draft,
                self.target.model,
                self.vocabulary,
                seed=self.config.seed,
                from_embedding=self.config.init_from_embedding,
            )
        parameters = jax.device_put(parameters, self.mesh.tree(parameters))
        state = TrainState(
            parameters=parameters, optimizer=self.optimizer.init(parameters), step=jnp.zeros((), jnp.int32)
        )
        # Equal constants may share a buffer, and a step that consumes the state cannot take one twice.
        state = jax.device_put(jax.tree.map(jnp.copy, state), self.mesh.tree(state))
        if checkpoints.latest is None:
            return state
        state, self.best = checkpoints.restore(state)
        self.say(f"going on from step {int(state.step)} of {self.total}")
        return state

    def _is_over(self) -> bool:
        return self.config.patience is not None and self.best["worse"] >= self.config.patience

    def _log(self, recorder: Recorder, step: int, metrics: Metrics, clock: "_Clock") -> None:
        host = jax.device_get(metrics)
        clock.synchronised()
        if not math.isfinite(host.loss):
            raise FloatingPointError(
                f"the loss is {host.loss} at step {step} (gradient norm {host.gradient_norm}); a lower learning rate, a longer "
                "warm-up or a tighter clip would be right"
            )
        values = summarise(host) | {"tokens_per_second": clock.tokens_per_second}
        accuracy = " ".join(f"{100 * a:.0f}" for a in values["accuracy"])
        recorder.record(
            "train",
            step,
            values,
            f"step {step}/{self.total}: loss {values['loss']:.3f}, accuracy % {accuracy}, length "
            f"{values['simulated_length']:.2f}, {clock.tokens_per_second:,.0f} tokens/s",
        )

    def _evaluate(self, recorder: Recorder, step: int, state: TrainState, program: EvaluationStep) -> None:
        evaluation = evaluate(program, state.parameters, self.frozen, self.evaluated, self.config, self.mesh)
        better = evaluation.accepted_length > self.best["accepted_length"]
        if better:
            self.best = {"accepted_length": evaluation.accepted_length, "step": step, "worse": 0}
            export_head(
                self.output / HEAD, self.draft, self.target.config, jax.device_get(state.parameters), self.vocabulary
            )
        else:
            self.best["worse"] += 1
        chains = ", ".join(f"{depth}: {length:.3f}" for depth, length in evaluation.chains.items())
        recorder.record(
            "evaluation",
            step,
            {
                "accepted_length": evaluation.accepted_length,
                "chains": {str(depth): length for depth, length in evaluation.chains.items()},
                "rate_at_depth": list(evaluation.greedy.rate_at_depth),
                "sampled_length": evaluation.sampled.accepted_length if evaluation.sampled.rounds else None,
                "sampled_rate_at_depth": list(evaluation.sampled.rate_at_depth) if evaluation.sampled.rounds else None,
            },
            f"step {step}: accepted length of chains {chains}"
            + (f"; sampled answers {evaluation.sampled.accepted_length:.3f}" if evaluation.sampled.rounds else "")
            + ("" if better else f" (best {self.best['accepted_length']:.3f} at step {self.best['step']})"),
        )

    def _check_settings(self) -> None:
        """Writes the settings of a new run, or makes sure that those of the old one are the same."""
        path = self.output / SETTINGS
        settings = json.loads(
            json.dumps(self.config.as_json() | {"target": self.target.name, "data": self.fingerprint})
        )
        if not path.is_file():
            path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            return
        old = json.loads(path.read_text(encoding="utf-8"))
        if changed := [key for key in settings.keys() | old.keys() if settings.get(key) != old.get(key)]:
            key = sorted(changed)[0]
            raise RunError(
                f"{self.output} holds a run with another {key}: {old.get(key)}, not {settings.get(key)}; give the same settings "
                "and data to go on with it, or another folder"
            )

    def _vocabulary(self) -> np.ndarray:
        """Target ids of the draft vocabulary, chosen once a run."""
        size, whole = self.draft.draft_vocab_size, self.target.config.vocab_size
        if size == whole:
            return np.arange(whole, dtype=np.int32)
        counts = count_tokens(self.training, whole)
        if self.existing is None:
            ids, coverage = choose_vocabulary(counts, size)
        else:
            ids = np.asarray(split_head(self.existing.head)[1])
            coverage = float(counts[ids].sum() / counts.sum())
        path = self.output / VOCABULARY
        if path.is_file():
            if not np.array_equal(np.load(path), ids):
                raise RunError(f"{path} is not the vocabulary that the data give; the run was started with other data")
            return ids
        np.save(path, ids)
        held_out = count_tokens(self.evaluated, whole)
        self.say(
            f"draft vocabulary: {size} of {whole} tokens cover {100 * coverage:.2f} % of the answers' tokens, "
            f"{100 * held_out[ids].sum() / held_out.sum():.2f} % of those held out"
        )
        return ids

    def _check_format(self, existing: Draft) -> None:
        """Makes sure that the head can be written as it is, before it is trained.

        Raises:
          ValueError: EAGLE's format, as this library writes it, cannot say everything that the head's configuration says.
        """
        parameters, _ = split_head(existing.head)
        host = jax.device_get(parameters)
        with tempfile.TemporaryDirectory(dir=self.output) as folder:
            trial = export_head(
                Path(folder) / HEAD, self.draft, self.target.config, host, self.vocabulary, dtype="float32"
            )
            written = load_draft(trial, self.target, dtype="float32").config
        for field in dataclasses.fields(DraftConfig):
            was, reads = getattr(existing.config, field.name), getattr(written, field.name)
            if was != reads:
                raise ValueError(
                    f"the head {existing.name} cannot be trained further: its {field.name} is {was!r}, and would be read as "
                    f"{reads!r} from the format that heads are written in"
                )

    def _step_config(self) -> StepConfig:
        config, target = self.config, self.target.config
        dtype = np.dtype(self.target.model.dtype).name if config.compute_dtype == "auto" else config.compute_dtype
        implementation: PackedImplementation = "xla"
        if config.attention != "xla":
            refusal = cudnn_refusal(
                target.num_attention_heads,
                target.num_key_value_heads,
                target.head_dim,
                self.target.model.dtype,
                config.sequence_length,
            )
            if refusal is None:
                implementation = "cudnn"
            elif config.attention == "cudnn":
                raise ValueError(f"attention cudnn cannot be used: {refusal}")
            else:
                self.say(f"attention of the target: xla; cudnn cannot: {refusal}")
        return StepConfig(
            steps=config.steps,
            decay=config.decay,
            loss=config.loss,
            compute_dtype=dtype,
            attention=implementation,
            loss_chunk=config.loss_chunk,
            remat=config.remat,
            feature_noise=config.feature_noise,
        )


def evaluate(
    program: EvaluationStep,
    parameters: Any,
    frozen: Frozen,
    conversations: Sequence[Conversation],
    config: TrainingConfig,
    mesh: TrainingMesh,
) -> Evaluation:
    """Walks the rounds that chains would take over conversations of the target."""
    depth = config.evaluation_depth
    lengths = sorted({d for d in (1, 3, 5, 7) if d < depth} | {depth})
    nothing = SimulatedRounds(rounds=0, emitted=0, accepted_at_depth=(0,) * depth)
    sums = {"greedy": nothing, "sampled": nothing}
    chains = {
        (kind, d): SimulatedRounds(rounds=0, emitted=0, accepted_at_depth=(0,) * d) for kind in sums for d in lengths
    }
    packer = Packer(conversations, config.sequence_length, config.batch_rows, config.seed)
    rows = packer.epoch(0)
    pending: list[tuple[PackedBatch, list[list[int]], jax.Array]] = []
    for start in range(0, len(rows), config.batch_rows):
        documents = rows[start : start + config.batch_rows]
        batch = packer.assemble(documents)
        _, matches = program(parameters, frozen, mesh.batch(batch))
        pending.append((batch, documents, matches))
    for batch, documents, matches in pending:
        host = np.asarray(matches)
        for row, members in enumerate(documents):
            for first, end, segment in spans(batch.segments[row], batch.assistant[row]):
                if first == 0 or batch.segments[row, first - 1] != segment:
                    continue  # an answer without a prompt has no round of its own
                heat = conversations[members[segment - 1]].temperature
                kind = "sampled" if heat is not None and heat > 0 else "greedy"
                sums[kind] += walk(host[row], first, end, depth)
                for d in lengths:
                    chains[kind, d] += walk(host[row], first, end, d)
    judged = {
        d: (chains["greedy", d] if sums["greedy"].rounds else chains["sampled", d]).accepted_length for d in lengths
    }
    return Evaluation(greedy=sums["greedy"], sampled=sums["sampled"], chains=judged)


def summarise(metrics: Metrics) -> dict[str, Any]:
    """Rates out of sums; plain numbers and lists with one entry a step of training-time test."""
    supervised, drafts = np.maximum(metrics.supervised, 1), np.maximum(metrics.drafts, 1)
    return {
        "loss": float(metrics.loss),
        "gradient_norm": float(metrics.gradient_norm),
        "cross_entropy": (metrics.cross_entropy / supervised).tolist(),
        "accuracy": (metrics.right / drafts).tolist(),
        "acceptance": (metrics.acceptance / drafts).tolist(),
        "simulated_length": float(1 + (metrics.right_so_far / drafts[0]).sum()),
    }


class _Clock:
    """Tokens a second, of training alone: the first step, which compiles, and pauses do not count."""

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        self._tokens, self._seconds = 0.0, 0.0
        self._start: float | None = None
        self._pending: list[jax.Array] = []

    def add(self, metrics: Metrics) -> None:
        """One more step was launched."""
        if self._start is None:
            jax.block_until_ready(metrics.loss)
            self._start = time.perf_counter()
        else:
            self._pending.append(metrics.tokens)

    def synchronised(self) -> None:
        """All steps launched so far have been done."""
        now = time.perf_counter()
        self._tokens += float(sum(jax.device_get(self._pending)))
        if self._start is not None:
            self._seconds += now - self._start
        self._start, self._pending = now, []
        if self._seconds and self._tokens:
            self.tokens_per_second = self._tokens / self._seconds

    def pause(self, metrics: Metrics) -> None:
        """What follows is no training."""
        jax.block_until_ready(metrics.loss)
        self.synchronised()

    def resume(self) -> None:
        """Training goes on."""
        self._start = time.perf_counter()


def _load_existing(head: ExistingHead, target: Target) -> Draft:
    """The head to be trained further, with float32 arrays."""
    if target.mesh is not None:
        raise ValueError("target must not be on a mesh: data_parallel and model_parallel say how training is split")
    return load_draft(head.path, target, dtype="float32", method=head.method)


def _split(conversations: list[Conversation], config: TrainingConfig) -> tuple[list[Conversation], list[Conversation]]:
    """What is trained on, and what is evaluated on."""
    if config.held_out >= len(conversations):
        raise ValueError(
            f"held_out {config.held_out} leaves nothing to train on: there are {len(conversations)} conversations"
        )
    order = np.random.default_rng((config.seed, 1)).permutation(len(conversations))
    if not config.held_out:
        return conversations, [conversations[i] for i in sorted(order[:_EVALUATED_WITHOUT_HELD_OUT])]
    evaluated = set(order[: config.held_out].tolist())
    return (
        [c for i, c in enumerate(conversations) if i not in evaluated],
        [c for i, c in enumerate(conversations) if i in evaluated],
    )


def _fingerprint(conversations: Sequence[Conversation]) -> dict[str, int]:
    """Enough of the data to notice that a run is continued with others."""
    import zlib

    crc = 0
    for c in conversations:
        crc = zlib.crc32(c.assistant.tobytes(), zlib.crc32(c.tokens.tobytes(), crc))
    return {"conversations": len(conversations), "crc32": crc}


def _check_length(target: Target, config: TrainingConfig) -> None:
    limit = target.config.max_position_embeddings
    if config.sequence_length > limit:
        raise ValueError(f"sequence_length {config.sequence_length} exceeds the {limit} positions of the target")
    rope = target.config.rope
    if rope.rope_type == "dynamic" and config.sequence_length > rope.original_max_position_embeddings:
        raise ValueError(
            f"sequence_length {config.sequence_length} exceeds {rope.original_max_position_embeddings}, from where the target's "
            "dynamic rotary scaling depends on the length of each prompt"
        )
