"""The page that `reproduce_paper` writes: tables of ours beside the paper's (arXiv 2309.06180), and its charts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from paper_plot import bar_chart
from paper_runs import (
    ALLOCATORS,
    BANDWIDTH,
    FLOPS_SHARE,
    GIB,
    KV_SLOTS,
    OPT_13B,
    OPT_66B,
    OPT_175B,
    PEAK_FLOPS,
    LogNormal,
    Usage,
)

NAMES = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "paged": "vLLM / pagedjax"}
WIDTHS = (2, 4, 6)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARES = {1.0: "whole bandwidth", 0.5: "half the bandwidth"}

# The paper's: table 1, figure 2 (percent of memory), figure 13 (sequences), figure 15 (percent of blocks).
PAPER_SLOTS = (
    ("OPT-13B", "A100-40GB", OPT_13B, 40, 12, 15.7),
    ("OPT-66B", "4 x A100-40GB", OPT_66B, 160, 21, 9.7),
    ("OPT-175B", "8 x A100-80GB", OPT_175B, 640, 264, 60.1),
)
PAPER_PARTS = {"max": (20.4, 13.3, 57.3, 8.9), "pow2": (26.8, 17.9, 13.6, 41.6), "oracle": (38.2, 25.2, 0.0, 36.6)}
PAPER_FILLED = 96.3
PAPER_RUNNING = {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42}
PAPER_SAVED: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("Alpaca fit", "parallel"): (6.09, 8.53, 9.79),
    ("Alpaca fit", "beam"): (37.56, 53.13, 55.16),
    ("ShareGPT fit", "parallel"): (16.2, None, 30.5),
    ("ShareGPT fit", "beam"): (44.3, None, 66.3),
}


@dataclass
class Results:
    """What was measured, by name of the lengths; of figure 15 also by method, one entry per width."""

    served: dict[tuple[str, float], dict[str, Usage]]  # also by share of the bandwidth
    shared: dict[tuple[str, str], list[Usage]]
    by_stay: dict[float, list[Usage]]  # beams with Alpaca's lengths
    block_sizes: dict[str, list[Usage]]


def mean(values: Sequence[float]) -> float:
    """Over steps."""
    return float(np.mean(values))


def parts(usage: Usage) -> list[float]:
    """Means of the four parts of the memory, in percent."""
    return [100 * float(part) for part in np.mean(usage.parts, axis=0)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def beside(ours: float, paper: float | None, digits: int = 1) -> str:
    """Our number, and the paper's in bold where it has one."""
    return f"{ours:.{digits}f}" + ("" if paper is None else f" (**{paper:.{digits}f}**)")


def table_1() -> str:
    """KV slots from shape and memory."""
    rows = []
    for name, gpus, model, memory, kv, paper in PAPER_SLOTS:
        weights = 2 * model.parameters
        left = 0.9 * memory * GIB - weights
        slots = [size / model.slot_bytes / 1e3 for size in (kv * GIB, left)]
        rows.append(
            [
                name,
                gpus,
                f"{weights / 1e9:.1f} GB",
                f"{model.slot_bytes:,}",
                f"{kv} GiB",
                f"{slots[0]:.1f}K",
                f"**{paper}K**",
                f"{left / GIB:.1f} GiB: {slots[1]:.1f}K",
            ]
        )
    head = ("model", "GPUs", "weights", "bytes/slot", "KV memory, paper", "slots, ours", "slots, paper",
            "90% of memory less weights")  # fmt: skip
    return table(head, rows)


def figure_2(results: Results) -> str:
    """Where the memory goes."""
    rows = []
    for (lengths, share), served in results.served.items():
        if share != 0.5:
            continue
        for kind in ALLOCATORS:
            usage = served[kind]
            paper: tuple[float | None, ...] = (None,) * 4
            is_fit = lengths == "ShareGPT fit"
            if is_fit and kind in PAPER_PARTS:
                paper = PAPER_PARTS[kind]
            cells = [beside(*pair) for pair in zip(parts(usage), paper, strict=True)]
            held = beside(100 * mean(usage.filled), PAPER_FILLED if is_fit and kind == "paged" else None)
            rows.append([lengths, NAMES[kind], *cells, held])
    head = ("lengths", "allocator", "token states", "reservation", "internal", "external, free", "states, of held")
    return table(head, rows)


def figure_13(results: Results) -> str:
    """Sequences that run at once."""
    rows = []
    for (lengths, share), served in results.served.items():
        paper = PAPER_RUNNING if lengths == "ShareGPT fit" else {}
        cells = [beside(mean(served[kind].running), paper.get(kind), 2) for kind in ALLOCATORS]
        rows.append([lengths, SHARES[share], *cells, str(served["paged"].preemptions)])
    return table(("lengths", "step time", *NAMES.values(), "preemptions, paged"), rows)


def figure_15(results: Results) -> str:
    """Blocks saved by sharing."""
    rows = []
    for (lengths, method), usages in results.shared.items():
        paper = PAPER_SAVED.get((lengths, method), (None,) * len(WIDTHS))
        cells = [beside(100 * mean(usage.saved), value, 2) for usage, value in zip(usages, paper, strict=True)]
        rows.append([lengths, method, *cells])
    return table(("lengths", "method", *map(str, WIDTHS)), rows)


