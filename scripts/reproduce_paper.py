"""Reproduce the memory results of the PagedAttention paper (arXiv 2309.06180), ours beside the paper's.

Writes a report, paper.md, and its charts. Lengths are drawn from fits to the means that the paper states, since its
data sets are not here; lengths of a recorded trace stand beside them where one is given.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from paper_report import BLOCK_SIZES, SHARES, WIDTHS, Results, draw, page
from paper_runs import ALLOCATORS, Lengths, LogNormal, Recorded, serve

from pagedjax.config import UserError
from pagedjax.traces import read_trace

FITS = {
    "ShareGPT": LogNormal(161.31, 1.0, 337.99, 0.755),
    "Alpaca": LogNormal(19.31, 0.5, 58.45, 0.9),
}
STAYS = (0.0, 0.5, 0.8, 0.95)  # the first is the headline's
RATES = {"ShareGPT fit": 0.3, "Alpaca fit": 5.0, "recorded": 0.15}  # of figure 15, in groups a second: nobody waits
DATA_SETS = {
    "azure_llm_2023_conv": "the Azure LLM inference trace 2023, conversation (Azure Public Dataset, CC-BY 4.0)",
    "azure_llm_2023_code": "the Azure LLM inference trace 2023, code (Azure Public Dataset, CC-BY 4.0)",
    "mooncake_conversation": "the Mooncake conversation trace (FAST'25 release, Apache-2.0)",
}


def data_set(trace: Path) -> str:
    """What a trace is called in the report: its data set, or its name without folders."""
    return DATA_SETS.get(trace.name.split(".")[0], trace.name)


def say(line: str) -> None:
    """Print a line of progress."""
    print(f"reproduce_paper: {line}", file=sys.stderr, flush=True)


def measure(streams: Mapping[str, Lengths], scale: float) -> Results:
    """Run every experiment, with ``scale`` times as many requests."""

    def count(whole: int) -> int:
        return max(16, round(whole * scale))

    results = Results({}, {}, {}, {})
    for name, lengths in streams.items():
        say(f"{name}: allocators, forks, beams, block sizes")
        if name != "Alpaca fit":
            for share in SHARES:
                results.served[name, share] = {
                    kind: serve(lengths, 2.0, count(800), allocator=kind, bandwidth_share=share) for kind in ALLOCATORS
                }
        rate, searches = RATES[name], count(300 if name == "Alpaca fit" else 120)
        groups = count(120 if name == "recorded" else 400)
        results.shared[name, "parallel"] = [serve(lengths, rate, groups, n=n) for n in WIDTHS]
        results.shared[name, "beam"] = [serve(lengths, rate, searches, n=n, stay=STAYS[0]) for n in WIDTHS]
        results.block_sizes[name] = [serve(lengths, 3 * rate, count(220), block_size=size) for size in BLOCK_SIZES]
    say("Alpaca fit: beams that stay")
    alpaca = streams["Alpaca fit"]
    results.by_stay = {STAYS[0]: results.shared["Alpaca fit", "beam"]}
    for stay in STAYS[1:]:
        results.by_stay[stay] = [serve(alpaca, 5.0, count(300), n=n, stay=stay) for n in WIDTHS]
    return results


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="reproduce_paper", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, help="recorded lengths: an Azure or Mooncake trace")
    docs = Path(__file__).parents[1] / "docs"
    parser.add_argument("--output", type=Path, default=docs, metavar="FOLDER", help="gets paper.md and paper/")
    parser.add_argument("--quick", action="store_true", help="few requests: seconds, and numbers that mean little")
    arguments = parser.parse_args(argv)
    began = time.perf_counter()
    streams: dict[str, Lengths] = {f"{name} fit": fit for name, fit in FITS.items()}
    rows: list[tuple[int, int]] = []
    try:
        if arguments.trace:
            recorded = Recorded(tuple(read_trace(arguments.trace)))
            streams["recorded"] = recorded
            rows = recorded.draw(len(recorded.requests), np.random.default_rng(0))
        results = measure(streams, 0.04 if arguments.quick else 1.0)
        draw(results, arguments.output / "paper")
        name = data_set(arguments.trace) if arguments.trace else None
        report = page(results, FITS, name, rows, quick=arguments.quick)
        (arguments.output / "paper.md").write_text(report, encoding="utf-8")
    except UserError as error:
        print(f"reproduce_paper: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"reproduce_paper: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    say(f"wrote {arguments.output / 'paper.md'} in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
