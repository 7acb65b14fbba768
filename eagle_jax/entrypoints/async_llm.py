"""`AsyncLLM`: requests that arrive and are aborted while others run, behind the interface that vLLM users know."""

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import Any

from eagle_jax.decoding.adaptive import AdaptiveSpeculation
from eagle_jax.engine.core import EngineCore
from eagle_jax.engine.request import Request
from eagle_jax.entrypoints.llm import LLM
from eagle_jax.loading import Draft, Target
from eagle_jax.metrics import AcceptanceMetrics, Counter, Vector
from eagle_jax.outputs import CompletionOutput, Delta, PositionLogprobs, RequestOutput
from eagle_jax.sampling import SamplingMode, SamplingParams
from eagle_jax.text import Tokenizer

SECONDS_PER_DISPATCH = 0.03
"""Time between two looks at the tokens, so also until an aborted request leaves its slot and a new one can have it."""
MAX_STOP_IDS = 64
"""Stop ids that a request can have, the model's end-of-sequence ids among them."""

_log = logging.getLogger(__name__)


class AsyncLLM:
    """A model that continues prompts as they come, with speculative decoding if a draft head is given.

    One thread runs the engine: `max_num_seqs` sequences of up to `max_model_len` tokens, whose caches are taken at once. It
    sleeps while there is nothing to do. Requests of all kinds run side by side; rounds are of the least `SamplingMode` that
    covers those that run at the moment. Programs of a mode are compiled when it is first needed, or by `warmup`.

    Args:
      model: as in `LLM`.
      **keywords: those of `LLM`.

    Raises:
      ValueError, TypeError: as `LLM`.
      InsufficientMemoryError: the caches do not fit.
    """

    def __init__(self, model: str | Path | Target, **keywords: Any):
        self._llm = LLM(model, **keywords)
        decoder = self._llm.decoder
        config = decoder.config.for_call(
            prompts=decoder.config.max_num_seqs, tokens=decoder.config.max_model_len, stop_ids=MAX_STOP_IDS, groups=1
        )
        self._engine = decoder.make_engine(config, SamplingMode.FULL)
        if isinstance(
            config.tree, AdaptiveSpeculation
        ):  # what rounds cost is measured with caches of its own: before there are others
            decoder.prepare(self._engine, list(SamplingMode))
        self._worker = _Worker(self._engine, self._llm.count)
        self._finalizer = weakref.finalize(self, self._worker.stop)

    @property
    def target(self) -> Target:
        """The loaded target."""
        return self._llm.target

    @property
    def draft(self) -> Draft | None:
        """The loaded draft head, if there is one."""
        return self._llm.draft

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._llm.max_model_len

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return self._engine.num_requests

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if there is one."""
        return self._llm.get_tokenizer()

    def get_metrics(self) -> list[Counter | Vector]:
        """Counters over all requests that have ended; see `LLM.get_metrics`."""
        return self._llm.get_metrics()

    async def warmup(self, *sampling_params: SamplingParams) -> float:
        """Compiles ahead what requests with such parameters need, greedy ones if none are given.

        Returns:
          Seconds it took.

        Raises:
          RuntimeError: after `shutdown`.
        """
        decoder = self._llm.decoder
        modes = sorted({decoder.mode_of(params) for params in sampling_params or (SamplingParams(),)})
        return await asyncio.wrap_future(self._worker.call(lambda engine: decoder.prepare(engine, modes)))

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a prompt, and yields the output as it grows; the last one is `finished`.

        What arrives while the consumer is busy comes as one output. Leaving the loop, closing the generator or cancelling the
        task aborts the request.

        Args:
          prompt: one prompt, in any form that `LLM.generate` takes.
          sampling_params: how it is continued.
          request_id: names the request for `abort`; no other that runs has it.

        Raises:
          ValueError: as `LLM.generate`; an id that is in use.
          TypeError: something that is no prompt, no parameters or no id.
          FloatingPointError: the target's logits have no finite value somewhere.
          RuntimeError: the engine was shut down, or failed.
        """
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id must be a text that is not empty, got {request_id!r}")
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {sampling_params!r}")
        read = self._llm.decoder.read(prompt)
        if len(read) != 1:
            raise ValueError(f"prompt must be one prompt, got {len(read)}; call generate once for each")
        request = self._llm.decoder.request(
            read[0],
            sampling_params,
            streaming=True,
            seconds_per_dispatch=SECONDS_PER_DISPATCH,
        )
        stream = _Stream(asyncio.get_running_loop(), request_id, request)
        self._worker.add(stream)
        try:
            while not stream.finished:
                yield await stream.next()
        finally:
            self._worker.drop(stream)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends one request or several: each one's last output has what there is, and the finish reason "abort".

        An id that is unknown, or whose request has ended, is no error.
        """
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._worker.abort(one)

    def shutdown(self) -> None:
        """Stops the engine's thread and frees the caches; requests that run fail with RuntimeError. It may be called twice."""
        self._finalizer()


