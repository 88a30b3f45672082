"""The report of the GPU check as Markdown tables."""

from collections.abc import Iterator, Sequence
from typing import Any

Report = dict[str, Any]
Row = Sequence[str]

# What the kernels are made to reach: a case of a section, what is read off it, and the least of that.
TARGETS = (
    ("decode, share of copy speed", "attention", "decode 64 x 4096: Llama 3 8B, bfloat16", "share", 0.80),
    ("prefill, TFLOP/s", "attention", "chunk 8192 after 0: Llama 3 8B, bfloat16", "tflops", 350.0),
    ("4-bit weights at one row, share of copy speed", "matmul", "W4A16: 1 x 4096 x 28672", "share", 0.65),
)


def results(report: Report, section: str) -> dict[str, dict[str, Any]]:
    """A section's results by case."""
    found: dict[str, dict[str, Any]] = report["sections"].get(section, {}).get("results", {})
    return found


def failures(report: Report, sections: Sequence[str]) -> list[tuple[str, str, str]]:
    """Section, case and message of every case that failed and was no trial."""
    return [
        (section, case, result["message"])
        for section in sections
        for case, result in results(report, section).items()
        if result["status"] == "failed" and not result.get("trial")
    ]


def left_out(report: Report, sections: Sequence[str]) -> Iterator[str]:
    """What there was no time for, a line for each section."""
    for section in sections:
        if section not in report["sections"]:
            yield f"{section}: all of it"
            continue
        missing = [case for case in report["sections"][section]["planned"] if case not in results(report, section)]
        if missing:
            yield f"{section}: {'; '.join(missing)}"