def stays(results: Results) -> str:
    """What the choice of parents does to a beam search's sharing."""
    rows = [
        [f"{stay:g}", *(f"{100 * mean(usage.saved):.2f}" for usage in usages)]
        for stay, usages in sorted(results.by_stay.items())
    ]
    return table(("stay", *map(str, WIDTHS)), rows)


def figure_18b(results: Results) -> str:
    """Waste by block size."""
    rows = [
        [lengths, *(f"{100 * (1 - mean(usage.filled)):.1f}" for usage in usages)]
        for lengths, usages in results.block_sizes.items()
    ]
    return table(("lengths", *map(str, BLOCK_SIZES)), rows)


PAGE = """\
# The paper, reproduced

Memory results of arXiv 2309.06180, *Efficient Memory Management for Large Language Model Serving with
PagedAttention* (Kwon et al., SOSP 2023): ours, and **the paper's** beside them. `scripts/reproduce_paper` writes
this page, the same at every run.{quick}

## What was run

The scheduler, block pool and block tables of this project, unchanged, with real sequences, forks and copies on write;
only the step is replaced, by its time. The baselines are `pagedjax.contiguous`: one region of a buddy allocator per
sequence, as long as the model allows (Max), the prompt and the next power of two of the output (Pow2), or prompt and
output as long as they will be (Oracle). The paged pool has blocks of 16 and no prefix cache.

- **Memory**: 12 GiB, {slots:,} slots, beside OPT-13B on one A100-40GB. At most 2,048 tokens in a sequence.
- **ShareGPT fit, Alpaca fit: drawn, not the data sets**, which are not here. Prompts and outputs are independent
  and log-normal with the means that the paper states, pairs of more than 2,048 tokens are drawn anew:
{lengths}.
  The paper states no spread. The sigma of ShareGPT's outputs follows from figure 2 (13.3% of the slots are reserved
  by seven sequences: 299 each, which is E[O²] / 2E[O]), so the split of Max is no independent result; the other
  three sigmas are guesses, made before any result was seen.
{recorded}
- **Arrivals**: Poisson. 2 requests/s for figures 2 and 13; so few for figures 15 and 18b that nobody waits long.
- **Step time**: the roofline of OPT-13B on that GPU, {weight_ms:.1f} ms for the weights ({weights:.1f} GB at
  {bandwidth:.3f} TB/s), {slot_us:.2f} us for each slot read and {token_us:.0f} us for each token computed
  ({share:.0%} of {flops:.0f} TFLOP/s). "Half the bandwidth" doubles the first two.
- Means are over steps, from the arrival of the tenth part of the requests to that of the last. There is one draw of
  requests per row: with as few as these, another draw moves figures 2, 13 and 15 by some points.

## Table 1: KV slots

{table_1}

A slot is 2 x layers x hidden size x 2 bytes. *Slots, ours* divides the paper's memory for the cache, which it
rounds to whole GB. The last column counts from shape and GPU memory alone, with a tenth of the GPUs kept for
activations; for OPT-175B
the paper's 264 GiB leave less than that, 8%.

## Figure 2: where the KV memory goes

![Percent of the KV memory that holds token states](paper/figure_2.png)

{figure_2}

Percent of all slots, at half the bandwidth. *Reservation* is room for tokens to come, *internal* room that no token
will ever fill, *external* what nobody asked for: free, or what a region of 2^k blocks has beyond the length
reserved. For the paged pool the last column is the one to compare: 96.3% cannot be a share of the whole memory,
because 30.42 sequences (figure 13) of the 458 tokens that the bar of Max implies fill 89% of it. Ours is higher
than 96.3% because only the last block of a sequence can be partly empty, about half a block of 16 in some 450
slots; the paper does not say how it averages.

## Figure 13: sequences that run at once

![Mean number of sequences that run](paper/figure_13.png)

{figure_13}

Max is bound by memory at any speed: seven regions of 2,048. The others depend on the step time as soon as the
memory is not full. 30.42 sequences at 2 requests/s of 337.99 tokens are {paper_ms:.0f} ms per token (Little's law),
if vLLM kept up; its
steps were then longer than the roofline's: at the whole bandwidth our steps are so short that fewer requests are
in flight, which is not a worse allocator; at half of it
the pool is nearly full, and ours comes near the paper's number. No
other share was tried.

## Figure 15: memory saved by sharing

![Percent of blocks saved by sharing, Alpaca fit](paper/figure_15.png)

{figure_15}

Preemptions in these runs: {preemptions}
(a preempted sequence is computed again, without sharing). Percent: 1 less
physical blocks held over entries of all block tables, averaged over steps, for 2, 4 and 6 sequences
per request. For ShareGPT the paper gives the range alone. Beams fork and end on the real scheduler, but no model
ranks them: each of the new beams draws its parent from the softmax of standard normal scores, drawn anew in each
step, and none ends before its output's length. Such beams soon have one ancestor in common. Where a beam instead
goes on from itself with probability *stay*, and draws a parent otherwise, sharing falls (Alpaca fit):

{stays}

Stay = 0 has no parameter; it became the headline after these rows had been seen.
At a width of 6 ours saves more than the paper's, on ShareGPT by far, perhaps because
real beams run side by side for longer than independent draws do, which the rows with a larger *stay* imitate, or
because they end at end tokens. Which of these it is was not tested.

Parallel samples share only the prompt's full blocks (and its last one until it is written), so their saving hangs on
the spread of the prompts, which for both data sets is a guess.

## Figure 18b, the memory half: block size

![Percent of held slots that are empty, by block size](paper/figure_18b.png)

{figure_18b}

Percent of held slots without a token. The paper's figure shows latency and gives no numbers for memory; it finds 16
to 128 good for ShareGPT and 16 and 32 for Alpaca, whose sequences are shorter than the larger blocks."""


