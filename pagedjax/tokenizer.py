"""Text to token ids and back, and chat messages to text: a thin layer over Hugging Face's ``tokenizers``.

Not over ``transformers``: importing it takes 0.6 to 1.5 s more and prints a warning where PyTorch is missing,
and a vocabulary of 262,144 then loads in 1.1 s instead of 0.8 s (measured on 2 shared cores). What it adds is
little: the settings in tokenizer_config.json, read here, and the chat template, Jinja in a sandbox.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedjax.config import UserError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# Decoders that give a token the same text wherever it stands, but for a space at the beginning of the text.
_CONTEXT_FREE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
_CONTINUE_MARK = "<<pagedjax: the final message goes on here>> "  # the space shows whether the template trims


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte-level alphabet: a printable character for each byte; the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


class Tokenizer:
    """One model's tokenizer.

    ``vocab_size`` is one past the largest token id; ``special_token_ids`` are those that
    ``skip_special_tokens`` leaves out, ``special_tokens`` their texts; ``chat_template`` is the source of the template
    that tools are given to, None where there is none; ``eos_token_ids`` are tokenizer_config.json's ``eos_token`` and
    generation_config.json's ``eos_token_id``; ``byte_fallback`` says whether tokens such as ``<0x0A>`` stand
    for bytes.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        templates: Mapping[str, str],
        generation_eos_ids: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens = tuple(sorted(token.content for token in added.values() if token.special))
        self._read_decoder()

        texts = {name: _content(settings.get(name)) for name in _SPECIAL_NAMES}
        self._special_texts = {name: text for name, text in texts.items() if text}
        self.bos_token_id = self._id_of("bos_token")
        eos = [i for i in (self._id_of("eos_token"), *generation_eos_ids) if i is not None]
        self.eos_token_ids = tuple(dict.fromkeys(eos))

        self.chat_template = templates.get("tool_use") or templates.get("default")
        environment = _template_environment()
        self._templates = {}
        for name, source in templates.items():
            try:
                self._templates[name] = environment.from_string(source)
            except TemplateError as error:
                raise UserError(f"broken chat template ({_one_line(error)}): use --chat-template") from None

    @classmethod
    def load(cls, folder: Path, chat_template: str | None = None) -> "Tokenizer":
        """The tokenizer in a model folder: tokenizer.json, and where present tokenizer_config.json,
        special_tokens_map.json, generation_config.json and chat_template.jinja.

        ``chat_template`` takes the place of the folder's own: Jinja text, or the path of a file.

        Raises:
            UserError: a file is missing or broken.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"no tokenizer.json in {folder}: add the model's, or name its folder with --tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception for whatever is wrong with the file
            raise UserError(f"{path} cannot be read ({_one_line(error)}): fetch it again") from error
        # A file may carry the truncation of its training run, which would cut prompts without a word.
        backend.no_truncation()
        backend.no_padding()
        settings = _read_json(path.with_name("special_tokens_map.json"))
        settings |= _read_json(path.with_name("tokenizer_config.json"))
        eos = _read_json(path.with_name("generation_config.json")).get("eos_token_id")
        eos_ids = [i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)]
        try:
            return cls(backend, settings, _read_templates(path.parent, settings, chat_template), eos_ids)
        except UserError as error:
            raise UserError(f"{path.parent}: {error}") from None

    def _read_decoder(self) -> None:
        decoder = self._backend.decoder
        kinds = _decoder_kinds(json.loads(decoder.__getstate__())) if decoder else set()
        self._byte_level = kinds == {"ByteLevel"}
        self.byte_fallback = "ByteFallback" in kinds
        if not self._byte_level and (odd := kinds - _CONTEXT_FREE_DECODERS):
            names = ", ".join(sorted(odd))
            raise UserError(f"tokenizer.json has the decoder {names}, which is not supported: use another")
        # What a token says in the middle of a text is what it adds after some plain word.
        self._anchor: list[int] = []
        if not self._byte_level:
            ids = (i for i in range(self.vocab_size) if i not in self.special_token_ids)
            self._anchor = next(([i] for i in ids if self._backend.decode([i]).strip().isalnum()), [])
        self._anchor_text = self._backend.decode(self._anchor)

    def _id_of(self, name: str) -> int | None:
        text = self._special_texts.get(name)
        return None if text is None else self._backend.token_to_id(text)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as Hugging Face's ``tokenizer(text).input_ids``.

        ``add_special_tokens`` adds what tokenizer.json's post-processor says; ``add_bos_token`` in
        tokenizer_config.json is not read beside a tokenizer.json, as in transformers 5.

        Raises:
            ValueError: the text holds a lone surrogate, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not Unicode: lone surrogate at character {error.start}") from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary give nothing (a padded vocabulary may produce them).

        ``clean_up_tokenization_spaces`` is not applied: it would take out spaces that the model wrote.
        """
        known = [i for i in ids if 0 <= i < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token within a text, special ones too; U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token within a text, perhaps part of a character; b"" outside the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._find_bytes(token_id) if 0 <= token_id < self.vocab_size else b""
            self._bytes[token_id] = data
        return data

    def first_bytes(self, token_id: int) -> bytes:
        """`token_bytes` of a token that begins a text: some tokenizers strip a space there."""
        data = self.token_bytes(token_id)
        if self._byte_level or not data.startswith(b" "):
            return data
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # a hole in the numbering
            return b""
        if self._byte_level:  # as the ByteLevel decoder: a token with any other character stands for itself
            in_alphabet = all(char in _BYTE_OF_CHAR for char in token)
            return bytes(_BYTE_OF_CHAR[char] for char in token) if in_alphabet else token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        text = self._backend.decode([*self._anchor, token_id], skip_special_tokens=False)
        return text.removeprefix(self._anchor_text).encode()

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a chat; encode it with ``add_special_tokens=False``.

        ``continue_final_message`` ends the text where the last message's content ends, so that the model goes
        on with it. ``kwargs`` are handed to the template.

        Raises:
            UserError: the model has no chat template.
            ValueError: the template refuses the messages, or the arguments do not go together.
        """
        if not self._templates:
            raise UserError("this model has no chat template: use --chat-template, or plain completions")
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError("continue_final_message and add_generation_prompt exclude each other: set one")
            messages = _mark_end(messages)
        # Fields that are null are left out: many templates would print "None".
        shown = [{key: value for key, value in message.items() if value is not None} for message in messages]
        values = {**self._special_texts, "documents": None, **kwargs, "messages": shown, "tools": tools}
        try:
            text = template.render(values, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program of the model's authors: it can fail in any way
            raise ValueError(f"the chat template refuses the messages: {_one_line(error)}") from error
        return _cut_at_mark(text) if continue_final_message else text


def _content(token: Any) -> str | None:
    """A special token is written as its text, or as an object that has it under ``content``."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({_one_line(error)}): fetch it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object: fetch it again")
    return value


