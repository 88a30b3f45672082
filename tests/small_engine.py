"""One chain model and one set of engine sizes for the tests of the whole engine: its step compiles once.

The pool holds one request of the greatest length and half as much again: one request runs undisturbed, and
eight long ones preempt each other.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chain_model import EOS, ChainModel, write_chain_model

from pagedjax import RequestOutput, SamplingParams
from pagedjax.engine import Engine
from pagedjax.request import OutputCollector

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "num_kv_blocks": 24,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
MAX_MODEL_LEN = 128
TEXT = "Hello, wörld 😀! Once more: 你好, and the end.\nOr not?"
CAT = ["The ca", "t sat on", " the m", "at. E", "ND of", " it"]


def write_small_model(folder: Path) -> ChainModel:
    """A model with something for every option.

    - ``<go>`` says `TEXT`, short pieces that cut its characters; ``<cat>`` says `CAT`, then both end;
    - ``<loop>``, ``<n0>`` to ``<n9>`` each go round seven tokens of their own for ever;
    - ``p``, ``q`` and ``r`` follow each other, the one before in the alphabet last, for ever;
    - ``<early>`` and ``m`` would rather end than say ``m``;
    - ``<dice>`` and ``a`` to ``e`` are drawn from `a` to `e`, or end, with uneven odds;
    - ``<note>`` says a special token between two words.
    """
    dice = {"a": 0.31, "b": 0.25, "c": 0.19, "d": 0.13, "e": 0.09, EOS: 0.03}
    faces = [face for face in dice if face != EOS]
    transitions: dict[Any, Any] = {
        "<pqr>": {"p": 0.6, "q": 0.3, "r": 0.1},
        "p": {"q": 0.6, "r": 0.3, "p": 0.1},
        "q": {"p": 0.6, "r": 0.3, "q": 0.1},
        "r": {"p": 0.6, "q": 0.3, "r": 0.1},
        "<early>": {EOS: 0.7, "m": 0.3},
        "m": {EOS: 0.7, "m": 0.3},
        "<dice>": dice,
        "<note>": "one ",
        "one ": "<|note|>",
        "<|note|>": "two",
    }
    for shift, face in enumerate(faces):
        turned = dict(zip([*faces[shift:], *faces[:shift], EOS], dice.values(), strict=True))
        transitions[face] = turned
    for name in ("loop", *(f"n{number}" for number in range(10))):
        ring = [f"{name}:{index} " for index in range(7)]
        transitions[f"<{name}>"] = ring[0]
        transitions |= dict(zip(ring, [*ring[1:], ring[0]], strict=True))
    return write_chain_model(folder, transitions, recite={"<go>": TEXT, "<cat>": CAT}, max_model_len=MAX_MODEL_LEN)


def greedy(**options: Any) -> SamplingParams:
    """Parameters that leave no room for chance."""
    return SamplingParams(**{"temperature": 0, "max_tokens": 80} | options)


def assert_empty(engine: Engine) -> None:
    """No request, block or lane is left."""
    run(engine)  # a step that is still in flight
    assert engine.blocks_held == 0
    assert engine.num_waiting == 0
    assert not engine.has_work
    assert not engine._generations
    assert sorted(engine._scheduler._free_lanes) == list(range(FLAGS["max_num_seqs"]))
    engine._scheduler.pool.check_integrity([])


def run(engine: Engine, each_step: Callable[[int], None] = lambda step: None) -> dict[str, RequestOutput]:
    """Step until there is no work; the outputs by request."""
    collectors: dict[str, OutputCollector] = {}
    finished: set[str] = set()
    for step in range(3000):
        if not engine.has_work:
            return {request_id: collector.snapshot() for request_id, collector in collectors.items()}
        each_step(step)
        for delta in engine.step():
            assert delta.request_id not in finished
            collectors.setdefault(delta.request_id, OutputCollector()).add(delta)
            if delta.finished:
                finished.add(delta.request_id)
    pytest.fail("the engine never comes to an end")