def page(
    results: Results, fits: dict[str, LogNormal], recorded: str | None, rows: Sequence[tuple[int, int]], *, quick: bool
) -> str:
    """The report. ``recorded`` names the data set of the recorded lengths ``rows``, which are cut; None without one."""
    lengths = ";\n".join(
        f"  {name}, prompt {fit.prompt_mean} (sigma {fit.prompt_sigma}), output {fit.output_mean} "
        f"(sigma {fit.output_sigma})"
        for name, fit in fits.items()
    )
    about = "- **Recorded lengths**: none were given to this run."
    if recorded is not None:
        prompt, output = np.mean(np.array(rows), axis=0)
        about = (
            f"- **Recorded: real lengths**, drawn from {recorded}; {len(rows):,} requests, cut to 2,048 tokens,\n"
            f"  then of mean {prompt:.0f} and {output:.0f}. Arrivals are Poisson too. The paper has no such numbers."
        )
    return PAGE.format(
        quick=" **This is a quick run: too few requests to mean anything.**" if quick else "",
        slots=KV_SLOTS,
        lengths=lengths,
        recorded=about,
        weights=2 * OPT_13B.parameters / 1e9,
        weight_ms=2e3 * OPT_13B.parameters / BANDWIDTH,
        bandwidth=BANDWIDTH / 1e12,
        slot_us=1e6 * OPT_13B.slot_bytes / BANDWIDTH,
        token_us=2e6 * OPT_13B.parameters / (PEAK_FLOPS * FLOPS_SHARE),
        share=FLOPS_SHARE,
        flops=PEAK_FLOPS / 1e12,
        paper_ms=1e3 * PAPER_RUNNING["paged"] / (2 * 337.99),
        table_1=table_1(),
        figure_2=figure_2(results),
        figure_13=figure_13(results),
        figure_15=figure_15(results),
        preemptions=", ".join(
            f"{name} {method} {sum(usage.preemptions for usage in usages)}"
            for (name, method), usages in results.shared.items()
        ),
        stays=stays(results),
        figure_18b=figure_18b(results),
    )


def draw(results: Results, folder: Path) -> None:
    """The charts."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["Orca Max", "Orca Pow2", "Orca Oracle", "vLLM/pagedjax"]
    served = results.served["ShareGPT fit", 0.5]
    states = [parts(served[kind])[0] for kind in PAPER_PARTS] + [100 * mean(served["paged"].filled)]
    paper = [shares[0] for shares in PAPER_PARTS.values()] + [PAPER_FILLED]
    title = "Token states, % of KV memory (vLLM: of held)"
    bar_chart(folder / "figure_2.png", title, names, {"ours": states, "paper": paper})
    whole = results.served["ShareGPT fit", 1.0]
    running = {
        "ours": [mean(whole[kind].running) for kind in ALLOCATORS],
        "half bandwidth": [mean(served[kind].running) for kind in ALLOCATORS],
        "paper": list(PAPER_RUNNING.values()),
    }
    bar_chart(folder / "figure_13.png", "Sequences running, ShareGPT fit, 2 req/s", names, running)
    saved: dict[str, list[float | None]] = {"ours": [], "paper": []}
    for method in ("parallel", "beam"):
        saved["ours"] += [100 * mean(usage.saved) for usage in results.shared["Alpaca fit", method]]
        saved["paper"] += PAPER_SAVED["Alpaca fit", method]
    groups = [f"{method} {width}" for method in ("parallel", "beam") for width in WIDTHS]
    bar_chart(folder / "figure_15.png", "Blocks saved by sharing, %, Alpaca fit", groups, saved)
    wasted = {
        name: [100 * (1 - mean(usage.filled)) for usage in usages] for name, usages in results.block_sizes.items()
    }
    first = BLOCK_SIZES.index(8)  # smaller ones waste next to nothing
    title = "Empty slots, % of held, by block size"
    shown = {name: values[first:] for name, values in wasted.items()}
    bar_chart(folder / "figure_18b.png", title, [str(size) for size in BLOCK_SIZES[first:]], shown)
