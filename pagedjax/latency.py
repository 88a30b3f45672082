"""A run's throughput and latencies by the names that every report uses, measured or simulated."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def throughput(num_requests: int, prompt_tokens: int, output_tokens: int, elapsed: float) -> dict[str, Any]:
    """What was done in ``elapsed`` seconds, and how much of it per second."""
    return {
        "num_prompts": num_requests,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "elapsed_s": round(elapsed, 4),
        "requests_per_s": round(num_requests / elapsed, 3),
        "output_tokens_per_s": round(output_tokens / elapsed, 2),
        "total_tokens_per_s": round((prompt_tokens + output_tokens) / elapsed, 2),
    }


def latencies(
    *, ttft: Sequence[float], tpot: Sequence[float], itl: Sequence[float], e2el: Sequence[float]
) -> dict[str, Any]:
    """Spreads, in milliseconds, of what is given in seconds.

    Args:
        ttft: time to the first token, of each request.
        tpot: mean time per output token after the first, of each request that has two or more.
        itl: time between two tokens of a sequence, of all such pairs.
        e2el: time to the last token, of each request.
    """
    of = {"ttft_ms": ttft, "tpot_ms": tpot, "itl_ms": itl, "e2el_ms": e2el}
    return {name: spread(seconds) for name, seconds in of.items()}


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Of seconds, in milliseconds; None where there is nothing, as between the tokens of one-token outputs."""
    if not len(seconds):
        return None
    ms = np.asarray(seconds) * 1000
    values = {"mean": ms.mean(), "median": np.median(ms)}
    values |= {"p90": np.percentile(ms, 90), "p99": np.percentile(ms, 99)}
    return {name: round(float(value), 3) for name, value in values.items()}
