"""The chain model: a Llama whose next token depends on the last one only, so that tests know the answer.

One layer of zeros leaves the embedding as it is; embeddings are one-hot, and column t of the output head
holds the log-probabilities of what follows token t. The tokenizer is byte-level: a token for each byte,
pieces of one or more bytes that only the model says (``encode`` never gives them), and words that ``encode``
always gives as one token.

    chain = write_chain_model(folder, recite={"<go>": "Hello, wörld 😀"})       # <go>, the text, </s>
    chain = write_chain_model(folder, {"a": "b", "b": {"a": 0.75, "c": 0.25}})  # loops and branches
    chain.follow("<go>")  # the greedy token ids after <go>, up to and with </s>
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

type Token = int | str | bytes

BOS, EOS = "<s>", "</s>"
SPECIALS = (BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", "<|note|>")
NEVER = -30.0  # log-probability, before normalising, of a token that does not follow
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}"
    "{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' and not loop.last %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class ChainModel:
    """A model folder and what is known about it.

    ``log_probs`` ([vocab, vocab] float32) has the log-probabilities of the token after each token in its row.
    """

    folder: Path
    ids: Mapping[bytes, int]
    log_probs: np.ndarray

    @property
    def eos_id(self) -> int:
        """Id of ``</s>``."""
        return self.id(EOS)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, all of them with an id below it."""
        return len(self.log_probs)

    def id(self, token: Token) -> int:
        """Id of a token given by its text, its bytes or its id."""
        return token if isinstance(token, int) else self.ids[_bytes(token)]

    def follow(self, token: Token, count: int = 1000) -> list[int]:
        """The greedy ids after ``token``, at most ``count``, up to and with ``</s>``."""
        ids: list[int] = []
        last = self.id(token)
        while len(ids) < count and (not ids or last != self.eos_id):
            last = int(self.log_probs[last].argmax())
            ids.append(last)
        return ids


def write_chain_model(
    folder: Path,
    transitions: str | Mapping[Token, Token | Mapping[Token, float]] | None = None,
    *,
    recite: Mapping[str, str | Sequence[str | bytes]] | None = None,
    words: Sequence[str] = (),
    specials: Sequence[str] = (),
    add_bos: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    max_model_len: int = 512,
    dtype: str = "float32",
) -> ChainModel:
    """Write a model folder: config.json, model.safetensors, tokenizer.json, tokenizer_config.json.

    Args:
        folder: made where it is not there.
        transitions: what follows a token: one token, or several with probabilities that sum to 1. A str is
            short for ``recite={"<go>": that}``. A token that is in no mapping is followed by ``</s>``.
        recite: text to say after a trigger, then ``</s>``. A str is cut into pieces that no other text uses
            (short ones, so that a character of several bytes spans tokens); a list gives the pieces.
        words: further texts that ``encode`` gives as one token; triggers and ``transitions`` are such too.
        specials: further special tokens, beside `SPECIALS`.
        add_bos: whether ``encode`` puts ``<s>`` in front.
        chat_template: Jinja text; None leaves the model without.
        dtype: what config.json says; the weights are stored in float32.
    """
    if isinstance(transitions, str):
        return write_chain_model(
            folder,
            recite={"<go>": transitions, **(recite or {})},
            words=words,
            specials=specials,
            add_bos=add_bos,
            chat_template=chat_template,
            max_model_len=max_model_len,
            dtype=dtype,
        )
    transitions, recite = transitions or {}, recite or {}
    all_specials = [*SPECIALS, *specials]
    targets = {token: to if isinstance(to, Mapping) else {to: 1.0} for token, to in transitions.items()}
    named = [*recite, *targets, *(next_ for target in targets.values() for next_ in target)]
    listed = {_bytes(token): None for token in named if not isinstance(token, int)}  # a set in order

    ids = {bytes([byte]): byte for byte in range(256)}
    for token in [*map(_bytes, all_specials), *map(_bytes, words), *listed]:
        ids.setdefault(token, len(ids))
    added = [token for token in ids if len(token) > 1 and _is_text(token)]
    chains = _chains(recite, taken=set(listed) | {token for token in ids if len(token) > 1})
    for pieces in chains.values():
        for piece in pieces:
            ids.setdefault(piece, len(ids))

    chain = ChainModel(folder, ids, np.full((len(ids), len(ids)), NEVER, np.float32))
    chain.log_probs[:, chain.eos_id] = 0.0
    for key, target in targets.items():
        _set_row(chain, key, target)
    for trigger, pieces in chains.items():
        for piece, next_piece in zip([_bytes(trigger), *pieces], [*pieces, _bytes(EOS)], strict=True):
            _set_row(chain, piece, {next_piece: 1.0})
    chain.log_probs[:] -= np.log(np.exp(chain.log_probs.astype(np.float64)).sum(axis=1, keepdims=True))

    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, ids, added, set(all_specials), add_bos, chat_template)
    _write_model(folder, chain, max_model_len, dtype)
    return chain


