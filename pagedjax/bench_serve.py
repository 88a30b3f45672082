"""``pagedjax bench serve``: drive any OpenAI-compatible server over HTTP, and measure what its clients wait for."""

import asyncio
import json
import math
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from tqdm import tqdm

from pagedjax.bench_client import Answer, Call, Endpoint, Prompt, ask
from pagedjax.bench_report import Run, numbers_of
from pagedjax.bench_workload import Seed, Workload, arrival_times, random_prompts, share_as_traced
from pagedjax.checkpoint import open_checkpoint
from pagedjax.config import UserError
from pagedjax.tokenizer import Tokenizer
from pagedjax.traces import TraceRequest, at_rate

GOALS = ("ttft", "tpot", "e2el")  # what a service level can be set for
_IDLE = 4.0  # seconds that a connection is kept for the next request: less than servers keep theirs, commonly 5
_SPARE_FILES = 64  # open files beside the connections

# Common short words, each a single token of most vocabularies together with the space before it.
_WORDS = """
    the of and to in is you that it he was for on are as with his they at be this have from or one had by word but
    not what all were we when your can said there use an each which she do how their if will up other about out many
    then them these so some her would make like him into time has look two more write go see number no way could
    people my than first water been call who oil its now find long down day did get come made may part"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, kw_only=True)
class ServeBench(Workload):
    """What to ask of which server.

    Attributes:
        base_url: of the server, with or without ``/v1`` at its end.
        model: as the server calls it.
        endpoint: ``completions`` or ``chat``.
        num_prompts: requests; with a trace, its first ones.
        request_rate: requests per second on average, ``inf`` for all at once; several are run one after another.
            With a trace, its pauses in proportion; none: the trace's own, without a trace ``inf``.
        burstiness: see ``bench_workload.arrival_times``.
        max_concurrency: requests that run at once; later ones wait here, and their clocks start when they are sent.
        goodput: what a good request keeps to, such as ``ttft:500``, in milliseconds.
        ignore_eos: send vLLM's field of that name.
        vocab_size: prompts are token ids drawn below it; without it and a tokenizer they are words.
        tokenizer: model whose tokenizer's ids are drawn, but for special ones.
        extra_body: JSON object with fields to put into each request; null takes a field out.
        api_key: sent as a bearer token.
        timeout: seconds that one request may take.
        seed: of prompts and arrivals; each rate has prompts of its own, so that none finds the last one's cached.

    Raises:
        UserError: a value is out of its range.
    """

    base_url: str
    model: str
    endpoint: str = "completions"
    num_prompts: int = 100
    request_rate: tuple[float, ...] = ()
    burstiness: float = 1.0
    max_concurrency: int | None = None
    goodput: tuple[str, ...] = ()
    ignore_eos: bool = False
    vocab_size: int | None = None
    tokenizer: str | None = None
    extra_body: str = "{}"
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _server_url(self.base_url)
        _goals(self.goodput)
        self._check("--endpoint", self.endpoint in ("completions", "chat"), "completions or chat", self.endpoint)
        for rate in self.request_rate:
            self._check("--request-rate", rate > 0, "above 0", rate)
        self._check("--burstiness", 0 < self.burstiness < math.inf, "above 0", self.burstiness)
        self._check("--timeout", 0 < self.timeout < math.inf, "above 0", self.timeout)
        self._check("--seed", self.seed >= 0, "at least 0", self.seed)
        for name, value in {"--max-concurrency": self.max_concurrency, "--vocab-size": self.vocab_size}.items():
            self._check(name, value is None or value > 0, "at least 1", value)
        if self.trace is not None and self.burstiness != 1:
            raise UserError("--burstiness is for requests without a trace: a trace has its own pauses")
        if self.tokenizer is not None and self.vocab_size is not None:
            raise UserError("--tokenizer and --vocab-size both say what prompts are made of: give one")
        if self.endpoint == "chat" and (self.tokenizer is not None or self.vocab_size is not None):
            raise UserError("--tokenizer and --vocab-size are for --endpoint completions: a chat's messages are text")
        self.fields()

    @staticmethod
    def _check(flag: str, holds: bool, rule: str, value: object) -> None:
        if not holds:
            raise UserError(f"{flag} must be {rule}, got {value}")

    def fields(self) -> dict[str, Any]:
        """What each request's body has beside what all servers know.

        Raises:
            UserError: ``extra_body`` is not a JSON object.
        """
        try:
            extra = json.loads(self.extra_body)
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise UserError(f"--extra-body must be a JSON object, got {self.extra_body}")
        return ({"ignore_eos": True} if self.ignore_eos else {}) | extra


def bench_serve(config: ServeBench, show: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Run the requests at each rate, and return the numbers: of each rate an entry of ``runs``.

    A short request goes ahead, which nobody counts: it tells whether there is such a server and model.

    Args:
        config: what to ask of which server.
        show: gets each rate's numbers as soon as they are there.

    Raises:
        UserError: the server cannot be reached or refuses that request, or the trace or the tokenizer cannot be read.
    """
    endpoint = Endpoint(
        url=_server_url(config.base_url),
        model=config.model,
        chat=config.endpoint == "chat",
        extra=config.fields(),
    )
    requests = sorted(config.requests(), key=lambda request: request.arrival)
    rates: Sequence[float | None] = config.request_rate or (None if config.trace else math.inf,)
    vocabulary = _vocabulary(config)
    _allow_files(min(config.num_prompts, config.max_concurrency or config.num_prompts) + _SPARE_FILES)
    goals = _goals(config.goodput)
    runs = []
    asyncio.run(_first_request(config, endpoint, vocabulary))
    for index, rate in enumerate(rates):
        calls = _calls(config, requests, vocabulary, (config.seed, index))
        arrivals = _arrivals(config, requests, rate, (config.seed, index, 1))
        run = asyncio.run(_run(config, endpoint, calls, arrivals, rate))
        runs.append(numbers_of(run, goals))
        if show is not None:
            show(runs[-1])
    settings = {"base_url": endpoint.url, "model": config.model, "endpoint": config.endpoint, "seed": config.seed}
    settings |= {"trace": str(config.trace) if config.trace else None, "burstiness": config.burstiness}
    return settings | {"runs": runs}


