"""The three shapes of log-probabilities: completions', chat's, and vLLM's of the prompt."""

import codecs
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedjax import Logprob, Tokenizer

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have

Entries = Mapping[int, Logprob]

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def _value(entry: Logprob) -> float:
    return max(LOWEST_LOGPROB, entry.logprob)  # in this order: NaN must not get through


def _text(token_id: int, entry: Logprob | None, tokenizer: Tokenizer | None) -> str:
    if entry is not None and entry.decoded_token is not None:
        return entry.decoded_token
    return tokenizer.token_text(token_id) if tokenizer else f"token_id:{token_id}"


@dataclass(kw_only=True)
class TextOffsets:
    """Where each token begins in the text, in characters; parts of a character all begin where it does."""

    tokenizer: Tokenizer | None
    skip_special_tokens: bool
    from_start: bool  # whether the first token begins a text, or goes on after a prompt
    position: int = 0
    _decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _Utf8Decoder("replace"))

    def next(self, token_id: int) -> int:
        """Offset of the next token."""
        offset = self.position
        tokenizer = self.tokenizer
        if tokenizer and not (self.skip_special_tokens and token_id in tokenizer.special_token_ids):
            first = self.from_start and offset == 0
            data = tokenizer.first_bytes(token_id) if first else tokenizer.token_bytes(token_id)
            self.position += len(self._decoder.decode(data))
        return offset


def completion_logprobs(
    token_ids: Iterable[int],
    logprobs: Iterable[Entries | None],
    tokenizer: Tokenizer | None,
    offsets: TextOffsets,
) -> dict[str, Any]:
    """The ``logprobs`` of a completion's choice; None stands for a prompt's first token, which has none."""
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        own = entries[token_id] if entries else None
        shown["tokens"].append(_text(token_id, own, tokenizer))
        shown["token_logprobs"].append(_value(own) if own else None)
        shown["text_offset"].append(offsets.next(token_id))
        if not entries:
            shown["top_logprobs"].append(None)
            continue
        top: dict[str, float] = {}
        # Tokens that look alike (parts of characters) share a key: it is the chosen or the likeliest one's.
        for other_id, entry in sorted(entries.items(), key=lambda item: (item[0] != token_id, item[1].rank)):
            top.setdefault(_text(other_id, entry, tokenizer), _value(entry))
        shown["top_logprobs"].append(top)
    return shown


def chat_logprobs(
    token_ids: Iterable[int], logprobs: Iterable[Entries], top: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The ``logprobs`` of a chat's choice, with the ``top`` likeliest tokens at each place."""

    def one(token_id: int, entry: Logprob) -> dict[str, Any]:
        text = _text(token_id, entry, tokenizer)
        data = tokenizer.token_bytes(token_id) if tokenizer else text.encode()
        return {"token": text, "logprob": _value(entry), "bytes": list(data)}

    content = []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        likeliest = sorted((item for item in entries.items() if item[1].rank <= top), key=lambda item: item[1].rank)
        alternatives = [one(*item) for item in likeliest[:top]]
        content.append(one(token_id, entries[token_id]) | {"top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    token_ids: Iterable[int], logprobs: Iterable[Entries | None], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: entries by token id for each prompt token; None for the first."""
    likeliest = likeliest_entries(token_ids, logprobs, top)
    return [None if entries is None else _by_id(entries) for entries in likeliest]


def likeliest_entries(token_ids: Iterable[int], logprobs: Iterable[Entries | None], top: int) -> list[Entries | None]:
    """Of each token's entries its own and the ``top`` likeliest: two fields of a request may ask for more."""
    return [
        entries and {i: entry for i, entry in entries.items() if entry.rank <= top or i == token_id}
        for token_id, entries in zip(token_ids, logprobs, strict=True)
    ]


def _by_id(entries: Entries) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": _value(e), "rank": e.rank, "decoded_token": e.decoded_token}
        for token_id, e in entries.items()
    }
