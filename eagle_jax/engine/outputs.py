"""From tokens to outputs: text, stop strings, log-probabilities, and where everything is cut. It knows nothing of devices."""

import dataclasses

from eagle_jax.decoding.report import SlotReport, TokenLogProbs
from eagle_jax.engine.request import Request
from eagle_jax.metrics import AcceptanceMetrics
from eagle_jax.outputs import CompletionOutput, Delta, FinishReason, Logprob, PositionLogprobs, RequestOutput
from eagle_jax.text import StopSearch, StopStringFinder, StreamingDetokenizer, Tokenizer, tokens_until


class OutputProcessor:
    """The outputs of all requests that have not ended.

    Args:
      tokenizer: None if there is no text.
      max_depth: drafts that one round can accept at most.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_depth: int):
        self._tokenizer, self._depth = tokenizer, max_depth
        self._outputs: dict[str, _Output] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._outputs

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, request: Request) -> None:
        """Begins an output."""
        self._outputs[request.request_id] = _Output(request, self._tokenizer, self._depth)

    def process(self, request_id: str, report: SlotReport, *, finished: bool, stopped: bool) -> Delta | None:
        """Takes in what a dispatch added; returns what of it can be shown, if anything.

        An output ends when its slot did, or with the completion of a stop string. Its last delta has its `output`.

        Args:
          request_id: the request.
          report: what was added to its slot.
          finished: whether the slot has ended.
          stopped: whether it ended by a stop id.
        """
        delta = self._outputs[request_id].add(report, finished=finished, stopped=stopped)
        if delta is not None and delta.finished:
            del self._outputs[request_id]
        return delta

    def end(self, request_id: str, reason: FinishReason) -> Delta:
        """Ends an output where it is; text that was held back for a stop string is shown."""
        return self._outputs.pop(request_id).end(reason)

    def clear(self) -> None:
        """Forgets all outputs."""
        self._outputs.clear()


class _Output:
    """The output of one request as it grows."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, depth: int):
        params = request.params
        self._request, self._params = request, params
        self._token_ids: list[int] = []
        self._round_lengths: list[int] = []
        self._drafted: list[int] = []
        self._accepted_at_depth = [0] * depth
        self._received = 0
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
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
            if request.streaming or self._finder is not None:
                self._detokenizer = StreamingDetokenizer(self._tokenizer, params.skip_special_tokens)

    def add(self, report: SlotReport, *, finished: bool, stopped: bool) -> Delta | None:
        self._received += len(report.token_ids)
        self._round_lengths += report.round_lengths
        self._drafted += report.drafted
        self._accepted_at_depth = report.accepted_at_depth
        if self._logprobs is not None and report.log_probs is not None:
            self._logprobs += map(self._position, report.token_ids, report.log_probs)
        end = self._take(report.token_ids, finished, stopped)
        delta = self._delta(end, None if self._finish_reason is None else self._output())
        return delta if delta.text or delta.token_ids or delta.finished else None

    def end(self, reason: FinishReason) -> Delta:
        if self._detokenizer is not None:
            self._text += self._detokenizer.finish()
        elif self._tokenizer is not None:
            self._text = self._tokenizer.decode(self._token_ids, self._params.skip_special_tokens)
        self._finish_reason = reason
        return self._delta(len(self._text), self._output())

    def _delta(self, end: int, output: RequestOutput | None) -> Delta:
        """What is new; text is shown up to `end`."""
        ids_end = len(self._token_ids) if self._finder is None or output is not None else self._settled_ids
        delta = Delta(
            index=self._request.index,
            request_id=self._request.request_id,
            text=self._text[self._shown_text : end],
            token_ids=self._token_ids[self._shown_ids : ids_end],
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            metrics=None if output is None else output.metrics,
            seed=None if output is None else output.outputs[0].seed,
            logprobs=None if self._logprobs is None else self._logprobs[self._shown_ids : ids_end],
            output=output,
        )
        self._shown_text, self._shown_ids = max(self._shown_text, end), ids_end
        return delta

    def _output(self) -> RequestOutput:
        """The result, once the output has ended."""
        lengths, at_depth = self._round_lengths, self._accepted_at_depth
        if len(self._token_ids) < self._received:
            lengths, at_depth = cut_rounds(lengths, at_depth, len(self._token_ids))
        drafted = self._drafted[: len(lengths)]
        completion = CompletionOutput(
            index=0,
            text=None if self._tokenizer is None else self._text,
            token_ids=self._token_ids,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            seed=None if self._params.greedy else self._params.seed,
            logprobs=None if self._logprobs is None else self._logprobs[: len(self._token_ids)],
        )
        return RequestOutput(
            request_id=self._request.request_id,
            prompt=self._request.prompt,
            prompt_token_ids=list(self._request.prompt_token_ids),
            outputs=[completion],
            metrics=AcceptanceMetrics(
                accepted_lengths=lengths,
                accepted_at_depth=at_depth,
                drafted=sum(drafted),
                plain_rounds=drafted.count(0),
            ),
        )

    def _take(self, new: list[int], finished: bool, stopped: bool) -> int:
        """Adds tokens and their text; returns how much of the text can be shown."""
        hidden = 1 if stopped and not self._params.include_stop_str_in_output else 0
        visible = new[: len(new) - hidden]
        if self._finder is not None and (search := self._search(visible, last=finished)) is not None:
            if search.match is not None:
                return self._stop_at(search)
            end = search.safe_end
        else:
            self._token_ids += visible
            if self._detokenizer is not None:
                self._text += self._detokenizer.push(visible)
                self._text += self._detokenizer.finish() if finished else ""
            elif finished and self._tokenizer is not None:
                self._text = self._tokenizer.decode(self._token_ids, self._params.skip_special_tokens)
            end = len(self._text)
        self._token_ids += new[len(new) - hidden :]
        if finished:
            self._finish_reason = "stop" if stopped else "length"
            eos = () if self._params.ignore_eos else self._request.eos_token_ids
            self._stop_reason = self._token_ids[-1] if stopped and self._token_ids[-1] not in eos else None
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
        for rank, (id_, value) in enumerate(at.top[: self._params.logprobs], start=1):
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
