"""`tokenizer.json` and `tokenizer_config.json` from the vocabulary inside a GGUF file.

Two kinds exist in the model families served here: SentencePiece vocabularies ("llama": pieces with scores,
spaces written as U+2581, unknown characters as bytes) and byte-level BPE ("gpt2": merges, and a regular
expression that cuts the text first, named by `tokenizer.ggml.pre`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pagedjax.checkpoint.gguf_file import GGUFFile
from pagedjax.config import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # tokenizer.ggml.token_type
SPACE = "\u2581"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# None: GPT-2's own expression, which the byte-level pre-tokenizer has built in.
_SPLITS: Mapping[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
# Of these, a word that is in the vocabulary as a whole is taken whole, and the text begins with BOS by
# default.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")


class _Vocabulary:
    """The `tokenizer.ggml.*` metadata, with types and lengths checked."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.gemma = str(file.metadata["general.architecture"]).startswith("gemma")
        self.tokens: list[str] = file.get("tokenizer.ggml.tokens", list) or []
        if self.gemma:
            # These files spell runs of spaces as spaces; text arrives at the model with U+2581 in their
            # place.
            self.tokens = [t.replace(" ", SPACE) if not t.strip(" ") else t for t in self.tokens]
        self.types: list[int] = self._numbers("token_type", NORMAL)
        self.scores: list[float] = self._numbers("scores", 0.0)
        if not self.tokens or len(self.types) != len(self.tokens) or len(self.scores) != len(self.tokens):
            raise self.refuse("its vocabulary, scores and token types differ in length")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        self.kind = file.get("tokenizer.ggml.model", str)
        self.pre = file.get("tokenizer.ggml.pre", str) or "default"

    def _numbers(self, name: str, default: float) -> list[Any]:
        values = self.file.get(f"tokenizer.ggml.{name}", np.ndarray)
        return [default] * len(self.tokens) if values is None else values.tolist()

    def special(self, name: str) -> str | None:
        """The token that `tokenizer.ggml.NAME_token_id` points to."""
        index = self.file.get(f"tokenizer.ggml.{name}_token_id", int)
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise self.refuse(f"tokenizer.ggml.{name}_token_id = {index} is outside its vocabulary")
        return self.tokens[index]

    def flag(self, name: str, default: bool) -> bool:
        """One of the yes-or-no settings."""
        value = self.file.get(f"tokenizer.ggml.{name}", bool)
        return default if value is None else value

    def refuse(self, why: str) -> UserError:
        return UserError(f"{self.file.path}: {why}; give a tokenizer folder with --tokenizer")


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, or nothing where the file has no tokenizer.

    Raises UserError, naming the file, for a tokenizer or pre-tokenizer that is not supported.
    """
    if file.get("tokenizer.ggml.model", str) in (None, "none", "no_vocab"):
        return
    vocabulary = _Vocabulary(file)
    if vocabulary.kind == "llama":
        tokenizer = _sentencepiece(vocabulary)
    elif vocabulary.kind == "gpt2":
        tokenizer = _byte_level(vocabulary)
    else:
        raise vocabulary.refuse(f"tokenizer type {vocabulary.kind!r} is not supported (llama and gpt2 are)")
    _add_whole_tokens(tokenizer, vocabulary)
    bos, eos = _frame(vocabulary)
    if bos or eos:
        tokenizer.post_processor = _template(vocabulary, bos, eos)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.special("bos"),
        "eos_token": vocabulary.special("eos"),
        "unk_token": vocabulary.special("unknown"),
        "pad_token": vocabulary.special("padding"),
        "add_bos_token": bos is not None,
        "add_eos_token": eos is not None,
        "clean_up_tokenization_spaces": False,
        "chat_template": file.get("tokenizer.chat_template", str),
    }
    written = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(written, indent=1), encoding="utf-8")


def _frame(vocabulary: _Vocabulary) -> tuple[str | None, str | None]:
    """The tokens put before and after every text. Files without the flags follow llama.cpp's defaults."""
    by_default = vocabulary.kind == "llama" or vocabulary.pre in _WHOLE_WORDS
    bos = vocabulary.special("bos") if vocabulary.flag("add_bos_token", by_default) else None
    eos = vocabulary.special("eos") if vocabulary.flag("add_eos_token", False) else None
    return bos, eos


