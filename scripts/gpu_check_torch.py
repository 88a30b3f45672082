"""Times of PyTorch's scaled dot-product attention; `gpu_check_peers` runs this with the shapes as JSON.

Caches are dense here, one piece for each sequence and head: what a paged kernel is held against, not another one.
"""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    """Read the shapes, print the times in microseconds."""
    asked = json.loads(sys.argv[1])
    if not torch.cuda.is_available():
        print(json.dumps({"status": "skipped", "message": "PyTorch sees no CUDA device"}))
        return
    rows = [decode(asked, sequences, context) for sequences, context in asked["decodes"]]
    rows += [chunk(asked, tokens) for tokens in asked["chunks"]]
    print(json.dumps({"status": "ok", "version": torch.__version__, "rows": rows}))


def decode(asked: dict[str, Any], sequences: int, context: int) -> dict[str, Any]:
    """One query for each sequence."""
    q = random(sequences, asked["heads"], 1, asked["head_dim"])
    k, v = (random(sequences, asked["kv_heads"], context, asked["head_dim"]) for _ in range(2))
    seconds = median_seconds(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True))
    return {"shape": f"decode {sequences} x {context}", "us": 1e6 * seconds}


def chunk(asked: dict[str, Any], tokens: int) -> dict[str, Any]:
    """A prompt, causal."""
    q = random(1, asked["heads"], tokens, asked["head_dim"])
    k, v = (random(1, asked["kv_heads"], tokens, asked["head_dim"]) for _ in range(2))
    seconds = median_seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    return {"shape": f"chunk {tokens} after 0", "us": 1e6 * seconds}


def random(*shape: int) -> Any:
    """Normal numbers in bfloat16, on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def median_seconds(call: Callable[[], Any], calls: int = 10, samples: int = 7) -> float:
    """Median of samples of several calls each, by the GPU's own events, after as many for warming up."""
    taken = []
    for _ in range(2 * samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(taken[samples:])


if __name__ == "__main__":
    main()
