"""Training data that the target writes itself: answers to given prompts, and to user turns that it invents."""

import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.engine.config import EngineConfig
from eagle_jax.entrypoints.decoder import Decoder
from eagle_jax.entrypoints.prompts import Prompt
from eagle_jax.loading import Target
from eagle_jax.sampling import SamplingMode, SamplingParams
from eagle_jax.text.tokenizer import Tokenizer
from eagle_jax.training.conversations import SHARD_PATTERN, Conversation, DataError, read_shard, write_shard
from eagle_jax.training.overlap import EvaluationSets
from eagle_jax.training.prompts import UserTurn, filter_turns, read_prompts, tokenize_turns, user_header
from eagle_jax.training.records import say_on_stderr

SETTINGS, INVENTED = "synthesis.json", "invented.jsonl"
DEFAULT_TEMPERATURES = ((0.0, 0.5), (0.6, 0.15), (0.8, 0.2), (1.0, 0.15))
"""Half of the answers greedy, the others as people sample."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynthesisConfig:
    """What decides the data."""

    temperatures: tuple[tuple[float, float], ...] = DEFAULT_TEMPERATURES
    """Temperatures of answers, 0 being greedy, and the share of each."""
    invent: int = 0
    """User turns that the target invents, before filters."""
    invented_temperature: float = 1.0
    max_invented_tokens: int = 128
    max_prompt_tokens: int = 384
    """Longer prompts, in the chat template, are left out."""
    max_new_tokens: int = 512
    """Longer answers are cut."""
    min_prompt_words: int = 2
    min_answer_tokens: int = 8
    """Shorter answers are left out: they hold next to nothing to draft."""
    limit: int | None = None
    """Take only so many prompts, of the part, at random."""
    seed: int = 0
    part: tuple[int, int] = (0, 1)
    """Take part i of n alone, into a folder of its own: n calls, on n devices, share the work."""

    def __post_init__(self) -> None:
        if not self.temperatures or any(not (t >= 0 and share > 0) for t, share in self.temperatures):
            raise ValueError(f"temperatures must be pairs of at least 0 and a share above 0, not {self.temperatures}")
        for name in ("max_invented_tokens", "max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.invent < 0 or not self.invented_temperature > 0:
            raise ValueError("invent must be at least 0 and invented_temperature greater than 0")
        index, count = self.part
        if not 0 <= index < count:
            raise ValueError(f"part must be (i, n) with 0 <= i < n, not {self.part}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynthesisResult:
    """What a call wrote, and what the folder holds."""

    conversations: int
    """In the folder."""
    tokens: int
    """Prompts included, in the folder."""
    answer_tokens: int
    """In the folder."""
    remaining: int
    """Prompts that are not answered yet; the same call goes on with them."""
    seconds: float
    """Of this call, without loading."""
    tokens_per_second: float
    """Tokens written by this call, prompts included, a second of decoding and prefill."""
    new_tokens_per_second: float
    """The same without prompts."""


def synthesize(
    target: Target,
    output: str | Path,
    config: SynthesisConfig,
    *,
    prompts: Sequence[str | Path] = (),
    evaluation: Sequence[str | Path] = (),
    drop_overlapping: bool = False,
    slots: int = 64,
    shard_size: int = 4096,
    max_seconds: float | None = None,
    say: Callable[[str], None] = say_on_stderr,
) -> SynthesisResult:
    """Lets the target answer prompts, and writes the conversations to shards in a folder; or goes on where it was interrupted.

    Every conversation depends on its prompt, its temperature and its seed, which follow from the settings and its place in the
    list; what an interrupted call had begun is begun again. So, without a limit, the parts of `config.part` together hold what
    one call for all of them would have written, but for invented turns that are the same as one of another part.

    Args:
      target: what `load_target` returned, with a tokenizer and a chat template.
      output: folder of shards.
      config: what decides the data; a folder is continued only with the one that it was started with.
      prompts: files with a `prompt` in each line; without any, `config.invent` makes all of them.
      evaluation: files of evaluation prompts, which must not be trained on.
      drop_overlapping: leave prompts that overlap with them out, instead of refusing them. Invented turns are always left out.
      slots: conversations decoded side by side.
      shard_size: conversations of a file.
      max_seconds: stop after so much time; answers that have not ended are dropped and come again.
      say: takes lines for people.

    Raises:
      DataError: prompts that cannot be read or overlap with an evaluation set, a folder with other settings, or no prompts.
    """
    started = time.perf_counter()
    tokenizer = target.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise DataError(f"{target.name} has no chat template, so there is no telling where an answer begins")
    if not prompts and not config.invent:
        raise DataError("there are no prompts: give files of them, or say how many to invent")
    length = config.max_prompt_tokens + config.max_new_tokens
    if length > target.config.max_position_embeddings:
        raise ValueError(
            f"max_prompt_tokens {config.max_prompt_tokens} and max_new_tokens {config.max_new_tokens} exceed the "
            f"{target.config.max_position_embeddings} positions of the target"
        )
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    sets = EvaluationSets(evaluation)
    seen: set[str] = set()
    given, dropped = filter_turns(
        read_prompts(prompts), sets, drop_overlapping=drop_overlapping, min_words=config.min_prompt_words, seen=seen
    )
    _check_settings(folder, target, config, given)
    room = max(config.max_prompt_tokens, len(user_header(tokenizer))) + max(
        config.max_new_tokens, config.max_invented_tokens
    )
    engine_config = EngineConfig.resolve(target, None, max_model_len=room, max_num_seqs=slots)
    decoder = Decoder(dataclasses.replace(target, tokenizer=None), None, engine_config)
    answerer = _Answerer(decoder)
    index, count = config.part
    places = {turn: place for place, turn in enumerate(given) if place % count == index}
    if config.invent:
        invented = _invent(answerer, tokenizer, folder, config, say)
        kept, more = filter_turns(
            list(invented), sets, drop_overlapping=True, min_words=config.min_prompt_words, seen=seen
        )
        places |= {turn: len(given) + invented[turn] for turn in kept}
        say(f"{len(kept)} of {len(invented)} invented turns kept; left out: {more}")
    tokenized = tokenize_turns(tokenizer, list(places), max_tokens=config.max_prompt_tokens, dropped=dropped)
    rows = {places[turn]: ids for turn, ids in tokenized}
    say(f"{len(rows)} prompts; left out: {dropped}")
    rng = np.random.default_rng((config.seed, 3))
    order = [place for place in rng.permutation(len(given) + config.invent).tolist() if place in rows][: config.limit]
    shares = np.array([share for _, share in config.temperatures])
    drawn = rng.choice(len(shares), size=len(given) + config.invent, p=shares / shares.sum())
    writer = _Writer(folder, shard_size)
    jobs = [
        Job(
            index=i,
            prompt=rows[i],
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperatures[drawn[i]][0],
            seed=_seed(config.seed, i),
        )
        for i in order
        if i not in writer.done
    ]
    if writer.done:
        say(f"going on: {len(writer.done)} prompts were answered before")
    prompt_tokens, new_tokens, reported = 0, 0, time.perf_counter()
    begun = time.perf_counter()
    answered = 0
    for answers in answerer.run(jobs):
        for job, token_ids in answers:
            answered += 1
            new_tokens += len(token_ids)
            prompt_tokens += len(job.prompt)
            writer.add(job, token_ids, config.min_answer_tokens)
        now = time.perf_counter()
        if now - reported > 5:
            reported = now
            say(
                f"{answered} of {len(jobs)} answers, {writer.tokens:,} tokens, {new_tokens / (now - begun):,.0f} new tokens/s, "
                f"{(new_tokens + prompt_tokens) / (now - begun):,.0f} with prompts"
            )
        if max_seconds is not None and now - started > max_seconds:
            break
    writer.flush()
    seconds = time.perf_counter() - begun
    return SynthesisResult(
        conversations=writer.conversations,
        tokens=writer.tokens,
        answer_tokens=writer.answer_tokens,
        remaining=len(jobs) - answered,
        seconds=time.perf_counter() - started,
        tokens_per_second=(new_tokens + prompt_tokens) / seconds,
        new_tokens_per_second=new_tokens / seconds,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One prompt to be answered."""

    index: int
    """Its place among all prompts."""
    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    seed: int


