"""Writes tests/golden/<model>/beams.json: beam searches of the golden models by Hugging Face transformers.

It needs an environment of its own (pagedjax itself runs without torch):

    python3.11 -m venv /tmp/hf && /tmp/hf/bin/pip install torch==2.13.0 transformers==5.24.0 numpy
    /tmp/hf/bin/python scripts/make_beam_golden.py tests/golden

Every model runs in float32 with eager attention over the prompts of its cases.npz. A case is kept only if its result
does not hang on rounding: without a KV cache, in float64, and with noise of NOISE on every log-probability, the
sequences must come out the same. End tokens are chosen so that some hypotheses end by one. It takes some minutes.
"""

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel

MODELS = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma3_text")
NOISE, NOISY_RUNS = 1e-4, 6  # other float32 engines are off by some 1e-5
ATTEMPTS = 14  # end tokens tried for a case

# prompt_len, beam_width, length_penalty, early_stopping, number of end tokens, max_tokens
PLAN: tuple[tuple[int, int, float, bool | str, int, int], ...] = (
    (1, 2, 1.0, False, 0, 24),
    (17, 4, 1.0, False, 0, 24),
    (45, 6, 0.0, "never", 0, 24),
    (1, 4, 1.0, False, 1, 24),
    (17, 4, 1.0, True, 1, 24),
    (17, 2, 2.0, "never", 1, 24),
    (45, 4, -0.5, False, 1, 24),
    (45, 6, 0.0, False, 2, 24),
    (17, 6, 1.0, "never", 2, 24),
    (1, 6, 2.0, True, 2, 24),
    (1, 2, -0.5, "never", 1, 24),
    (45, 4, 2.0, False, 2, 24),
    (17, 6, 0.5, True, 1, 12),
    (45, 4, 1.0, False, 1, 2),
    (17, 6, 1.0, True, 0, 1),
    (45, 2, 1.0, "never", 1, 1),
)


@dataclass(frozen=True)
class Search:
    """One call of generate; its fields are those of the golden file."""

    prompt_len: int
    beam_width: int
    length_penalty: float
    early_stopping: bool | str
    eos_token_ids: tuple[int, ...]
    max_tokens: int


class Noise(LogitsProcessor):
    """Normal noise on log-probabilities, other for each seed; a beam's and its copies' noise differs."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` and the noise."""
        return scores + NOISE * torch.randn(scores.shape, generator=self.generator)


def run(
    model: PreTrainedModel, prompt: list[int], search: Search, **options: Any
) -> tuple[list[list[int]], list[float]]:
    """The hypotheses, best first: output ids up to the end token, and scores."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=search.beam_width,
        num_return_sequences=search.beam_width,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        eos_token_id=list(search.eos_token_ids) or None,
        pad_token_id=0,
        max_new_tokens=search.max_tokens,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    sequences = []
    for row in found.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in search.eos_token_ids]
        sequences.append(row[: ends[0] + 1] if ends else row)
    return sequences, found.sequences_scores.tolist()


def stable_result(
    model: PreTrainedModel, exact: PreTrainedModel, prompt: list[int], search: Search
) -> tuple[list[list[int]], list[float]] | None:
    """The hypotheses, or None where rounding could change them. ``exact`` is the model in float64."""
    sequences, scores = run(model, prompt, search)
    others: list[tuple[PreTrainedModel, dict[str, Any]]] = [(model, {"use_cache": False}), (exact, {})]
    others += [(model, {"logits_processor": LogitsProcessorList([Noise(seed)])}) for seed in range(NOISY_RUNS)]
    same = all(run(other, prompt, search, **options)[0] == sequences for other, options in others)
    return (sequences, scores) if same else None


def end_token_choices(model: PreTrainedModel, prompt: list[int], search: Search, count: int) -> list[tuple[int, ...]]:
    """End tokens to try, the likeliest to show something first. ``search`` has none."""
    columns = zip(*run(model, prompt, search)[0], strict=True)
    found = list(dict.fromkeys(itertools.chain.from_iterable(columns)))  # in order of first appearance
    # An end token from early in the search, yet not from its start, makes the hypotheses differ most in length.
    found = sorted(found, key=lambda token: abs(found.index(token) - len(found) / 3))
    choices = sorted(itertools.combinations(range(len(found)), count), key=sum)
    return [tuple(found[i] for i in chosen) for chosen in choices[:ATTEMPTS]]


def make_cases(model: PreTrainedModel, exact: PreTrainedModel, prompts: dict[int, list[int]]) -> list[dict[str, Any]]:
    """The plan's cases that do not hang on rounding, each with the end tokens that show most."""
    cases = []
    for prompt_len, beam_width, length_penalty, early_stopping, num_eos, max_tokens in PLAN:
        prompt = prompts[prompt_len]
        plain = Search(prompt_len, beam_width, length_penalty, early_stopping, (), max_tokens)
        best: tuple[int, dict[str, Any]] | None = None
        for eos in end_token_choices(model, prompt, plain, num_eos):
            search = Search(prompt_len, beam_width, length_penalty, early_stopping, eos, max_tokens)
            result = run(model, prompt, search)
            lengths = {len(sequence) for sequence in result[0]}
            ending = {sequence[-1] for sequence in result[0]} & set(eos)
            shown = len(lengths) + 2 * len(ending)
            if len(ending) < min(num_eos, 1) or (best is not None and shown <= best[0]):
                continue
            if stable_result(model, exact, prompt, search) is not None:
                best = shown, {**vars(search), "sequences": result[0], "scores": [round(s, 6) for s in result[1]]}
        print(f"  {plain}, {num_eos} end tokens: {'dropped' if best is None else best[1]['eos_token_ids']}")
        if best is not None:
            cases.append(best[1])
    return cases


def as_text(golden: dict[str, Any]) -> str:
    """JSON with a line for each sequence."""
    lines = [f'{{"made_with": {json.dumps(golden["made_with"])},', ' "cases": [']
    for case in golden["cases"]:
        head = ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in case.items() if k != "sequences")
        rows = ",\n".join(f"    {json.dumps(row)}" for row in case["sequences"])
        end = "" if case is golden["cases"][-1] else ","
        lines.append(f'  {{{head},\n   "sequences": [\n{rows}]}}{end}')
    return "\n".join([*lines, " ]}\n"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("golden", type=Path, help="folder of the golden models")
    parser.add_argument("--models", nargs="+", default=MODELS)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in options.models:
        folder = options.golden / name
        model, exact = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
            for dtype in (torch.float32, torch.float64)
        )
        arrays = np.load(folder / "cases.npz")
        prompts = {len(arrays[key]): arrays[key].tolist() for key in arrays if key.endswith("/prompt")}
        print(name)
        made_with = f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager"
        golden = {"made_with": made_with, "cases": make_cases(model, exact, prompts)}
        (folder / "beams.json").write_text(as_text(golden))


if __name__ == "__main__":
    main()
