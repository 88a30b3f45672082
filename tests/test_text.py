"""Text in and out: the tokenizer, streaming, stop strings, chat templates; and that the chain model is what it says."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from chain_model import BOS, CHAT_TEMPLATE, EOS, ChainModel, write_chain_model
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from pagedjax.config import UserError
from pagedjax.text import StopFinder, TextStream
from pagedjax.tokenizer import Tokenizer

STORY = "Once upon a time, ein Mädchen: 😀😁 你好! aab aaab aabaab\n"
LETTERS = "abcdeé 你😀"
WORDS = [" the", " cat", "s", "aab", " é", "ab", "\ufffd", "!"]

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", *"abcdefgh!é你", "▁hello", "▁world", "▁a", "s", "▁▁", "\ufffd"]
SP_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]


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


def sentencepiece(kind: str) -> Tokenizer:
    """As Llama 2's ("llama": strips the first space), Gemma's ("gemma") or with the Metaspace pieces ("metaspace")."""
    vocab = {token: i for i, token in enumerate(SP_TOKENS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<plain>", normalized=False)])
    replace = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
        )
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


def stream(
    tokenizer: Tokenizer | None, prompt: Sequence[int], output: Sequence[int], **options: object
) -> list[str]:
    """What is shown at each token, and at the end."""
    text = TextStream(tokenizer, prompt, **options)  # type: ignore[arg-type]
    shown = [text.push(token_id) for token_id in output]
    shown.append(text.finish())
    assert text.text == "".join(shown)
    return shown


def first_stop(
    text: str, stops: Sequence[str], include: bool = False, after: int = 0
) -> tuple[str, str | None]:
    """The slow truth: the text cut at the stop string that ends first, past ``after`` characters."""
    for end in range(after + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


# --- stop strings


stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(
    parts=st.lists(st.text("abc", max_size=6)),
    stops=stop_lists,
    include=st.booleans(),
    free=st.integers(0, 3),
)
def test_stop_finder_agrees_with_the_slow_truth(
    parts: list[str], stops: list[str], include: bool, free: int
) -> None:
    finder = StopFinder(stops, include)
    text, shown = "", ""
    after = len("".join(parts[:free]))  # as min_tokens: the first parts may not stop
    for i, part in enumerate(parts):
        text += part
        shown += finder.push(part, allowed=i >= free)
        if finder.found:
            break
        # Exactly what may become a stop string is held back.
        begun = [
            text[i:] for i in range(len(text)) if any(s.startswith(text[i:]) and s != text[i:] for s in stops)
        ]
        assert finder.held == ("" if include else max(begun, key=len, default=""))
        assert shown + finder.held == text
    assert (shown + finder.held, finder.found) == first_stop("".join(parts), stops, include, after)


@pytest.mark.parametrize(
    ("parts", "stops", "shown", "found"),
    [
        (["x", "aa", "ab", "y"], ["aab"], "xa", "aab"),  # overlaps itself
        (["ab", "c"], ["abc", "b"], "a", "b"),  # complete first, though it begins later
        (["xab"], ["ab", "b"], "x", "ab"),  # both end here: the one listed first
        (["xab"], ["b", "ab"], "xa", "b"),
        (["ab", "cd"], ["abcx", "ab"], "", "ab"),  # one a beginning of the other
        (["a", "b", "c", "d", "e"], ["bcd"], "a", "bcd"),  # spans three parts
        (["no sTop"], ["stop"], "no sTop", None),
        (["ein é", "nde"], ["éen", "énd"], "ein ", "énd"),
        (["ab", "ab", "ac"], ["ababac"], "", "ababac"),
        (["aab", "ab"], ["b"], "aa", "b"),
    ],
)
def test_stop_strings_by_example(parts: list[str], stops: list[str], shown: str, found: str | None) -> None:
    finder = StopFinder(stops)
    got = ""
    for part in parts:
        if not finder.found:
            got += finder.push(part)
    assert (got + finder.held, finder.found) == (shown, found)


# --- streams


@given(data=st.data(), skip=st.booleans(), include=st.booleans())
def test_byte_level_stream_equals_decode(
    byte_level: Tokenizer, data: st.DataObject, skip: bool, include: bool
) -> None:
    ids = st.lists(st.integers(-2, byte_level.vocab_size + 2), max_size=12)
    prompt, output = data.draw(ids), data.draw(ids)
    stops = data.draw(st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=3))
    prompt += [ord("x")]  # a prompt that ends in a whole character
    before = byte_level.decode(prompt, skip_special_tokens=skip)
    whole = byte_level.decode(prompt + output, skip_special_tokens=skip)
    expected, _ = first_stop(whole.removeprefix(before), stops, include)
    options = {"stop": tuple(stops), "include_stop": include, "skip_special_tokens": skip}
    assert "".join(stream(byte_level, prompt, output, **options)) == expected


bad_runs = st.sampled_from([[0xFF], [0xE4], [0xE4, 0xBD], [0xF0, 0x9F, 0x98], [0x80, 0x80]])
segments = st.one_of(
    st.sampled_from([t for t in (*PIECES, "<s>", "</s>", "<unk>") if t]).map(lambda token: sp(token)),
    st.sampled_from([*LETTERS, "\n"]).map(utf8),
    st.sampled_from(OUTSIDE).map(lambda token_id: [token_id]),
    # An invalid run of bytes between other tokens.
    bad_runs.map(lambda run: sp("a", *(f"<0x{byte:02X}>" for byte in run), "▁world")),
)


@pytest.mark.parametrize("kind", SP)
@given(
    prompt=st.lists(segments, max_size=3),
    output=st.lists(segments, max_size=8),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=3),
    skip=st.booleans(),
)
def test_sentencepiece_stream_equals_decode(
    kind: str, prompt: list[list[int]], output: list[list[int]], stops: list[str], skip: bool
) -> None:
    tokenizer = SP[kind]
    prompt_ids, output_ids = sum(prompt, []), sum(output, [])
    before = tokenizer.decode(prompt_ids, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt_ids + output_ids, skip_special_tokens=skip)
    assert whole.startswith(before)
    expected, _ = first_stop(whole.removeprefix(before), stops)
    assert (
        "".join(stream(tokenizer, prompt_ids, output_ids, stop=tuple(stops), skip_special_tokens=skip))
        == expected
    )


def test_space_between_prompt_and_output_is_kept() -> None:
    llama = SP["llama"]
    assert stream(llama, sp("<s>", "▁hello"), sp("▁world", "s")) == [" world", "s", ""]
    assert stream(llama, sp("<s>"), sp("▁world", "▁world")) == ["world", " world", ""]
    assert stream(llama, sp("<s>"), sp("▁world"), skip_special_tokens=False) == [" world", ""]
    assert stream(SP["gemma"], sp("<s>"), sp("▁world")) == [" world", ""]


def test_complete_characters_stay_in_an_invalid_byte_run() -> None:
    output = [*utf8("你"), *sp("<0xE5>", "<0xA5>", "a")]
    assert SP["llama"].decode(output) == "\ufffd" * 5 + "a"  # what it does afterwards, when 你 has been shown
    assert stream(SP["llama"], [], output) == ["", "", "你", "", "", "\ufffd\ufffda", ""]


def test_text_is_shown_as_soon_as_it_is_whole(chain: ChainModel, byte_level: Tokenizer) -> None:
    output = chain.follow("<pieces>")
    shown = stream(byte_level, byte_level.encode("<pieces>"), output)
    assert shown == [" the", " cat", "", "😀 and", "", " ", "", "\ufffd"]
    shown = stream(byte_level, [], output, skip_special_tokens=False)
    assert shown == [" the", " cat", "", "😀 and", "<|note|>", " ", "\ufffd" + EOS, ""]
    # A character is cut off at the end.
    assert stream(byte_level, [], list("😀".encode())[:3]) == ["", "", "", "\ufffd"]
    assert stream(SP["llama"], [], utf8("😀")[:3]) == ["", "", "", "\ufffd\ufffd\ufffd"]
    # U+FFFD that the model says is text like any other, and needs no more tokens.
    assert stream(byte_level, [], list("\ufffd".encode())) == ["", "", "\ufffd", ""]
    assert stream(SP["llama"], [], sp("\ufffd", "a")) == ["\ufffd", "a", ""]


def test_prompt_that_ends_within_a_character(byte_level: Tokenizer) -> None:
    prompt = list(b"a long prompt \xf0\x9f")
    assert stream(byte_level, prompt, [0x98, 0x80, ord("!")]) == ["", "😀", "!", ""]
    assert stream(byte_level, prompt, []) == [""]
    assert stream(SP["llama"], sp("<s>", "▁hello", "<0xE4>"), sp("<0xBD>", "<0xA0>")) == ["", "你", ""]


def test_stop_string_in_the_stream(byte_level: Tokenizer) -> None:
    text = TextStream(byte_level, [], stop=("def", "é "))
    assert [text.push(byte) for byte in "abcdeé x".encode()] == ["a", "b", "c", "", "", "", "de", "", ""]
    assert text.stop_reason == "é "
    assert text.finish() == ""
    assert text.text == "abcde"
    kept = TextStream(byte_level, [], stop=("cd",), include_stop=True)
    assert [kept.push(byte) for byte in b"abcde"] == ["a", "b", "c", "d", ""]
    held = TextStream(byte_level, [], stop=("abx",))
    assert [held.push(byte) for byte in b"ab"] == ["", ""]
    assert held.finish() == "ab"
    assert (held.text, held.stop_reason, held.finish(), held.push(ord("x"))) == ("ab", None, "", "")


def test_stop_string_ends_in_the_middle_of_a_token() -> None:
    text = TextStream(SP["llama"], sp("a"), stop=("o w", "hel"))
    assert [text.push(token_id) for token_id in sp("▁", "▁hello", "▁world")] == [" ", " ", ""]
    assert text.stop_reason == "hel"
    assert stream(SP["llama"], sp("a"), sp("▁hello", "▁world"), stop=("lo wo",), include_stop=True) == [
        " hello",
        " wo",
        "",
    ]


def test_stop_strings_before_min_tokens_do_not_stop(byte_level: Tokenizer) -> None:
    def run(output: bytes, min_tokens: int) -> tuple[str, str | None]:
        text = TextStream(byte_level, [], stop=("aba",))
        for count, byte in enumerate(output, start=1):
            text.push(byte, stops_allowed=count > min_tokens)
        return text.text + text.finish(), text.stop_reason

    assert run(b"xabay", 4) == ("xabay", None)
    assert run(b"xabay", 3) == ("x", "aba")  # begins before the limit and ends after it
    assert run(b"ababa", 3) == (
        "ab",
        "aba",
    )  # the first is complete too early, the second shares a letter with it
    assert run(b"xabab", 4) == ("xabab", None)


def test_stream_without_a_tokenizer_is_empty() -> None:
    text = TextStream(None, [1, 2], stop=("a",))
    assert (text.push(3), text.finish(), text.text, text.stop_reason) == ("", "", "", None)


def test_cost_of_a_token_does_not_grow(byte_level: Tokenizer) -> None:
    output = (list(b"\xff\xe4 ") + [300_000, byte_level.bos_token_id, *STORY.encode()]) * 300
    assert len(output) > 20_000
    ratios = []
    for _ in range(3):
        text = TextStream(byte_level, list(b"prompt"), stop=("never said", "aaaaaab", "\n\n"))
        times = []
        for part in (output[:5000], output[-5000:], output[-5000:], output[-5000:]):
            start = time.perf_counter()
            for token_id in part:
                text.push(token_id)
            times.append(time.perf_counter() - start)
        ratios.append(times[-1] / times[0])
    assert min(ratios) < 3


# --- the tokenizer


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
        assert (
            tokenizer.decode([-1, 10**6, 2**40, ord("a") if tokenizer is byte_level else sp("a")[0]]) == "a"
        )


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_encode_and_decode_are_inverse(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, ids)).decode() == text
    assert byte_level.decode(ids, skip_special_tokens=False) == text
    assert "".join(stream(byte_level, [], ids, skip_special_tokens=False)) == text


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
@pytest.mark.parametrize(
    "settings", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}]
)
def test_same_ids_as_transformers(tmp_path: Path, in_file: bool, settings: dict[str, bool]) -> None:
    from transformers import PreTrainedTokenizerFast  # 1.5 s to import: only where it is the truth

    chain = write_chain_model(tmp_path, {"<go>": "a"}, add_bos=in_file)
    change_settings(tmp_path, **settings)
    tokenizer, truth = Tokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("Hi <go>", "", f"é{EOS}", " 😀"):
        assert tokenizer.encode(text) == truth(text).input_ids
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == truth(text, add_special_tokens=False).input_ids
        assert tokenizer.decode([chain.eos_id, *ids]) == truth.decode(
            [chain.eos_id, *ids], skip_special_tokens=True
        )


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

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>", "name": None}]
REPLY = {"role": "assistant", "content": "Well, "}
TEMPLATES = {
    "chain": CHAT_TEMPLATE,
    "trimming": "{% for m in messages %}\n  [{{ m.content | trim }}]\n{% endfor %}",
    "rich": "{{ bos_token }}{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}"
    "{% endfor %}{{ tools | tojson(indent=1) }}{{ strftime_now('%%') }}{{ extra }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_same_chat_as_transformers(tmp_path: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    write_chain_model(tmp_path, {"a": "b"}, chat_template=TEMPLATES[name])
    tokenizer, truth = Tokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for options in (
        {"add_generation_prompt": True, "extra": 3},
        {"add_generation_prompt": False, "tools": [{"type": "function", "function": {"name": "f<"}}]},
    ):
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
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert "'go" in byte_level.apply_chat_template(blocks, **options)


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
    byte_level: Tokenizer, messages: list[dict[str, object]], options: dict[str, bool], message: str
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
    write_chain_model(
        tmp_path, {"a": "b"}, chat_template="{{ ''.__class__.__mro__ }}{{ messages.append(1) }}"
    )
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
        b"".join(
            token for i in chain.follow("<go>")[:-1] for token, j in chain.ids.items() if i == j
        ).decode()
        == text
    )
