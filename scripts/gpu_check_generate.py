"""Section `generate` of the GPU check: the whole engine with the kernels, against the same with plain XLA."""

import gc
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_peers import MODEL_CONFIG
from gpu_check_cases import Case, Result, Run, Setup

from pagedjax import LLM, SamplingParams

SIZES = {"requests": 32, "prompt": 128, "new": 64}
FLAGS = {"max_model_len": 512, "max_num_seqs": 32, "max_num_batched_tokens": 256, "kv_cache_memory": "512MiB"}
TOY_CONFIG = MODEL_CONFIG | {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
TOY_SIZES = {"requests": 2, "prompt": 12, "new": 3}
TOY_FLAGS = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "num_kv_blocks": 16}
# Between log-probabilities of the same tokens, on average: each is rounded otherwise in bfloat16.
TOLERANCE = 0.05


def cases(setup: Setup) -> list[Case]:
    """One: a comparison."""
    if setup.interpret:
        return [Comparison("pallas-interpret", TOY_CONFIG, TOY_SIZES, TOY_FLAGS)]
    return [Comparison("pallas", MODEL_CONFIG, SIZES, FLAGS)]


@dataclass(frozen=True)
class Comparison:
    """Greedy tokens, log-probabilities of the prompts, and tokens a second, of ``backend`` and of ``xla``.

    Attributes:
        config: of a Llama with random weights, which are the same for both.
        sizes: ``requests`` of ``prompt`` tokens, each of which gives ``new`` ones.
        flags: of the engine.
    """

    backend: str
    config: dict[str, Any]
    sizes: dict[str, int]
    flags: dict[str, Any]
    name: str = "generate"
    is_trial: bool = False

    def build(self) -> Run:
        """Nothing: an engine compiles as it starts, and two would be in memory at once."""
        return self._run

    def _run(self) -> Result:
        ours, theirs = self._generate(self.backend), self._generate("xla")
        pairs = list(zip(ours["tokens"], theirs["tokens"], strict=True))
        equal = [one == other for pair in pairs for one, other in zip(*pair, strict=True)]
        firsts = [one[0] == other[0] for one, other in pairs]
        gaps = [abs(one - other) for one, other in zip(ours["logprobs"], theirs["logprobs"], strict=True)]
        gap = sum(gaps) / len(gaps)
        message = {} if gap <= TOLERANCE else {"message": f"log-probabilities differ by {gap:.3f} on average"}
        return {
            "status": "failed" if message else "ok",
            "equal_tokens": sum(equal) / len(equal),
            "equal_first_tokens": sum(firsts) / len(firsts),
            "mean_logprob_gap": gap,
            "most_logprob_gap": max(gaps),
            "tokens_per_s": {self.backend: ours["tokens_per_s"], "xla": theirs["tokens_per_s"]},
            "start_s": {self.backend: ours["start_s"], "xla": theirs["start_s"]},
        } | message

    def _generate(self, backend: str) -> dict[str, Any]:
        rng = random.Random(0)
        ids = range(3, self.config["vocab_size"])
        prompts, warming = (
            [rng.choices(ids, k=self.sizes["prompt"]) for _ in range(self.sizes["requests"])] for _ in range(2)
        )
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.config))
            llm = LLM(folder, load_format="dummy", dtype="bfloat16", attention_backend=backend, **self.flags)
        start_s = time.perf_counter() - start
        params = SamplingParams(temperature=0, max_tokens=self.sizes["new"], ignore_eos=True)
        llm.generate(warming, params, use_tqdm=False)
        start = time.perf_counter()
        outputs: Any = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        scored: Any = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        result = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "logprobs": [
                entry[token].logprob
                for output, prompt in zip(scored, prompts, strict=True)
                for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
            ],
            "tokens_per_s": self.sizes["requests"] * self.sizes["new"] / seconds,
            "start_s": start_s,
        }
        del llm
        gc.collect()
        return result
