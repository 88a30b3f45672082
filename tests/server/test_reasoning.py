"""Reasoning parted from the answer, whole and streamed."""

import json
from typing import Any

import pytest
from fake_engine import FakeLLM, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from server.reasoning import ReasoningReader, begins_inside

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
SAID = "<think>\nHm ☕, <b>?\n</think>\n\nYes <think>."


def read(pieces: list[str], *, inside: bool = False) -> tuple[str, str]:
    reader = ReasoningReader(inside=inside)
    found = [reader.feed(piece) for piece in pieces] + [reader.finish()]
    return "".join(reasoning for reasoning, _ in found), "".join(text for _, text in found)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "answer"),
    [
        (SAID, False, "Hm ☕, <b>?\n", "Yes <think>."),
        ("  <think>a</think>b", False, "a", "b"),
        ("no thoughts </think>", False, "", "no thoughts </think>"),
        ("\na</think>\nb</think>", True, "a", "b</think>"),
        ("<think>it never ends </thin", False, "it never ends </thin", ""),
        ("<thin", False, "", "<thin"),
        (" ", False, "", " "),
        ("<think></think>", False, "", ""),
    ],
)
def test_examples(text: str, inside: bool, reasoning: str, answer: str) -> None:
    assert read([text], inside=inside) == (reasoning, answer)
    assert read(list(text), inside=inside) == (reasoning, answer)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "th", "ink>", "\n", " ", "a", "☕"]), max_size=12
    ),
    inside=st.booleans(),
)
def test_however_it_is_cut(pieces: list[str], inside: bool) -> None:
    text = "".join(pieces)
    assert read(pieces, inside=inside) == read([text], inside=inside) == read(list(text), inside=inside)


def test_prompts_that_begin_it() -> None:
    assert begins_inside("<assistant>\n<think>\n")
    assert not begins_inside("<assistant>\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parser", "fields", "said", "expected"),
    [
        ("none", {}, SAID, (None, SAID)),
        ("think", {}, SAID, ("Hm ☕, <b>?\n", "Yes <think>.")),
        ("think", {"include_reasoning": False}, SAID, (None, "Yes <think>.")),
        ("think", {"chat_template_kwargs": {"begun": True}}, "Hm</think>Yes", ("Hm", "Yes")),
        ("think", {}, "Yes", (None, "Yes")),
    ],
)
async def test_over_http(
    served_with: Any, llm: FakeLLM, parser: str, fields: dict[str, Any], said: str,
    expected: tuple[str | None, str], stream: bool,
) -> None:  # fmt: skip
    llm.script, llm.tokenizer = said, byte_tokenizer("{{ messages[0].content }}{% if begun %}<think>\n{% endif %}")
    served = await served_with(reasoning_parser=parser)
    body = {"model": "tiny", "messages": HELLO, "stream": stream} | fields
    async with served.session.post(served.url + CHAT, json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    if stream:
        deltas = [
            json.loads(line[6:])["choices"][0]["delta"] for line in text.split("\n\n") if line.startswith("data: {")
        ]
        found = "".join(delta.get("reasoning_content") or "" for delta in deltas) or None
        assert (found, "".join(delta.get("content") or "" for delta in deltas)) == expected
    else:
        message = json.loads(text)["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == expected
