"""One output as it grows: text, stop strings, and where everything is cut."""

import dataclasses
from collections.abc import Sequence

from eagle_jax.decoding.engine import Completion, TokenLogProbs, Update
from eagle_jax.front.prompts import Prompt
from eagle_jax.metrics import AcceptanceMetrics
from eagle_jax.outputs import Delta, FinishReason, Logprob, PositionLogprobs
from eagle_jax.sampling import SamplingParams
from eagle_jax.text import StopSearch, StopStringFinder, StreamingDetokenizer, Tokenizer, tokens_until


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowResult:
    """An output that has ended."""

    prompt: Prompt
    token_ids: list[int]
    text: str | None
    """None if there is no text."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    """See `CompletionOutput.stop_reason`."""
    metrics: AcceptanceMetrics
    seed: int | None
    """See `CompletionOutput.seed`."""
    logprobs: list[PositionLogprobs] | None
    """See `CompletionOutput.logprobs`."""


class OutputRow:
    """The output of one prompt.

    Args:
      index: place of the prompt in the call.
      prompt: the prompt.
      params: how it is continued, its seed given where tokens are drawn.
      tokenizer: None if there is no text.
      eos_ids: end-of-sequence ids of the model.
      streaming: whether text is wanted before the output has ended.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        eos_ids: Sequence[int],
        streaming: bool,
    ):
        self.index, self._prompt, self._params = index, prompt, params
        self._token_ids: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._metrics: AcceptanceMetrics | None = None  # comes last: with it the output has ended
        self._eos_ids = frozenset(() if params.ignore_eos else eos_ids)
        self._tokenizer = tokenizer if params.detokenize else None
        self._text = ""
        self._shown_text = self._shown_ids = self._settled_ids = 0
        self._logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self._unsearched = 0  # characters of the first `min_tokens` tokens, where no stop string counts
        self._detokenizer: StreamingDetokenizer | None = None
        self._finder: StopStringFinder | None = None
        if self._tokenizer is not None:
            if params.stop_strings:
                self._finder = StopStringFinder(params.stop_strings)
            if streaming or self._finder is not None:
                self._detokenizer = StreamingDetokenizer(self._tokenizer, params.skip_special_tokens)

    @property
    def result(self) -> RowResult:
        """The output, once it has ended."""
        if self._finish_reason is None or self._metrics is None:
            raise RuntimeError(f"output {self.index} has not ended")
        return RowResult(
            prompt=self._prompt,
            token_ids=self._token_ids,
            text=None if self._tokenizer is None else self._text,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            metrics=self._metrics,
            seed=self._seed,
            logprobs=None if self._logprobs is None else self._logprobs[: len(self._token_ids)],
        )

    @property
    def _seed(self) -> int | None:
        return None if self._params.greedy else self._params.seed

    @property
    def must_abort(self) -> bool:
        """A stop string was found, so no more tokens are wanted, but the engine has not ended the request yet."""
        return self._finish_reason is not None and self._metrics is None

    def add(self, update: Update) -> Delta | None:
        """Takes in what a dispatch added; returns what of it can be shown, if anything."""
        completion = update.completion
        if not self.must_abort:
            if self._logprobs is not None and update.log_probs is not None:
                chosen = zip(update.token_ids, update.log_probs, strict=True)
                self._logprobs += [self._position(id_, at) for id_, at in chosen]
            end = self._take(update.token_ids, completion)
        elif completion is None:
            return None
        else:  # what came after the stop string is dropped
            end = len(self._text)
        if completion is not None:
            self._finish(completion)
        ids_end = len(self._token_ids) if self._finder is None or self._finish_reason else self._settled_ids
        delta = Delta(
            index=self.index,
            text=self._text[self._shown_text : end],
            token_ids=self._token_ids[self._shown_ids : ids_end],
            finish_reason=self._finish_reason if self._metrics is not None else None,
            stop_reason=self._stop_reason if self._metrics is not None else None,
            metrics=self._metrics,
            seed=self._seed if self._metrics is not None else None,
            logprobs=None if self._logprobs is None else self._logprobs[self._shown_ids : ids_end],
        )
        self._shown_text, self._shown_ids = max(self._shown_text, end), ids_end
        return delta if delta.text or delta.token_ids or delta.finish_reason else None

    def finish_empty(self, depth: int) -> Delta:
        """Ends the output of a request that wants no token; `depth` is what a tree can accept."""
        self._finish_reason = "length"
        self._metrics = AcceptanceMetrics(accepted_lengths=[], accepted_at_depth=[0] * depth, drafted=0)
        return Delta(index=self.index, text="", token_ids=[], finish_reason="length", metrics=self._metrics)

    def _take(self, new: list[int], completion: Completion | None) -> int:
        """Adds tokens and their text; returns how much of the text can be shown."""
        stopped = completion is not None and completion.stopped
        hidden = 1 if stopped and not self._params.include_stop_str_in_output else 0
        visible = new[: len(new) - hidden]
        if self._finder is not None and (search := self._search(visible, last=completion is not None)) is not None:
            if search.match is not None:
                return self._stop_at(search)
            end = search.safe_end
        else:
            self._token_ids += visible
            if self._detokenizer is not None:
                self._text += self._detokenizer.push(visible)
                self._text += self._detokenizer.finish() if completion is not None else ""
            elif completion is not None and self._tokenizer is not None:
                self._text = self._tokenizer.decode(self._token_ids, self._params.skip_special_tokens)
            end = len(self._text)
        self._token_ids += new[len(new) - hidden :]
        if completion is not None:
            self._finish_reason = "stop" if stopped else "length"
            self._stop_reason = self._token_ids[-1] if stopped and self._token_ids[-1] not in self._eos_ids else None
        return end

    def _search(self, visible: list[int], last: bool) -> StopSearch:
        """Adds tokens one by one up to the completion of a stop string."""
        assert self._finder is not None
        assert self._detokenizer is not None
        search = self._found(self._finder.push(""))
        for id_ in visible:
            delta = self._detokenizer.push([id_])
            self._token_ids.append(id_)
            self._text += delta
            if len(self._token_ids) <= self._params.min_tokens:
                self._unsearched += len(delta)
                search = self._found(self._finder.push(""))
            else:
                search = self._found(self._finder.push(delta))
            if search.match is not None:
                return search
            if delta:
                # Text held back until now is out, so no later stop string can end before this token.
                self._settled_ids = len(self._token_ids)
        if last:
            rest = self._detokenizer.finish()
            self._text += rest
            search = self._found(self._finder.push(rest))
            if search.match is None:
                search = self._found(self._finder.finish())
        return search

    def _found(self, search: StopSearch) -> StopSearch:
        """What the finder says, counted from the start of the text."""
        skipped, match = self._unsearched, search.match
        if match is not None:
            match = dataclasses.replace(match, start=match.start + skipped, end=match.end + skipped)
        return StopSearch(safe_end=search.safe_end + skipped, match=match)

    def _position(self, chosen: int, at: TokenLogProbs) -> PositionLogprobs:
        found = {chosen: self._logprob(chosen, at.chosen, at.rank)}
        for rank, (id_, value) in enumerate(at.top, start=1):
            found.setdefault(id_, self._logprob(id_, value, rank))
        return found

    def _logprob(self, id_: int, value: float, rank: int) -> Logprob:
        text = None if self._tokenizer is None else self._tokenizer.decode([id_], skip_special_tokens=False)
        return Logprob(logprob=value, rank=rank, decoded_token=text)

    def _stop_at(self, search: StopSearch) -> int:
        """Cuts text and tokens at a stop string: the tokens end with the one that completes it."""
        match = search.match
        assert match is not None
        assert self._tokenizer is not None
        kept = tokens_until(self._tokenizer, self._token_ids, match.end, self._params.skip_special_tokens)
        del self._token_ids[kept:]
        self._text = self._text[: match.end if self._params.include_stop_str_in_output else match.start]
        self._finish_reason, self._stop_reason = "stop", match.stop
        return len(self._text)

    def _finish(self, completion: Completion) -> None:
        lengths, at_depth = completion.accepted_lengths, completion.accepted_at_depth
        if len(self._token_ids) < len(completion.token_ids):
            lengths, at_depth = cut_rounds(lengths, at_depth, len(self._token_ids))
        self._metrics = AcceptanceMetrics(
            accepted_lengths=lengths,
            accepted_at_depth=at_depth,
            drafted=sum(completion.drafted[: len(lengths)]),
            plain_rounds=completion.drafted[: len(lengths)].count(0),
        )


def cut_rounds(lengths: list[int], at_depth: list[int], tokens: int) -> tuple[list[int], list[int]]:
    """Statistics of an output that is cut to its first tokens.

    Args:
      lengths: accepted length of each round.
      at_depth: rounds that accepted a draft at each depth, before cutting.
      tokens: tokens kept, at least 1; the first belongs to no round.

    Returns:
      Both for the rounds that emitted the kept tokens: the last length is cut, the acceptance at each depth is not.
    """
    kept: list[int] = []
    room = tokens - 1
    for length in lengths:
        if room <= 0:
            break
        kept.append(min(length, room))
        room -= length
    if len(kept) < len(lengths):
        # The last round alone can have been cut by the engine, and it is not among these: lengths tell all about them.
        at_depth = [sum(length > d + 1 for length in lengths[: len(kept)]) for d in range(len(at_depth))]
    return kept, at_depth