def _template(vocabulary: _Vocabulary, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    before, after = ([bos] if bos else []), ([eos] if eos else [])
    single = [*before, "$A", *after]
    pair = [*single, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
    ids = [(token, vocabulary.ids[token]) for token in dict.fromkeys(before + after)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def _add_whole_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Marks the tokens that are matched in the text first: control tokens (special) and user-defined ones."""
    named = {vocabulary.special(name) for name in ("bos", "eos", "unknown", "padding", "eot")}
    control, defined = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (CONTROL, UNKNOWN) or token in named:
            control.append(AddedToken(token, normalized=False, special=True))
        # Runs of U+2581 stand for spaces, which the text still has at that point; the merges make them.
        elif kind == USER_DEFINED and token.strip(SPACE):
            defined.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(defined)


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """A BPE over pieces, with the merges that the vocabulary implies and bytes for what it does not have."""
    unknown = vocabulary.special("unknown")
    model = BPE(vocabulary.ids, _implied_merges(vocabulary), fuse_unk=True, byte_fallback=True, unk_token=unknown)
    tokenizer = Tokenizer(model)
    decoding: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    written: list[Any] = [normalizers.Replace(" ", SPACE)]
    if vocabulary.flag("add_space_prefix", not vocabulary.gemma):
        # In front of the text and after each whole token, as llama.cpp and the published tokenizers have it.
        written.insert(0, normalizers.Prepend(SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(written)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _implied_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best first: SentencePiece keeps only the outcome of its
    merges.

    Ordered by the score of the piece that comes out, and in Gemma's files by its place in the vocabulary
    (there runs of spaces have no meaningful score, and the places agree with all others); then longer left
    parts first.
    """
    tokens, types, scores = vocabulary.tokens, vocabulary.types, vocabulary.scores
    # Control tokens and bytes are never made of text.
    pieces = {token for token, index in vocabulary.ids.items() if types[index] in (NORMAL, USER_DEFINED)}
    merges: list[tuple[str, str]] = []
    ranks: list[float] = []
    for index, token in enumerate(tokens):
        if token not in pieces:
            continue
        found = [
            (token[:cut], token[cut:])
            for cut in range(len(token) - 1, 0, -1)
            if token[:cut] in pieces and token[cut:] in pieces
        ]
        merges += found
        ranks += [-scores[index]] * len(found)
    if vocabulary.gemma:
        return merges
    order = sorted(range(len(merges)), key=lambda i: (ranks[i], -len(merges[i][0]), -len(merges[i][1])))
    return [merges[i] for i in order]


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    """Byte-level BPE with the merges of the file."""
    pre = vocabulary.pre
    if pre not in _SPLITS:
        raise vocabulary.refuse(f"pre-tokenizer {pre!r} is not supported ({', '.join(_SPLITS)} are)")
    merges = [merge.split(" ") for merge in vocabulary.file.get("tokenizer.ggml.merges", list) or []]
    if any(len(merge) != 2 for merge in merges):
        raise vocabulary.refuse("its merges are damaged")
    ids = vocabulary.ids
    if any(left not in ids or right not in ids or left + right not in ids for left, right in merges):
        raise vocabulary.refuse("its merges do not fit its vocabulary")
    model = BPE(ids, [(left, right) for left, right in merges], ignore_merges=pre in _WHOLE_WORDS)
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    split = _SPLITS[pre]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is None:
        tokenizer.pre_tokenizer = byte_level
    else:
        cut = pre_tokenizers.Split(Regex(split), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