class _Answerer:
    """Answers jobs with one engine."""

    def __init__(self, decoder: Decoder):
        self._decoder = decoder
        self._engine = decoder.make_engine(decoder.config, SamplingMode.SAMPLING)

    def run(self, jobs: Sequence[Job]) -> Iterator[list[tuple[Job, list[int]]]]:
        """Answers with their jobs, as they end."""
        self._engine.reset()
        for place, job in enumerate(jobs):
            params = SamplingParams(
                temperature=job.temperature, max_tokens=job.max_new_tokens, seed=job.seed, detokenize=False
            )
            prompt = Prompt(text=None, token_ids=list(job.prompt))
            self._engine.add_request(
                self._decoder.request(prompt, params, index=place, least_mode=SamplingMode.SAMPLING)
            )
        while self._engine.has_unfinished_requests:
            outputs = [(jobs[delta.index], delta.output) for delta in self._engine.step() if delta.finished]
            if answers := [(job, output.outputs[0].token_ids) for job, output in outputs if output is not None]:
                yield answers


class _Writer:
    """Conversations into shards; knows what the folder holds."""

    def __init__(self, folder: Path, size: int):
        self._folder, self._size = folder, size
        self._kept: list[Conversation] = []
        self._indices: list[int] = []
        self._left_out: list[int] = []
        self.done: set[int] = set()
        self.conversations = self.tokens = self.answer_tokens = 0
        files = sorted(folder.glob(SHARD_PATTERN))
        self._next = 1 + max((int(file.stem.partition("-")[2]) for file in files), default=-1)
        for file in files:
            arrays = read_shard(file)
            self.done |= set(arrays["index"].tolist()) | set(arrays["left_out"].tolist())
            self.conversations += len(arrays["lengths"])
            self.tokens += len(arrays["tokens"])
            self.answer_tokens += int(np.unpackbits(arrays["assistant"], count=len(arrays["tokens"])).sum())

    def add(self, job: Job, answer: Sequence[int], min_answer: int) -> None:
        """Takes one answered prompt."""
        if len(answer) < min_answer:
            self._left_out.append(job.index)
            return
        tokens = np.array([*job.prompt, *answer], np.int32)
        assistant = np.arange(len(tokens)) >= len(job.prompt)
        self._kept.append(Conversation(tokens, assistant, "", job.temperature))
        self._indices.append(job.index)
        self.conversations += 1
        self.tokens += len(tokens)
        self.answer_tokens += len(answer)
        if len(self._kept) >= self._size:
            self.flush()

    def flush(self) -> None:
        """Writes what has been taken."""
        if not self._kept:
            return  # answers that were left out are few, and are made again
        write_shard(
            self._folder / f"shard-{self._next:05d}.npz",
            self._kept,
            index=np.array(self._indices, np.int64),
            left_out=np.array(self._left_out, np.int64),
        )
        self._next += 1
        self._kept, self._indices, self._left_out = [], [], []