class _Stream:
    """What one consumer gets: everything about it happens in the consumer's event loop, but `loop` may be asked anywhere."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        request_id: str,
        request: Request,
    ):
        self.loop, self.request_id, self.request = loop, request_id, request
        self.finished = False
        self._text, self._token_ids = "", list[int]()
        self._logprobs: list[PositionLogprobs] | None = None if request.params.logprobs is None else []
        self._last: RequestOutput | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """Takes in what is new."""
        self._text += delta.text
        self._token_ids += delta.token_ids
        if self._logprobs is not None and delta.logprobs is not None:
            self._logprobs += delta.logprobs
        self._last, self._error = delta.output, delta.error
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Lets the consumer fail, unless its output has ended."""
        if self._last is None:
            self._error = error
        self._news.set()

    async def next(self) -> RequestOutput:
        """Waits for something new; returns all that there is."""
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            self.finished = True
            raise self._error
        if self._last is not None:
            self.finished = True
            return dataclasses.replace(self._last, request_id=self.request_id)
        completion = CompletionOutput(
            index=0,
            text=self._text,
            token_ids=list(self._token_ids),
            finish_reason=None,
            stop_reason=None,
            seed=None if self.request.params.greedy else self.request.params.seed,
            logprobs=None if self._logprobs is None else list(self._logprobs),
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=[completion],
            metrics=AcceptanceMetrics(accepted_lengths=[], accepted_at_depth=[], drafted=0),
            finished=False,
        )


class _Worker:
    """The engine's thread. It does not hold the `AsyncLLM`, so that one that is forgotten shuts down."""

    def __init__(self, engine: EngineCore, count: Callable[[RequestOutput], None]):
        self._engine, self._count = engine, count
        self._condition = threading.Condition()
        self._streams: dict[str, _Stream] = {}  # by the caller's id, which is free again as soon as nobody reads
        self._readers: dict[str, _Stream] = {}  # the same by the id in the engine
        self._calls: collections.deque[tuple[Callable[[EngineCore], Any], concurrent.futures.Future[Any]]] = (
            collections.deque()
        )
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="eagle_jax engine", daemon=True)
        self._thread.start()

    def add(self, stream: _Stream) -> None:
        """Adds the request of a stream."""
        with self._condition:
            self._check()
            if stream.request_id in self._streams:
                raise ValueError(f"request_id {stream.request_id!r} is in use by a request that has not ended")
            self._engine.add_request(stream.request)
            self._streams[stream.request_id] = self._readers[stream.request.request_id] = stream
            self._condition.notify()

    def abort(self, request_id: str) -> None:
        """Ends a request; its consumer is told."""
        with self._condition:
            if (stream := self._streams.get(request_id)) is not None:
                self._engine.abort(stream.request.request_id)
                self._condition.notify()

    def drop(self, stream: _Stream) -> None:
        """Nobody reads a stream any more: its request is aborted unless it has ended."""
        with self._condition:
            if self._forget(stream.request.request_id) is not None:
                self._engine.abort(stream.request.request_id)
                self._condition.notify()

    def _forget(self, engine_id: str) -> _Stream | None:
        stream = self._readers.pop(engine_id, None)
        if stream is not None:
            del self._streams[stream.request_id]
        return stream

    def call(self, function: Callable[[EngineCore], Any]) -> concurrent.futures.Future[Any]:
        """Runs a function in the thread, between two steps."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._condition:
            self._check()
            self._calls.append((function, future))
            self._condition.notify()
        return future

    def stop(self) -> None:
        """Ends the thread and shuts the engine down."""
        with self._condition:
            self._stopped = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check(self) -> None:
        if self._stopped:
            raise RuntimeError("this AsyncLLM was shut down")

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._stopped or self._calls or self._engine.has_unfinished_requests)
                if self._stopped:
                    break
                calls, self._calls = self._calls, collections.deque()
            for function, future in calls:
                _complete(future, functools.partial(function, self._engine))
            if not self._engine.has_unfinished_requests:
                continue
            try:
                self._give_out(self._engine.step())
            except Exception as error:
                _log.exception("the engine failed; its requests end with this error")
                self._engine.reset()
                self._fail_all(error)
        self._engine.shutdown()
        self._fail_all(RuntimeError("this AsyncLLM was shut down"))
        for _, future in self._calls:
            future.cancel()

    def _give_out(self, deltas: list[Delta]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Delta]]] = {}
        for delta in deltas:
            if delta.output is not None and delta.error is None:
                self._count(delta.output)
            with self._condition:
                find = self._forget if delta.finished else self._readers.get
                stream = find(delta.request_id)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append((stream, delta))
        for loop, news in by_loop.items():
            self._in_loop(loop, functools.partial(_put, news), news)

    def _fail_all(self, error: Exception) -> None:
        with self._condition:
            streams = list(self._readers.values())
            self._readers, self._streams = {}, {}
        for stream in streams:
            self._in_loop(stream.loop, functools.partial(stream.fail, error), ())

    def _in_loop(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[], Any], news: Iterable[tuple[_Stream, Delta]]
    ) -> None:
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop was closed, and nobody reads any more
            for stream, _ in news:
                self.drop(stream)


def _put(news: Iterable[tuple[_Stream, Delta]]) -> None:
    for stream, delta in news:
        stream.put(delta)


def _complete(future: concurrent.futures.Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
