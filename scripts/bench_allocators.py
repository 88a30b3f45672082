"""Measure what paging is worth: the same engine and the same KV memory, with reservations in the pool's place.

The model is the random Llama of `bench_peers`. Lengths are those of the Azure conversation trace, or of what `--trace`
names, scaled to a mean of 400 tokens; all requests arrive at once. Paged blocks run as many sequences as the memory
holds; the baselines of the PagedAttention paper (arXiv 2309.06180, section 6.1) reserve each sequence's room when it is
admitted (`pagedjax.contiguous`). Runs alternate, and medians count.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench_peers import MODEL_CONFIG

from pagedjax.bench import clip, measure, random_prompts
from pagedjax.block_tables import BlockTables
from pagedjax.config import EngineConfig
from pagedjax.contiguous import KINDS, ContiguousTables
from pagedjax.engine import Engine
from pagedjax.loading import load_engine
from pagedjax.sizing import EngineSizes
from pagedjax.traces import read_trace

LENGTHS = Path(__file__).parents[1] / "tests" / "data" / "azure_conversation_lengths.csv"
MEAN_TOKENS = 400
MAX_MODEL_LEN = 2048


def lengths(trace: Path, count: int) -> list[tuple[int, int]]:
    """Prompt and output tokens of the trace's first requests, scaled."""
    requests = read_trace(trace, count)
    scale = MEAN_TOKENS * len(requests) / sum(r.prompt_tokens + r.output_tokens for r in requests)
    scaled = [r.scaled(scale) for r in requests]
    return clip([(r.prompt_tokens, r.output_tokens) for r in scaled], MAX_MODEL_LEN)[0]


def reserving(kind: str, sizes: EngineSizes) -> BlockTables:
    """Tables of a baseline."""
    return ContiguousTables(
        sizes.num_blocks,
        block_size=sizes.block_size,
        kind=kind,
        max_model_len=sizes.max_model_len,
        chunk=sizes.token_budget,
    )


def load(folder: str, memory: str, make_tables: Callable[[EngineSizes], BlockTables] | None) -> Engine:
    """An engine over the random Llama; prompts share nothing, so no prefix cache either."""
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        kv_cache_memory=memory,
        enable_prefix_caching=False,
    )
    return load_engine(config, make_tables=make_tables)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench_allocators", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, default=LENGTHS, help="an Azure or Mooncake trace")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--kv-cache-memory", default="128MiB", metavar="SIZE", help="of each engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs there")
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL_CONFIG))
        engines = {"paged": load(folder, arguments.kv_cache_memory, None)}
        for kind in KINDS:
            engines[f"contiguous-{kind}"] = load(folder, arguments.kv_cache_memory, partial(reserving, kind))
    drawn = lengths(arguments.trace, arguments.num_prompts)
    for number in range(arguments.rounds):
        prompts = random_prompts(drawn, MODEL_CONFIG["vocab_size"], 0, number)
        for name, engine in engines.items():
            numbers = measure(engine, prompts, [output for _, output in drawn])
            runs.setdefault(name, []).append(numbers)
            print(f"{name}: {numbers['output_tokens_per_s']} tokens/s", file=sys.stderr, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=2) + "\n")
    paged = statistics.median(run["output_tokens_per_s"] for run in runs["paged"])
    print("| allocator | output tokens/s | paged is faster by | mean TTFT, s | slots wasted |\n|---|---|---|---|---|")
    for name, listed in runs.items():
        rate = statistics.median(run["output_tokens_per_s"] for run in listed)
        ttft = statistics.median(run["ttft_ms"]["mean"] for run in listed) / 1e3
        print(f"| {name} | {rate:.0f} | {paged / rate:.2f} times | {ttft:.1f} | {engines[name].kv_waste:.1%} |")


if __name__ == "__main__":
    main()
