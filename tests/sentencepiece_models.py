"""Small tokenizers in SentencePiece's style, with byte fallback, for the tests of text."""

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from pagedjax.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", *"abcdefgh!é你", "▁hello", "▁world", "▁a", "s", "▁▁", "\ufffd"]
SP_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]


def sentencepiece(kind: str) -> Tokenizer:
    """As Llama 2 ("llama": strips the first space), Gemma ("gemma"), or with Metaspace ("metaspace")."""
    vocab = {token: i for i, token in enumerate(SP_TOKENS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<plain>", normalized=False)])
    replace = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    elif kind == "gemma":
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence(replace)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([*replace, decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, {})


SP = {kind: sentencepiece(kind) for kind in ("llama", "gemma", "metaspace")}
OUTSIDE = [len(SP_TOKENS) + 1, 10**6, 2**40, -1]  # ids that no vocabulary here has


def sp(*tokens: str) -> list[int]:
    return [SP_TOKENS.index(token) for token in tokens]


def utf8(text: str) -> list[int]:
    return sp(*(f"<0x{byte:02X}>" for byte in text.encode()))