def _bytes(token: str | bytes) -> bytes:
    return token.encode() if isinstance(token, str) else token


def _is_text(token: bytes) -> bool:
    return "\ufffd" not in token.decode("utf-8", "replace")


def _set_row(chain: ChainModel, token: Token, target: Mapping[Token, float]) -> None:
    row = chain.log_probs[chain.id(token)]
    row[:] = NEVER
    for next_, probability in target.items():
        row[chain.id(next_)] = np.log(probability)


def _chains(recite: Mapping[str, str | Sequence[str | bytes]], taken: set[bytes]) -> dict[str, list[bytes]]:
    """Pieces of each text, none of them twice: what follows a token depends on that token alone.

    Given pieces may be words or special tokens that nothing else says; texts are cut around them.
    """
    triggers = {_bytes(trigger) for trigger in recite}
    chains = {
        trigger: [_bytes(piece) for piece in text] for trigger, text in recite.items() if not isinstance(text, str)
    }
    given = [piece for pieces in chains.values() for piece in pieces]
    for piece in given:
        if piece in triggers or given.count(piece) > 1:
            raise ValueError(f"the piece {piece!r} stands twice: cut the texts into other pieces")
    taken = taken | set(given)
    for trigger, text in recite.items():
        if isinstance(text, str):
            chains[trigger] = _cut(text.encode(), taken)
            taken.update(chains[trigger])
    return chains


def _cut(text: bytes, taken: set[bytes]) -> list[bytes]:
    """The text in the shortest pieces not taken; the last piece grows to the left until it is not either."""
    pieces: list[bytes] = []
    start = 0
    for end in range(1, len(text) + 1):
        if text[start:end] not in taken and text[start:end] not in pieces:
            pieces.append(text[start:end])
            start = end
    rest = text[start:]
    while rest and (rest in taken or rest in pieces):
        if not pieces:
            raise ValueError(f"{text!r} is a token of another text: choose a longer one")
        rest = pieces.pop() + rest
    return [*pieces, rest] if rest else pieces


def _write_tokenizer(
    folder: Path,
    ids: Mapping[bytes, int],
    added: Sequence[bytes],
    specials: set[str],
    add_bos: bool,
    chat_template: str | None,
) -> None:
    vocab = {(token.decode() if token in added else _spell(token)): token_id for token, token_id in ids.items()}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    for token in map(bytes.decode, added):
        tokenizer.add_tokens([AddedToken(token, special=token in specials, normalized=False)])
    if add_bos:
        bos = (BOS, ids[BOS.encode()])
        tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", pair=None, special_tokens=[bos])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _spell(token: bytes) -> str:
    """A token of any bytes in the byte-level alphabet."""
    return "".join(_ALPHABET[byte] for byte in token)


def _alphabet() -> list[str]:
    """The alphabet as the tokenizers library has it: its characters in the order of their bytes."""
    printable = [chr(byte) for byte in range(256) if 0x21 <= byte <= 0x7E or (0xA1 <= byte <= 0xFF and byte != 0xAD)]
    others = iter(sorted(set(ByteLevel.alphabet()) - set(printable)))
    return [chr(byte) if chr(byte) in printable else next(others) for byte in range(256)]


_ALPHABET = _alphabet()


def _write_model(folder: Path, chain: ChainModel, max_model_len: int, dtype: str) -> None:
    vocab = chain.vocab_size
    hidden = -(-vocab // 64) * 64
    scale = float(np.sqrt(hidden))
    heads, kv_heads, head_dim, inner = 2, 1, 16, 32
    zeros = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors: dict[str, np.ndarray] = {
        f"model.layers.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in zeros.items()
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{name}.weight"] = np.ones(hidden, np.float32)
    # The embedding's mean square is 1, so that the norm's epsilon does not count; the norm scales it to 1.
    tensors["model.embed_tokens.weight"] = np.eye(vocab, hidden, dtype=np.float32) * np.float32(scale)
    tensors["model.norm.weight"] = np.full(hidden, 1 / scale, np.float32)
    head = np.zeros((vocab, hidden), np.float32)
    head[:, :vocab] = chain.log_probs.T
    tensors["lm_head.weight"] = head
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_model_len,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": chain.id(BOS),
        "eos_token_id": chain.eos_id,
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
