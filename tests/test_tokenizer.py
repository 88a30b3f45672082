"""The tokenizer and chat templates against transformers; and that the chain model is what it says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from chain_model import BOS, CHAT_TEMPLATE, EOS, ChainModel, write_chain_model
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from sentencepiece_models import SP, sp
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from pagedjax.config import UserError
from pagedjax.text import TextStream
from pagedjax.tokenizer import Tokenizer

STORY = "Once upon a time, ein Mädchen: 😀😁 你好! aab aaab aabaab\n"


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> ChainModel:
    folder = tmp_path_factory.mktemp("chain")
    return write_chain_model(
        folder,
        {"<either>": {"x": 0.75, "y": 0.25}, "x": "y", "y": "x"},
        recite={
            "<go>": STORY,
            "<pieces>": [" the", " cat", b"\xf0\x9f", b"\x98\x80 and", "<|note|>", b" \xe4"],
        },
        words=[" é", "naïve"],
    )


@pytest.fixture(scope="module")
def byte_level(chain: ChainModel) -> Tokenizer:
    return Tokenizer.load(chain.folder)


def test_token_bytes(chain: ChainModel, byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(chain.id(b"\xf0\x9f")) == b"\xf0\x9f"
    assert byte_level.token_text(chain.id(b"\xf0\x9f")) == "\ufffd"
    assert byte_level.token_text(chain.id(BOS)) == BOS
    assert byte_level.token_text(chain.id(" é")) == " é"
    llama = SP["llama"]
    for token, data in {
        "▁world": b" world",
        "<0x0A>": b"\n",
        "<0xE4>": b"\xe4",
        "é": "é".encode(),
        "</s>": b"</s>",
    }.items():
        assert llama.token_bytes(sp(token)[0]) == data
    assert llama.token_text(sp("<0xE4>")[0]) == "\ufffd"
    for tokenizer in (byte_level, llama):
        for token_id in (-1, 10**6, 2**40):
            assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.decode([-1, 10**6, 2**40, ord("a") if tokenizer is byte_level else sp("a")[0]]) == "a"


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_encode_and_decode_are_inverse(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, ids)).decode() == text
    assert byte_level.decode(ids, skip_special_tokens=False) == text
    stream = TextStream(byte_level, [], skip_special_tokens=False)
    assert "".join(map(stream.push, ids)) + stream.finish() == text


def test_lone_surrogate_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        byte_level.encode("a\ud800")


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    chain = write_chain_model(tmp_path, {"a": "b"})
    assert Tokenizer.load(tmp_path).eos_token_ids == (chain.eos_id,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, chain.eos_id]}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == (chain.eos_id, 7)
    assert tokenizer.bos_token_id == chain.id(BOS)
    assert tokenizer.vocab_size == chain.vocab_size


def change_settings(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
def test_same_ids_as_transformers(tmp_path: Path, in_file: bool, settings: dict[str, bool]) -> None:
    chain = write_chain_model(tmp_path, {"<go>": "a"}, add_bos=in_file)
    change_settings(tmp_path, **settings)
    tokenizer, truth = Tokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("Hi <go>", "", f"é{EOS}", " 😀"):
        assert tokenizer.encode(text) == truth(text).input_ids
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == truth(text, add_special_tokens=False).input_ids
        assert tokenizer.decode([chain.eos_id, *ids]) == truth.decode([chain.eos_id, *ids], skip_special_tokens=True)


def test_truncation_in_the_file_is_not_applied(tmp_path: Path) -> None:
    write_chain_model(tmp_path, {"a": "b"})
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.encode("abcdef")) == 6
    assert len(tokenizer.encode("ab")) == 2


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json in"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", '{"model": {"type": "Odd"}}', "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "[1", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "broken chat template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": ""}]}', "none the default"),
        ("tokenizer_config.json", '{"chat_template": 3}', "use --chat-template"),
    ],
)
def test_broken_folder_is_one_line(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    write_chain_model(tmp_path, {"a": "b"})
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_decoder_that_cannot_be_streamed_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.CTC()
    with pytest.raises(UserError, match="decoder CTC"):
        Tokenizer(backend, {}, {})


# --- chat templates

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>", "name": None},
]
REPLY = {"role": "assistant", "content": "Well, "}
TEMPLATES = {
    "chain": CHAT_TEMPLATE,
    "trimming": "{% for m in messages %}\n  [{{ m.content | trim }}]\n{% endfor %}",
    "rich": "{{ bos_token }}{% for m in messages %}{% generation %}{{ m | tojson }}"
    "{% endgeneration %}{% break %}{% endfor %}"
    "{{ tools | tojson(indent=1) }}{{ strftime_now('%%') }}{{ extra }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_same_chat_as_transformers(tmp_path: Path, name: str) -> None:
    write_chain_model(tmp_path, {"a": "b"}, chat_template=TEMPLATES[name])
    tokenizer, truth = Tokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    cases: list[dict[str, Any]] = [
        {"add_generation_prompt": True, "extra": 3},
        {"add_generation_prompt": False, "tools": [{"type": "function", "function": {"name": "f<"}}]},
    ]
    for options in cases:
        expected = truth.apply_chat_template(CHAT, tokenize=False, **options)
        assert tokenizer.apply_chat_template(CHAT, **options) == expected
    if name != "rich":
        options = {"add_generation_prompt": False, "continue_final_message": True}
        expected = truth.apply_chat_template([*CHAT, REPLY], tokenize=False, **options)
        assert tokenizer.apply_chat_template([*CHAT, REPLY], **options) == expected


def test_chat_text(byte_level: Tokenizer, chain: ChainModel) -> None:
    text = byte_level.apply_chat_template(CHAT)
    assert text == "<|system|>Be brief.<|user|>Hi <b><|assistant|>"
    assert byte_level.encode(text, add_special_tokens=False)[-1] == chain.id("<|assistant|>")
    blocks = [{"role": "user", "content": [{"type": "text", "text": "go"}]}]
    text = byte_level.apply_chat_template(blocks, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|user|>[{'type': 'text', 'text': 'go"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([{"role": "wizard", "content": "x"}], {}, "unknown role wizard"),
        ([{"role": 3, "content": "x"}], {}, "refuses the messages"),
        ([REPLY], {"continue_final_message": True}, "exclude each other"),
        ([], {"continue_final_message": True, "add_generation_prompt": False}, "ends in text"),
    ],
)
def test_bad_chat_is_one_clear_line(
    byte_level: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        byte_level.apply_chat_template(messages, **options)
    assert "\n" not in str(error.value)


def test_where_the_chat_template_comes_from(tmp_path: Path) -> None:
    write_chain_model(tmp_path, {"a": "b"}, chat_template=None)
    bare = Tokenizer.load(tmp_path)
    assert not bare.has_chat_template
    with pytest.raises(UserError, match="no chat template"):
        bare.apply_chat_template(CHAT)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    change_settings(tmp_path, chat_template=named)
    assert Tokenizer.load(tmp_path).apply_chat_template(CHAT) == "plain"
    assert Tokenizer.load(tmp_path).apply_chat_template(CHAT, tools=[{"type": "function"}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("from the file\n")
    assert Tokenizer.load(tmp_path).apply_chat_template(CHAT) == "from the file"
    (tmp_path / "mine.jinja").write_text("{{ messages | length }} mine")
    assert Tokenizer.load(tmp_path, str(tmp_path / "mine.jinja")).apply_chat_template(CHAT) == "2 mine"
    assert Tokenizer.load(tmp_path, "{{ eos_token }}!").apply_chat_template(CHAT) == f"{EOS}!"
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer.load(tmp_path, "no-such-file.jinja")


def test_chat_template_is_in_a_sandbox(tmp_path: Path) -> None:
    write_chain_model(tmp_path, {"a": "b"}, chat_template="{{ ''.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(ValueError, match="refuses the messages"):
        Tokenizer.load(tmp_path).apply_chat_template(CHAT)


# --- the chain model


def test_chain_recites(chain: ChainModel, byte_level: Tokenizer) -> None:
    output = chain.follow("<go>")
    assert byte_level.decode(output) == STORY
    assert output[-1] == chain.eos_id
    assert len(set(output)) == len(output)
    assert len(output) > len(STORY) / 2  # short pieces
    assert byte_level.encode("say <go>")[-1] == chain.id("<go>")
    assert byte_level.encode("naïve") == [chain.id("naïve")]


def test_chain_loops_and_branches(chain: ChainModel) -> None:
    assert chain.follow("x", 4) == [chain.id("y"), chain.id("x"), chain.id("y"), chain.id("x")]
    probabilities = np.exp(chain.log_probs[chain.id("<either>")])
    assert probabilities[chain.id("x")] == pytest.approx(0.75)
    assert probabilities[chain.id("y")] == pytest.approx(0.25)


def test_chain_weights_give_its_log_probs(chain: ChainModel) -> None:
    tensors = load_file(chain.folder / "model.safetensors")
    config = json.loads((chain.folder / "config.json").read_text())
    hidden = tensors["model.embed_tokens.weight"]
    hidden = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
    logits = (hidden * tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(log_probs, chain.log_probs, atol=1e-4)


def test_chain_refuses_a_piece_that_stands_twice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stands twice"):
        write_chain_model(tmp_path, recite={"<go>": ["a", "b", "a"]})


@given(text=st.text(min_size=1, max_size=40, alphabet="ab😀é "))
def test_chain_recites_any_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    chain = write_chain_model(tmp_path_factory.mktemp("any"), text)
    assert (
        b"".join(token for i in chain.follow("<go>")[:-1] for token, j in chain.ids.items() if i == j).decode() == text
    )