def _decoder_kinds(decoder: dict[str, Any]) -> set[str]:
    if decoder["type"] == "Sequence":
        return set().union(*map(_decoder_kinds, decoder["decoders"]))
    if decoder["type"] == "Strip" and decoder["stop"]:
        return {"Strip at the end"}  # cuts what later text would bring back
    return {decoder["type"]}


def _read_templates(folder: Path, settings: Mapping[str, Any], given: str | None) -> dict[str, str]:
    """Sources of the chat templates by name; ``default`` is there where any is."""
    own = folder / "chat_template.jinja"
    if given is None and own.is_file():
        given = str(own)
    if given is not None:
        if any(char in given for char in "{}\n"):
            return {"default": given}
        try:
            return {"default": Path(given).read_text(encoding="utf-8")}
        except (OSError, ValueError) as error:
            raise UserError(f"the chat template {given} cannot be read: {_one_line(error)}") from None
    template = settings.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    try:
        named = {str(entry["name"]): str(entry["template"]) for entry in template or ()}
    except (TypeError, KeyError):
        raise UserError("chat_template in tokenizer_config.json cannot be read: use --chat-template") from None
    if named and "default" not in named:
        raise UserError(f"the chat templates are {', '.join(named)}, none the default: use --chat-template")
    return named


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant says, for training; here it only shows its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 only asks what is in it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    """Jinja's own filter would escape < and > for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _template_environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for (transformers' guide to chat templates), in a sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _mark_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark at the end of the last one's text."""
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_MARK
    elif isinstance(content, list) and content and isinstance(content[-1], dict) and "text" in content[-1]:
        last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}]
    else:
        raise ValueError("continue_final_message needs a last message that ends in text")
    return [*messages[:-1], last]


def _cut_at_mark(text: str) -> str:
    mark = _CONTINUE_MARK.rstrip()
    end = text.rfind(mark)
    if end < 0:
        raise ValueError("continue_final_message: the chat template leaves out the end of the last message")
    return text[:end] if text.startswith(_CONTINUE_MARK, end) else text[:end].rstrip()
