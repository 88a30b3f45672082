"""Prompts from a file: text lines, or JSON lines."""

import json
from dataclasses import dataclass
from pathlib import Path

from pagedjax.config import UserError


@dataclass(frozen=True)
class Prompt:
    """Text or token ids, and where they come from, for messages."""

    where: str
    content: str | list[int]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: one per line; where its name ends in .jsonl, one ``{"prompt": ...}`` per line.

    In JSON a prompt is text or a list of token ids. Lines that are blank hold none.

    Raises:
        UserError: the file cannot be read or holds no prompt, or a line is malformed; the message names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"--prompts-file {path} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"--prompts-file {path} cannot be read: {error.strerror}") from None
    of_line = _of_json if path.suffix == ".jsonl" else _of_text
    prompts = [of_line(f"{path} line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UserError(f"--prompts-file {path} holds no prompts: write one per line")
    return prompts


def _of_text(where: str, line: str) -> Prompt:
    return Prompt(where, line.removesuffix("\r"))


def _of_json(where: str, line: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    match row:
        case {"prompt": str(text)}:
            return Prompt(where, text)
        case {"prompt": [*ids]} if ids and all(type(i) is int for i in ids):
            return Prompt(where, ids)
    raise UserError(f'{where} is not a JSON object with a prompt, such as {{"prompt": "Once upon a time"}}')
