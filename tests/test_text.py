"""Streamed text: whole characters, the first stop string, and the same text as decoding all at once."""

import time
from collections.abc import Sequence
from itertools import chain as joined

import pytest
from chain_model import EOS, ChainModel, write_chain_model
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece_models import OUTSIDE, PIECES, SP, sp, utf8

from pagedjax.text import StopFinder, TextStream
from pagedjax.tokenizer import Tokenizer

STORY = "Once upon a time, ein Mädchen: 😀😁 你好! aab aaab aabaab\n"
LETTERS = "abcdeé 你😀"
WORDS = [" the", " cat", "s", "aab", " é", "ab", "\ufffd", "!"]


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


def stream(tokenizer: Tokenizer | None, prompt: Sequence[int], output: Sequence[int], **options: object) -> list[str]:
    """What is shown at each token, and at the end."""
    text = TextStream(tokenizer, prompt, **options)  # type: ignore[arg-type]
    shown = [text.push(token_id) for token_id in output]
    shown.append(text.finish())
    assert text.text == "".join(shown)
    return shown


def first_stop(text: str, stops: Sequence[str], include: bool = False, after: int = 0) -> tuple[str, str | None]:
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
def test_stop_finder_agrees_with_the_slow_truth(parts: list[str], stops: list[str], include: bool, free: int) -> None:
    finder = StopFinder(stops, include)
    text, shown = "", ""
    after = len("".join(parts[:free]))  # as min_tokens: the first parts may not stop
    for i, part in enumerate(parts):
        text += part
        shown += finder.push(part, allowed=i >= free)
        if finder.found:
            break
        # Exactly what may become a stop string is held back.
        begun = [text[i:] for i in range(len(text)) if any(s.startswith(text[i:]) and s != text[i:] for s in stops)]
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
def test_byte_level_stream_equals_decode(byte_level: Tokenizer, data: st.DataObject, skip: bool, include: bool) -> None:
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
    prompt_ids, output_ids = list(joined.from_iterable(prompt)), list(joined.from_iterable(output))
    before = tokenizer.decode(prompt_ids, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt_ids + output_ids, skip_special_tokens=skip)
    assert whole.startswith(before)
    expected, _ = first_stop(whole.removeprefix(before), stops)
    assert "".join(stream(tokenizer, prompt_ids, output_ids, stop=tuple(stops), skip_special_tokens=skip)) == expected


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
    output = [*b"\xff\xe4 ", 300_000, byte_level.bos_token_id, *STORY.encode()] * 300
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
