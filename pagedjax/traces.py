"""Recorded request traces: when requests came and how long they were. No text is in them."""

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.config import UserError

_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?")


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds after the trace's first request.
        prompt_tokens: tokens of its prompt.
        output_tokens: tokens that were generated.
        hash_ids: one id per ``hash_tokens`` tokens of the prompt, where the trace has them: two requests whose ids
            begin alike have prompts that begin alike.
        hash_tokens: tokens that an id stands for.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    hash_tokens: float = 512.0

    def scaled(self, factor: float) -> "TraceRequest":
        """The request with lengths times ``factor``, none below one token; what it shares with others scales too."""
        prompt, output = (max(1, round(tokens * factor)) for tokens in (self.prompt_tokens, self.output_tokens))
        return replace(self, prompt_tokens=prompt, output_tokens=output, hash_tokens=self.hash_tokens * factor)

    def clipped(self, max_model_len: int) -> "TraceRequest":
        """The request within ``max_model_len`` tokens in all, the prompt's end cut off before the output's."""
        output = min(self.output_tokens, max_model_len - 1)
        prompt = min(self.prompt_tokens, max_model_len - output)
        if (prompt, output) == (self.prompt_tokens, self.output_tokens):
            return self
        return replace(self, prompt_tokens=prompt, output_tokens=output)


def at_rate(requests: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """The same requests, ``rate`` of them a second on average: all pauses change in proportion; ``inf``: at once."""
    last = max(request.arrival for request in requests)
    factor = 0.0 if math.isinf(rate) or not last else (len(requests) - 1) / rate / last
    return [replace(request, arrival=request.arrival * factor) for request in requests]


class PrefixKeys:
    """Names for the full blocks of prompts: equal names, equal tokens and equal tokens all the way before them.

    A block is known by the trace's id in whose tokens it ends, together with all ids before that one, and by its place
    among those that end there. Any block size will do: where blocks and ids do not line up, a block is shared only if
    all that the id stands for is.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._prefixes: dict[tuple[int, int], int] = {}  # of a prefix and the id after it: the longer prefix

    def of(self, request: TraceRequest) -> list[int]:
        """The names of the prompt's first full blocks, as far as the trace's ids go; all at least 0."""
        size, span = self._block_size, request.hash_tokens
        per_id = math.ceil(span / size)  # blocks that may end within one id
        prefixes, chain, prefix = self._prefixes, [], 0
        for hash_id in request.hash_ids:
            prefix = prefixes.setdefault((prefix, hash_id), len(prefixes) + 1)
            chain.append(prefix * per_id)
        ends = np.arange(size - 1, min(request.prompt_tokens, math.floor(len(chain) * span)), size)
        names = np.array(chain, np.int64)[(ends // span).astype(np.int64)] + np.arange(len(ends)) % per_id
        return names.tolist()


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a trace, in the file's order.

    Two formats, each plain or gzipped: the Azure LLM inference trace (``.csv``: TIMESTAMP, ContextTokens,
    GeneratedTokens) and the Mooncake trace (``.jsonl``: timestamp in ms, input_length, output_length,
    hash_ids).

    Args:
        path: ends in .csv, .csv.gz, .jsonl or .jsonl.gz.
        limit: read no more requests than this.

    Raises:
        UserError: the file cannot be read or holds no request, or a line is malformed; the message names it.
    """
    path = Path(path)
    name = path.name.removesuffix(".gz")
    if not name.endswith((".csv", ".jsonl")):
        raise UserError(f"the trace {path} must end in .csv, .csv.gz, .jsonl or .jsonl.gz")
    lines = enumerate(_lines(path), start=1)
    number, first_moment = 1, 0
    requests: list[TraceRequest] = []
    try:
        parse = _azure(next(lines, (1, ""))[1]) if name.endswith(".csv") else _mooncake
        for number, line in lines:  # noqa: B007 (the message of an error needs it)
            if limit is not None and len(requests) == limit:
                break
            if not line.strip():
                continue
            moment, request = parse(line)
            if not requests:
                first_moment = moment
            # From whole nanoseconds: a float is good to a quarter of a microsecond only for a moment today.
            requests.append(replace(request, arrival=(moment - first_moment) / 1e9))
    except ValueError as error:
        raise UserError(f"{path} line {number}: {error}") from None
    if not requests:
        raise UserError(f"the trace {path} holds no requests")
    return requests


def _lines(path: Path) -> Iterator[str]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            yield from file
    except UnicodeDecodeError:
        raise UserError(f"the trace {path} cannot be read: it is not UTF-8 text") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the trace {path} cannot be read: {reason}") from None


# What a line says: its moment in nanoseconds on the trace's own clock, and the request without its arrival.
type _Parser = Callable[[str], tuple[int, TraceRequest]]


def _azure(header: str) -> _Parser:
    columns = header.lstrip("\ufeff").strip().split(",")

    def parse(line: str) -> tuple[int, TraceRequest]:
        cells = line.strip().split(",")
        if len(cells) != len(columns):
            raise ValueError(f"it has {len(cells)} columns, and the first line has {len(columns)}")
        row = dict(zip(columns, cells, strict=True))
        prompt, output = _count(row, "ContextTokens"), _count(row, "GeneratedTokens")
        return _azure_moment(row["TIMESTAMP"]), TraceRequest(0.0, prompt, output)

    if missing := {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(columns):
        raise ValueError(f"the column {min(missing)} is missing")
    return parse


def _azure_moment(text: str) -> int:
    match = _AZURE_TIME.fullmatch(text)
    if not match:
        raise ValueError(f"TIMESTAMP is {text!r}, not a time such as 2023-11-16 18:15:46.6805900")
    date, time, fraction = match.groups(default="")
    seconds = datetime.fromisoformat(f"{date}T{time}+00:00").timestamp()
    return int(seconds) * 10**9 + int(fraction.ljust(9, "0"))


def _mooncake(line: str) -> tuple[int, TraceRequest]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    moment, hash_ids = row.get("timestamp"), row.get("hash_ids", [])
    if not isinstance(moment, int | float) or isinstance(moment, bool) or not math.isfinite(moment):
        raise ValueError(f"timestamp is {moment!r}, not a number of milliseconds")
    if not isinstance(hash_ids, list) or not all(isinstance(i, int) for i in hash_ids):
        raise ValueError("hash_ids is not a list of whole numbers")
    prompt, output = _count(row, "input_length"), _count(row, "output_length")
    return round(moment * 10**6), TraceRequest(0.0, prompt, output, tuple(hash_ids))


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} is {value!r}, not a whole number")
    return int(text)