def _server_url(text: str) -> str:
    """The server's address without ``/v1``, which clients of OpenAI's are used to give."""
    problem = f"--base-url must be an address such as http://127.0.0.1:8000, got {text}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise UserError(problem) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise UserError(problem)
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _goals(texts: Sequence[str]) -> dict[str, float]:
    """Seconds of ``ttft:MS`` and the like."""
    goals = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            seconds = float(value) / 1000
        except ValueError:
            seconds = math.nan
        if name not in GOALS or not 0 < seconds < math.inf:
            raise UserError(f"--goodput takes {', '.join(GOALS)} with milliseconds, such as ttft:500, got {text}")
        goals[name] = seconds
    return goals


def _allow_files(wanted: int) -> None:
    """Ask the system for so many open files, as far as it lets us: a connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


# ---- what is sent when ----


def _vocabulary(config: ServeBench) -> Sequence[int] | Sequence[str]:
    """What prompts are made of: token ids, or words."""
    if config.vocab_size is not None:
        return range(config.vocab_size)
    if config.tokenizer is None:
        return WORDS
    folder = open_checkpoint(config.tokenizer, "dummy").tokenizer_dir
    if folder is None:
        raise UserError(f"--tokenizer {config.tokenizer} holds no tokenizer: give a model that has one")
    tokenizer = Tokenizer.load(folder)
    return [token_id for token_id in range(tokenizer.vocab_size) if token_id not in tokenizer.special_token_ids]


def _calls(
    config: ServeBench, requests: Sequence[TraceRequest], vocabulary: Sequence[int] | Sequence[str], seed: Seed
) -> list[Call]:
    lengths = [(request.prompt_tokens, request.output_tokens) for request in requests]
    drawn = random_prompts(lengths, len(vocabulary), config.shared_prefix_len, seed)
    drawn = share_as_traced(drawn, requests, len(vocabulary), seed)
    return [
        Call(prompt=_prompt(indices, vocabulary), prompt_tokens=size, output_tokens=output)
        for indices, (size, output) in zip(drawn, lengths, strict=True)
    ]


def _prompt(indices: Sequence[int], vocabulary: Sequence[int] | Sequence[str]) -> Prompt:
    chosen = [vocabulary[index] for index in indices]
    return " ".join(map(str, chosen)) if isinstance(vocabulary[0], str) else [int(token_id) for token_id in chosen]


def _arrivals(config: ServeBench, requests: Sequence[TraceRequest], rate: float | None, seed: Seed) -> list[float]:
    if config.trace is None:
        assert rate is not None, "only a trace has arrivals of its own"
        return arrival_times(len(requests), rate, config.burstiness, seed)
    return [request.arrival for request in (requests if rate is None else at_rate(requests, rate))]


# ---- running ----


def _session(config: ServeBench) -> aiohttp.ClientSession:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if config.api_key:
        headers["Authorization"] = f"Bearer {config.api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE),
        timeout=aiohttp.ClientTimeout(total=config.timeout),
        headers=headers,
    )


async def _first_request(config: ServeBench, endpoint: Endpoint, vocabulary: Sequence[int] | Sequence[str]) -> None:
    call = Call(prompt=_prompt([0, 1 % len(vocabulary)], vocabulary), prompt_tokens=2, output_tokens=1)
    async with _session(config) as session:
        answer = await ask(session, endpoint, call)
    if answer.failure in ("no connection", "connection lost"):
        raise UserError(f"no server answers at {endpoint.url}: {answer.message}")
    if answer.failure in ("HTTP 429", "HTTP 503"):  # it is busy, as it may well be among other clients
        return
    if answer.failure is not None:
        raise UserError(f"{endpoint.path} refused a first request: {answer.failure}: {answer.message}".rstrip(": "))


async def _run(
    config: ServeBench, endpoint: Endpoint, calls: Sequence[Call], arrivals: Sequence[float], rate: float | None
) -> Run:
    limit = config.max_concurrency
    turn: AbstractAsyncContextManager[Any] = nullcontext() if limit is None else asyncio.Semaphore(limit)
    label = "the trace's rate" if rate is None else f"{rate:g} requests/s"
    async with _session(config) as session:
        with tqdm(total=len(calls), desc=label, unit="request") as bar:
            began = time.perf_counter()

            async def one(call: Call) -> Answer:
                async with turn:
                    answer = await ask(session, endpoint, call)
                bar.update()
                return answer

            tasks = []
            async with asyncio.TaskGroup() as group:
                for call, arrival in zip(calls, arrivals, strict=True):
                    # Times are counted from the beginning: what one pause overshoots, the next is shorter by.
                    if (pause := began + arrival - time.perf_counter()) > 0:
                        await asyncio.sleep(pause)
                    tasks.append(group.create_task(one(call)))
            elapsed = time.perf_counter() - began
    answers = [task.result() for task in tasks]
    late = [answer.sent - began - arrival for answer, arrival in zip(answers, arrivals, strict=True)]
    return Run(answers=answers, elapsed=elapsed, send_delays=late, request_rate=rate, max_concurrency=limit)