def page(report: Report, sections: Sequence[str]) -> str:
    """All of it."""
    facts = report.get("facts", {})
    title = f"{facts.get('device', 'no device')}, jax {facts.get('jax', '?')}"
    parts = [f"# GPU check: {title}"]
    if facts.get("interpret"):
        parts.append("**Interpreted on a CPU at toy sizes: no time here means anything.**")
    failed = failures(report, sections)
    rows = [[section, case, message.replace("|", "/")] for section, case, message in failed]
    parts.append(f"## {len(failed)} cases failed\n\n" + table(["section", "case", "message"], rows))
    skipped = list(left_out(report, sections))
    if skipped:
        parts.append("## No time was left for\n\n" + "\n".join(f"- {line}" for line in skipped))
    parts += [_rates(report), _targets(report), _correctness(report), _attention(report), _matmul(report)]
    parts += [_searches(report), _peers(report), _generate(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(head: Row, rows: Sequence[Row]) -> str:
    """A Markdown table; nothing if it has no rows."""
    if not rows:
        return ""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _section(title: str, head: Row, rows: Sequence[Row]) -> str:
    return f"## {title}\n\n{table(head, rows)}" if rows else ""


def rates(report: Report) -> tuple[float | None, float | None]:
    """The card's bytes/s of copying, and bfloat16 operations/s, if they were measured."""
    found = results(report, "rates")
    return found.get("copy", {}).get("bytes_per_s"), found.get("product", {}).get("flops_per_s")


def share(report: Report, result: dict[str, Any]) -> float | None:
    """The least time that the card's rates allow, over the time it took."""
    copied, multiplied = rates(report)
    if copied is None or multiplied is None or "us" not in result:
        return None
    floor = max(result["bytes"] / copied, result["flops"] / (multiplied * result.get("rate_factor", 1)))
    return float(1e6 * floor / result["us"])


def _speeds(report: Report, result: dict[str, Any]) -> list[str]:
    """Time, GB/s, TFLOP/s and share of the floor; or why there are none."""
    if "us" not in result:
        return [result.get("message", result["status"]).replace("|", "/"), "", "", ""]
    part = share(report, result)
    moved, done = result["bytes"] / result["us"] / 1e3, result["flops"] / result["us"] / 1e6
    return [f"{result['us']:.1f}", f"{moved:.0f}", f"{done:.1f}", "" if part is None else f"{part:.0%}"]


SPEEDS = ["us", "GB/s", "TFLOP/s", "of the floor"]


def _rates(report: Report) -> str:
    found, (copied, multiplied) = results(report, "rates"), rates(report)
    rows = []
    if copied is not None:
        rows.append(["copy, bytes read and written", f"{copied / 1e12:.2f} TB/s"])
    if multiplied is not None:
        rows.append(["bfloat16 product", f"{multiplied / 1e12:.0f} TFLOP/s"])
    if "us" in found.get("launch", {}):
        rows.append(["a kernel with nothing to do", f"{found['launch']['us']:.1f} us"])
    return _section("The card's rates", ["", ""], rows)


def _targets(report: Report) -> str:
    rows = []
    for title, section, case, kind, target in TARGETS:
        result = results(report, section).get(case, {})
        if "us" not in result:
            continue
        if kind == "share":
            value = share(report, result)
            text = "" if value is None else f"{value:.0%} of {target:.0%}"
        else:
            value = result["flops"] / result["us"] / 1e6
            text = f"{value:.0f} of {target:.0f}"
        rows.append([title, text, "" if value is None else "reached" if value >= target else "missed"])
    return _section("Targets", ["", "measured, of the target", ""], rows)


def _correctness(report: Report) -> str:
    rows = []
    for case, result in results(report, "correctness").items():
        error = result.get("error")
        shown = "" if error is None else f"{error:.1e} of {result['tolerance']:.1e}"
        rows.append([case, shown, result["status"]])
    return _section("Correctness", ["kernel", "worst error, of what is allowed", ""], rows)


def _attention(report: Report) -> str:
    rows = []
    for case, result in results(report, "attention").items():
        if not result.get("trial"):
            shape, _, kind = case.partition(": ")
            rows.append([shape, kind, *_speeds(report, result), _note(result)])
    return _section("Attention", ["shape", "model, cache", *SPEEDS, ""], rows)


def _note(result: dict[str, Any]) -> str:
    return f"scaled down to {result['scaled']}" if "scaled" in result else ""


def _matmul(report: Report) -> str:
    rows = [
        [*case.split(": ")[:2], *_speeds(report, result)]
        for case, result in results(report, "matmul").items()
        if not result.get("trial")
    ]
    return _section("Products with quantised weights", ["weights", "rows x inputs x outputs", *SPEEDS], rows)


def _searches(report: Report) -> str:
    """Of each searched case the tiles, the quickest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, list[str]] = {}
    for section in ("attention", "matmul"):
        for case, result in results(report, section).items():
            name, is_search, tiles = case.partition(", tiles ")
            if is_search and "us" in result:
                found.setdefault(name, []).append(result)
            elif is_search:
                failed.setdefault(name, []).append(f"{tiles} ({result['message'].replace('|', '/')})")
    parts = []
    for name, tried in found.items():
        tried.sort(key=lambda result: result["us"])
        rows = [[result["tiles"], *_speeds(report, result), "table" if result["is_own"] else ""] for result in tried]
        lines = [f"### {name}: best is {tried[0]['tiles']}", table(["tiles", *SPEEDS, ""], rows)]
        lines += [f"Failed: {'; '.join(failed[name])}"] if name in failed else []
        parts.append("\n\n".join(lines))
    return "\n\n".join(["## Tiles beside the table's", *parts]) if parts else ""


def _peers(report: Report) -> str:
    """Ours beside theirs, for the shapes of Llama 3 8B or of the model that a case names."""
    rows, notes = [], []
    ours = results(report, "attention")
    for case, result in results(report, "peers").items():
        peers = result.get("rows", [result])
        if not any("us" in row for row in peers):
            notes.append(f"{case}: {result.get('message', result['status'])}")
            continue
        for row in peers:
            model = row.get("model", "Llama 3 8B")
            own = ours.get(f"{row['shape']}: {model}, bfloat16", {})
            ratio = f"{row['us'] / own['us']:.2f}" if "us" in own else ""
            rows.append([row.get("peer", case), row["shape"], model, *_speeds(report, row), ratio, _note(row)])
    text = _section("Peers", ["peer", "shape", "model", *SPEEDS, "its time over ours", ""], rows)
    return "\n\n".join([*([text] if text else []), *notes])


def _generate(report: Report) -> str:
    result = results(report, "generate").get("generate", {})
    if "tokens_per_s" not in result:
        return ""
    rows = [
        *([f"tokens/s, {name}", f"{value:.0f}"] for name, value in result["tokens_per_s"].items()),
        *([f"start, compiling included, {name}", f"{value:.0f} s"] for name, value in result["start_s"].items()),
        ["greedy tokens that are equal", f"{result['equal_tokens']:.1%}"],
        ["first tokens that are equal", f"{result['equal_first_tokens']:.1%}"],
        ["gap between log-probabilities, mean and most", f"{result['mean_logprob_gap']:.4f}, "
         f"{result['most_logprob_gap']:.4f}"],
    ]  # fmt: skip
    return _section("The whole engine", ["", ""], rows)
