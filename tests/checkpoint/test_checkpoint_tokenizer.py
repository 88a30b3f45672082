"""Tokenizers made from a GGUF file's vocabulary, against tokenizers made in another way."""

import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checkpoint.tiny_gguf import tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from pagedjax.checkpoint.gguf_file import read_gguf
from pagedjax.checkpoint.gguf_tokenizer import write_tokenizer
from pagedjax.config import UserError

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Best pieces first, as in a trained SentencePiece model: a piece made of two others comes after both.
LETTERS = [SPACE, *"abcdehlnorstw", "é", "世"]
WORDS = [
    "th",
    "he",
    SPACE + "a",
    "an",
    "the",
    SPACE + "the",
    "or",
    "wor",
    SPACE + "w",
    SPACE + "wor",
    "ld",
    "ll",
    "lo",
]
PIECES = [*WORDS, *LETTERS]
PLAIN = [*"abcdehlnorstw é世\n", "😀", "the", " wor"]


def texts(parts: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(parts), min_size=1, max_size=30).map("".join)


def sentencepiece_metadata(**extra: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", "<x>", *BYTES, *PIECES]
    types = [2, 3, 3, 4, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * 260 + [-float(rank) for rank in range(len(PIECES))]
    basic: dict[str, Any] = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    basic |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (basic | extra).items()}


def tokenizer_of(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    write_tokenizer(read_gguf(tiny_llama(folder / "m.gguf", metadata)), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def sentencepiece_reference(text: str) -> list[str]:
    """SentencePiece's own algorithm: join the adjacent pair with the best score, the leftmost first."""
    symbols = list(SPACE + text.replace(" ", SPACE))
    while True:
        joined = [(PIECES.index(a + b), i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in PIECES]
        if not joined:
            break
        place = min(joined)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    found = []
    for symbol in symbols:
        found += [symbol] if symbol in PIECES else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return found


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(sentencepiece_metadata(), tmp_path_factory.mktemp("spm"))


@given(text=texts(PLAIN))
def test_sentencepiece_cuts_as_its_own_algorithm_does(text: str, sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode(text, add_special_tokens=False).tokens == sentencepiece_reference(text)


@given(text=texts(PLAIN))
def test_sentencepiece_text_comes_back(text: str, sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode(text).ids
    assert ids[0] == 1
    assert sentencepiece.decode(ids) == text


def test_whole_tokens_are_never_cut(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode("a<x>the</s>", add_special_tokens=False).tokens == [
        SPACE + "a",
        "<x>",
        SPACE + "the",
        "</s>",
    ]
    assert sentencepiece.encode("</s>", add_special_tokens=False).ids == [2]


def test_flags_decide_about_bos_eos_and_the_space_in_front(tmp_path: Path) -> None:
    made = tokenizer_of(
        sentencepiece_metadata(add_bos_token=False, add_eos_token=True, add_space_prefix=False), tmp_path
    )
    assert made.encode("the").tokens == ["the", "</s>"]
    assert made.encode("the", "a").tokens == ["the", "</s>", "a", "</s>"]
    assert made.decode(made.encode(" the").ids) == " the"


def test_the_config_beside_it_makes_hugging_face_agree(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    metadata = sentencepiece_metadata() | {"tokenizer.chat_template": template}
    made = tokenizer_of(metadata, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the world", "  a\n世é😀", "a<x>b"):
        assert loaded(text).input_ids == made.encode(text).ids
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.unk_token_id) == (1, 2, 0)
    assert loaded.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == "the"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["add_bos_token"], config["add_eos_token"]) == (True, False)


CORPUS = [
    "The quick brown fox jumps over the lazy dog 12345 times.",
    "It's hers, isn't it?\n\n  Well  well…",
    "größe 世界 😀 é",
]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A byte-level BPE trained with the tokenizers library on a few sentences."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        CORPUS * 5, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return trained


def byte_level_metadata(trained: Tokenizer, **extra: Any) -> dict[str, Any]:
    model = json.loads(trained.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<|im_end|>", "<think>", "  \t世"]
    merges = [" ".join(merge) for merge in model["merges"]]
    types = [1] * (len(tokens) - 3) + [3, 4, 4]
    basic: dict[str, Any] = {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": merges}
    basic |= {"eos_token_id": len(tokens) - 3, "bos_token_id": len(tokens) - 3}
    return {f"tokenizer.ggml.{key}": value for key, value in (basic | extra).items()}


@pytest.fixture(scope="module")
def default_bpe(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(byte_level_metadata(byte_level), tmp_path_factory.mktemp("bpe"))


@settings(max_examples=100)
@given(text=st.text(max_size=40))
def test_byte_level_gives_what_the_trained_tokenizer_gives(
    text: str, byte_level: Tokenizer, default_bpe: Tokenizer
) -> None:
    ids = default_bpe.encode(text).ids
    assert ids == byte_level.encode(text).ids
    assert default_bpe.decode(ids) == text


def test_byte_level_whole_tokens_are_kept(default_bpe: Tokenizer) -> None:
    made = default_bpe.encode("a<|im_end|><think>  \t世b")
    assert made.tokens[1:4] == ["<|im_end|>", "<think>", "  \t世"]
    assert default_bpe.decode(made.ids, skip_special_tokens=False) == "a<|im_end|><think>  \t世b"
    assert default_bpe.decode(made.ids) == "a<think>  \t世b"


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("qwen2", "I'LL pay 1234\n\n now", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "\n\n", " now"]),
        ("llama-bpe", "I'LL pay 1234\n\n now", ["I", "'LL", " pay", " ", "123", "4", "\n\n", " now"]),
        ("tekken", "I'll HTTPServer 12/\n", ["I", "'ll", " HTTPServer", " ", "1", "2", "/\n"]),
        ("default", "I'LL pay 1234\n\n now", ["I", "'", "LL", " pay", " 1234", "\n\n", " now"]),
    ],
)
def test_each_pre_tokenizer_cuts_the_text_its_own_way(
    pre: str, text: str, words: list[str], byte_level: Tokenizer, tmp_path: Path
) -> None:
    made = tokenizer_of(byte_level_metadata(byte_level, pre=pre), tmp_path)
    assert [text[start:end] for _, (start, end) in made.pre_tokenizer.pre_tokenize_str(text)] == words
    # Files without the flag: llama 3's and tekken's begin with BOS, the others do not.
    assert (made.encode("x").ids[0] == byte_level.get_vocab_size()) == (pre in ("llama-bpe", "tekken"))


def test_qwen2_composes_characters_first(byte_level: Tokenizer, tmp_path: Path) -> None:
    made = tokenizer_of(byte_level_metadata(byte_level, pre="qwen2"), tmp_path)
    assert made.encode(unicodedata.normalize("NFD", "größe")).ids == made.encode("größe").ids


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"scores": [0.0]}, "differ in length"),
        ({"eos_token_id": 10**6}, "eos_token_id = 1000000 is outside"),
        ({"tokens": 5}, "tokens is no list"),
        ({"model": "gpt2", "merges": ["a b c"]}, "merges are damaged"),
        ({"model": "gpt2", "merges": ["zz yy"]}, "merges do not fit"),
    ],
)
def test_a_vocabulary_that_makes_no_sense_is_refused(extra: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=match) as caught:
        tokenizer_of(sentencepiece_metadata(**extra), tmp_path)
    assert "m.gguf" in str(caught.value)


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(read_gguf(tiny_llama(tmp_path / "m.gguf")), tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
