"""The golden models, and engines over them: one compiled runner per model and block size serves many engines."""

import json
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from pagedjax.config import BeamSearchParams, SamplingParams
from pagedjax.engine import Engine
from pagedjax.metrics import Metrics
from pagedjax.pack import StepShapes
from pagedjax.request import OutputCollector, RequestOutput
from pagedjax.runner import StepRunner
from pagedjax.sizing import EngineSizes
from pagedjax.weights import load_model

GOLDEN = Path(__file__).parent / "golden"
MODELS = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma3_text")
MAX_MODEL_LEN = 96
POOL_TOKENS = 17 * MAX_MODEL_LEN
SWAP_BLOCKS = 200


@dataclass(frozen=True)
class Case:
    """A prompt, and what Hugging Face makes of it."""

    prompt: list[int]
    logits: np.ndarray  # [n, vocab], row i after prompt token logits_start + i
    logits_start: int
    greedy: list[int]
    greedy_logprobs: np.ndarray
    top5_ids: np.ndarray
    top5_logprobs: np.ndarray


def cases(model: str) -> list[Case]:
    """The model's cases, shortest prompt first."""
    arrays = np.load(GOLDEN / model / "cases.npz")
    starts = {c["key"]: c["logits_start"] for c in json.loads((GOLDEN / model / "cases.json").read_text())["cases"]}
    return [
        Case(
            prompt=arrays[f"{key}/prompt"].tolist(),
            logits=arrays[f"{key}/logits"],
            logits_start=starts[key],
            greedy=arrays[f"{key}/greedy"].tolist(),
            greedy_logprobs=arrays[f"{key}/greedy_logprobs"],
            top5_ids=arrays[f"{key}/top5_ids"],
            top5_logprobs=arrays[f"{key}/top5_logprobs"],
        )
        for key in starts
    ]


@lru_cache(maxsize=8)  # each takes memory, and some 3,000 of the mappings that a process may have
def runner(model: str, dtype: str, block_size: int, attention_backend: str = "xla") -> StepRunner:
    """A warm runner of 24 lanes and up to 64 tokens a step."""
    graphdef, params, config = load_model(
        str(GOLDEN / model), dtype=dtype, attention_backend=attention_backend, show_progress=False
    )
    shapes = StepShapes.plan(
        config,
        max_num_seqs=24,
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        num_blocks=config.cache_layout.num_groups * POOL_TOKENS // block_size,
        token_budget=64,
    )
    made = StepRunner(graphdef, params, config, shapes, dtype, SWAP_BLOCKS)
    made.warm_up()
    return made


def blocks_of(model: str, num_tokens: int, block_size: int = 16) -> int:
    """Blocks that a request of so many tokens holds in all cache groups, were no window ever left behind."""
    return runner(model, "float32", block_size).shapes.num_groups * -(-num_tokens // block_size)


def engine(
    model: str, dtype: str = "float32", *, block_size: int = 16, token_budget: int = 64, num_blocks: int = 0,
    max_num_seqs: int = 24, prefix_caching: bool = False, swap_blocks: int = 0, eos_token_ids: tuple[int, ...] = (),
    attention_backend: str = "xla",
) -> Engine:  # fmt: skip
    """A new engine over the shared runner; ``num_blocks`` 0 is all that the runner has."""
    made = runner(model, dtype, block_size, attention_backend)
    sizes = EngineSizes(
        max_model_len=MAX_MODEL_LEN,
        num_blocks=num_blocks or made.shapes.num_blocks,
        block_size=block_size,
        max_num_seqs=min(max_num_seqs, token_budget),
        token_budget=token_budget,
        swap_blocks=swap_blocks,
    )
    return Engine(
        made, sizes, tokenizer=None, eos_token_ids=eos_token_ids, metrics=Metrics(model), prefix_caching=prefix_caching
    )


def run(
    engine: Engine,
    requests: ListLike[tuple[list[int], SamplingParams | BeamSearchParams]],
    arrivals: list[int] | None = None,
) -> list[RequestOutput]:
    """Serve the requests, request i from step ``arrivals[i]`` on (all at once by default), to their ends."""
    waiting = sorted(range(len(requests)), key=lambda i: arrivals[i] if arrivals else 0)
    collectors = [OutputCollector() for _ in requests]
    done: dict[int, RequestOutput] = {}
    step = 0
    while len(done) < len(requests):
        while waiting and (not arrivals or arrivals[waiting[0]] <= step):
            index = waiting.pop(0)
            prompt, params = requests[index]
            engine.add_request(str(index), prompt, params)
        for delta in engine.step():
            index = int(delta.request_id)
            collectors[index].add(delta)
            if delta.finished:
                done[index] = collectors[index].snapshot()
        step += 1
    while engine.has_work:  # the step in flight
        engine.step()
    assert engine.blocks_held == 0, "an idle engine holds nothing"
    return [done[i] for i in range(len(requests))]
