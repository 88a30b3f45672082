"""No surprise compiles: after warm-up, no request makes XLA compile anything."""

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.monitoring
import pytest

from pagedjax import LLM, SamplingParams

COMPILED = "/jax/core/compile/backend_compile_duration"
VOCAB = 320


@pytest.fixture(scope="module")
def compiles() -> Iterator[list[str]]:
    """The events of JAX itself, so that the engine's own count is checked against something else."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED:
            seen.append(f"{event} {duration_secs:.2f}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    assert seen, "JAX reports no compilations under this name any more: this test would prove nothing"


@pytest.fixture(scope="module")
def llm(compiles: list[str], tmp_path_factory: pytest.TempPathFactory, step_cache: Path) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 1024,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(str(folder), load_format="dummy", dtype="bfloat16", num_kv_blocks=400)


def any_params(rng: random.Random) -> SamplingParams:
    """Every option now and then."""

    def maybe(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if rng.random() < 0.3}

    tokens = [rng.randrange(VOCAB) for _ in range(5)]
    return SamplingParams(
        max_tokens=rng.randrange(1, 24),
        temperature=rng.choice([0.0, 0.7, 1.3]),
        **maybe(
            top_p=0.8, top_k=7, min_p=0.05, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2,
            seed=rng.randrange(100), stop_token_ids=tokens, ignore_eos=True, min_tokens=1, logprobs=rng.randrange(21),
            prompt_logprobs=rng.randrange(21), logit_bias=dict.fromkeys(tokens, 2.0), n=2, best_of=3,
            allowed_token_ids=[*tokens, 1, 2, 3],
        ),
    )  # fmt: skip


def test_200_mixed_requests_compile_nothing(llm: LLM, compiles: list[str]) -> None:
    rng = random.Random(5)
    requests = [([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 901))], any_params(rng)) for _ in range(200)]
    before = len(compiles)
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    assert len(compiles) == before
    assert llm.metrics()["compiles_after_warmup"] == 0
    for (_, params), output in zip(requests, outputs, strict=True):
        assert len(output.outputs) == params.n
        assert all(1 <= len(o.token_ids) <= (params.max_tokens or 0) for o in output.outputs)
    assert llm.engine.blocks_held == 0


def test_a_compile_is_counted(llm: LLM, compiles: list[str]) -> None:
    """Both counts see one, where there is one."""
    before, counted = len(compiles), llm.metrics()["compiles_after_warmup"]
    shapes = llm.engine._packer.shapes
    llm.engine._packer.shapes = dataclasses.replace(shapes, buckets=(72, *shapes.buckets[-1:]))
    llm.generate([[1] * 50], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(compiles) > before
    assert llm.metrics()["compiles_after_warmup"] == counted + 1
