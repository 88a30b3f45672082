"""``AsyncLLM``: the engine in a thread of its own, its outputs as async iterators."""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pagedjax.config import BeamSearchParams, EngineConfig, SamplingParams
from pagedjax.drain_rate import DrainRate
from pagedjax.engine import Engine
from pagedjax.grammars import Grammar
from pagedjax.loading import Say, load_engine, say_on_stderr
from pagedjax.metrics import Metrics
from pagedjax.request import OutputCollector, RequestOutput
from pagedjax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Longer texts are tokenized in a thread, so that the event loop goes on.
_LONG_TEXT = 4096
# llguidance's limits keep a grammar's compilation to some 100 ms; what is slower for want of a core is given up.
_COMPILE_SECONDS = 10.0


class QueueFull(Exception):
    """As many requests wait as may wait: try again later, in some ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class RequestError(Exception):
    """The engine failed on this request; the message has the id under which the log tells why."""


@dataclass(frozen=True)
class _Stream:
    """Where a request's deltas go."""

    loop: asyncio.AbstractEventLoop
    deltas: asyncio.Queue[RequestOutput]
    places: int  # sequences that it runs


class AsyncLLM:
    """A loaded model for asyncio programs.

    Args:
        model: ``demo``, a folder, a ``.gguf`` file or a hub id.
        max_queue: sequences that may wait, beyond those that find a place to run; where a request would make it
            more, ``generate`` raises ``QueueFull``. An idle engine takes any request. None for no limit.
        chat_template: takes the place of the model's own: Jinja text or a file's path.
        say: gets the lines of the start-up's progress.
        flags: every engine flag as a keyword (see ``EngineConfig``).

    Raises:
        UserError: the model can't be loaded or does not fit.
    """

    def __init__(
        self,
        model: str,
        *,
        max_queue: int | None = None,
        chat_template: str | None = None,
        say: Say = say_on_stderr,
        **flags: Any,
    ):
        self._engine: Engine = load_engine(EngineConfig(model=model, **flags), chat_template, say)
        self._max_queue = max_queue
        self._streams: dict[str, _Stream] = {}  # touched by the engine's thread only
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._compiling = ThreadPoolExecutor(2, "pagedjax-grammar")
        self._drain_rate = DrainRate()
        self._last_step = time.monotonic()
        self._dead: BaseException | None = None
        self._ended: str | None = None  # why nothing is served any more
        self._ending = threading.Lock()  # makes "ended, or queued before that" one decision
        self._thread = threading.Thread(target=self._run, name="pagedjax-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where it has none."""
        return self._engine.tokenizer

    @property
    def metrics_registry(self) -> Metrics:
        """What the engine counts."""
        return self._engine.metrics

    @property
    def model_name(self) -> str:
        """What to call the model."""
        return self._engine.metrics.model_name

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together."""
        return self._engine.sizes.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._engine.vocab_size

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def metrics(self) -> dict[str, float]:
        """The engine's numbers, by the names of ``/metrics`` without their prefix."""
        return self._engine.metrics.as_dict()

    def is_healthy(self, hang_timeout: float) -> bool:
        """Whether the engine lives and, where work waits, a step ended within ``hang_timeout`` seconds."""
        if self._dead is not None or not self._thread.is_alive():
            return False
        return not self._engine.has_work or time.monotonic() - self._last_step < hang_timeout

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        request_id: str | None = None,
        delta: bool = False,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt: yields its output as it grows, at most once a step.

        Closing the iterator, or cancelling the task that reads it, aborts the request and frees its blocks.

        Args:
            prompt: text or token ids.
            params: how to sample, or to search: a beam search yields its hypotheses when it is over, best first.
            request_id: a name of its own; made up where there is none.
            delta: yield only what is new each time, instead of everything so far.
            add_special_tokens: to a text, as the tokenizer does (its beginning-of-sequence token).
            cache_salt: only requests with the same one share blocks in the prefix cache.

        Raises:
            ValueError: the request can't be served; the message begins with the field at fault.
            QueueFull: too many wait already.
            RequestError: the engine failed on this request, or has ended.
        """
        params = params or SamplingParams()
        token_ids = await self._encode(prompt, add_special_tokens)
        grammar = await self._compile(params)
        request_id = request_id or f"request-{next(self._ids)}"
        places = params.num_samples if isinstance(params, SamplingParams) else params.beam_width
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue(), places)
        text = prompt if isinstance(prompt, str) else None
        collector = OutputCollector()
        try:
            await self._call(lambda: self._add(stream, request_id, token_ids, params, text, cache_salt, grammar))
            finished = False
            while not finished:
                output = await stream.deltas.get()
                if output.error:
                    raise RequestError(output.error)
                finished = output.finished
                if delta:
                    yield output
                else:
                    collector.add(output)
                    yield collector.snapshot()
        finally:
            self._commands.put(lambda: self._abort(request_id, stream))

    async def blocks(self) -> dict[str, Any]:
        """Every block of the pool and every sequence, between two steps, as `snapshot.pool_snapshot` describes them.

        Raises:
            RequestError: the engine has ended.
        """
        return await self._call(self._engine.snapshot)

    async def shutdown(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 (a thread is not cancelled)
        """End the engine's thread; requests that run end with ``RequestError``, as do later ones.

        Args:
            timeout: seconds that the step under way may still take; None for no limit.

        Returns:
            Whether the thread has ended; where its device hangs, it never does.
        """
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, timeout)
        return not self._thread.is_alive()

    async def _encode(self, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("prompt is text, and this model has no tokenizer: give token ids")
        if len(prompt) < _LONG_TEXT:
            return self.tokenizer.encode(prompt, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, prompt, add_special_tokens)

    async def _compile(self, params: SamplingParams | BeamSearchParams) -> Grammar | None:
        """What the output must look like, compiled in a thread of its own: others' tokens do not wait for it."""
        if isinstance(params, BeamSearchParams) or params.structured_outputs is None:
            return None
        compiled = self._compiling.submit(self._engine.grammars.compile, params.structured_outputs)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(compiled), _COMPILE_SECONDS)
        except TimeoutError:
            raise ValueError(
                f"structured_outputs took more than {_COMPILE_SECONDS:g} s to compile: make it simpler"
            ) from None

    async def _call[T](self, function: Callable[[], T]) -> T:
        """Run in the engine's thread, between two steps; returns what it returns and raises what it raises."""
        done: Future[T] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                if self._ended:
                    raise RequestError(self._ended)
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001 goes to the caller, whatever it is
                done.set_exception(error)

        with self._ending:
            if self._ended:
                raise RequestError(self._ended)
            self._commands.put(command)
        return await asyncio.wrap_future(done)

    # ---- the engine's thread ----

    def _run(self) -> None:
        try:
            while self._do_commands():
                if self._engine.has_work:
                    self._deliver(self._step())
        except BaseException as error:
            logger.critical("the engine stopped", exc_info=error)
            self._dead = error
            self._end("the engine has stopped; its log says why")
        else:
            for request_id in self._streams:
                self._engine.abort(request_id)
            self._end("the engine was shut down")

    def _end(self, why: str) -> None:
        """Say so to everybody who waits: for tokens, or for a command to run."""
        with self._ending:
            self._ended = why
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            output = RequestOutput(
                request_id=request_id, prompt=None, prompt_token_ids=[], outputs=[], finished=True, error=why
            )
            _send(stream.loop, [(stream, output)])
        while not self._commands.empty():
            if command := self._commands.get():
                command()

    def _do_commands(self) -> bool:
        """What was asked for since the last step; waits where there is nothing else to do. False to end."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            if not self._engine.has_work:
                self._last_step = time.monotonic()  # the time without work is no hang
            command()

    def _step(self) -> list[RequestOutput]:
        try:
            return self._engine.step()
        except Exception as error:  # noqa: BLE001 a fault of ours: the requests that ran end with it, the next ones are served
            return self._engine.fail_all(error)
        finally:
            self._last_step = time.monotonic()

    def _add(
        self,
        stream: _Stream,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        text: str | None,
        cache_salt: str | None,
        grammar: Grammar | None,
    ) -> None:
        engine = self._engine
        if not engine.has_work:
            self._drain_rate.begin(time.monotonic())
        # Nothing that ends would make more room than an idle engine has.
        elif self._max_queue is not None:
            waiting = engine.num_waiting + stream.places - engine.num_free_places
            if waiting > self._max_queue:
                engine.metrics.observe_rejection("queue_full")
                raise QueueFull(
                    f"{waiting} sequences would wait, over the limit of {self._max_queue}: try again later",
                    self._drain_rate.seconds_for(waiting - self._max_queue, time.monotonic()),
                )
        engine.add_request(request_id, token_ids, params, text, cache_salt, grammar)
        self._streams[request_id] = stream

    def _abort(self, request_id: str, stream: _Stream) -> None:
        """Nobody reads it any more: it has ended, or ends now."""
        # A request that was refused for its id must not end the one that has it.
        if self._streams.get(request_id) is stream:
            self._drain_rate.count(stream.places, time.monotonic())
            self._engine.abort(request_id)
            del self._streams[request_id]

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """One wake-up per event loop and step, however many requests have news."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = defaultdict(list)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                news[stream.loop].append((stream, output))
        for loop, items in news.items():
            if not _send(loop, items):  # nobody reads them any more
                for stream, output in items:
                    self._abort(output.request_id, stream)


def _send(loop: asyncio.AbstractEventLoop, items: list[tuple[_Stream, RequestOutput]]) -> bool:
    """Put outputs on their streams, in their loop's thread; False where that loop is closed."""
    try:
        loop.call_soon_threadsafe(_put_all, items)
    except RuntimeError:  # it may close at any moment, so there is no use in asking it first
        return False
    return True


def _put_all(items: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in items:
        stream.deltas.put_nowait(output)