def _invent(
    answerer: "_Answerer", tokenizer: Tokenizer, folder: Path, config: SynthesisConfig, say: Callable[[str], None]
) -> dict[UserTurn, int]:
    """User turns of the part by the target, made once a folder, and their numbers among those of all parts."""
    path = folder / INVENTED
    part = range(config.part[0], config.invent, config.part[1])
    if not path.is_file():
        header = user_header(tokenizer)
        jobs = [
            Job(
                index=i,
                prompt=header,
                max_new_tokens=config.max_invented_tokens,
                temperature=config.invented_temperature,
                seed=_seed(config.seed + 1, i),
            )
            for i in part
        ]
        texts: dict[int, str] = {}
        start = time.perf_counter()
        for answers in answerer.run(jobs):
            for job, token_ids in answers:
                # A turn that did not end within the limit is cut in the middle: no prompt.
                ended = len(token_ids) < config.max_invented_tokens
                texts[job.index] = tokenizer.decode(token_ids).strip() if ended else ""
        say(f"{len(texts)} user turns invented in {time.perf_counter() - start:.1f} s")
        lines = [json.dumps({"source": "invented", "prompt": texts[i], "number": i}) + "\n" for i in part if texts[i]]
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(lines), encoding="utf-8")
        partial.replace(path)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {UserTurn(row["prompt"], f"{INVENTED} line {line}"): row["number"] for line, row in enumerate(rows, start=1)}


def _seed(seed: int, index: int) -> int:
    """A seed of its own for each conversation."""
    return int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _check_settings(folder: Path, target: Target, config: SynthesisConfig, turns: Sequence[UserTurn]) -> None:
    crc = 0
    for turn in turns:
        crc = zlib.crc32(turn.text.encode(), crc)
    settings: dict[str, Any] = json.loads(
        json.dumps(dataclasses.asdict(config) | {"target": target.name, "prompts": len(turns), "prompts_crc32": crc})
    )
    path = folder / SETTINGS
    if not path.is_file():
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return
    old = json.loads(path.read_text(encoding="utf-8"))
    if changed := sorted(key for key in settings.keys() | old.keys() if settings.get(key) != old.get(key)):
        raise DataError(
            f"{folder} was begun with another {changed[0]}: {old.get(changed[0])}, not {settings.get(changed[0])}; give the same "
            "settings and prompts to go on with it, or another folder"
        )
