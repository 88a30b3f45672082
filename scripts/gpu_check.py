"""Check and measure the kernels on a machine with an NVIDIA GPU, in 8 minutes with all compiling.

Sections: `rates`, what the card itself reaches; `correctness`, every kernel against its reference; `attention` and
`matmul`, times as a share of what the card's rates allow, and tiles beside those of the tuning table; `peers`, other
people's attention; `generate`, the whole engine against the same with plain XLA.

jax must see the GPU: the CUDA plugin of the very version of jax has to be installed beside it, as in
`.venv/bin/pip install "jax[cuda13]==0.12.0.1"` (or cuda12, by the machine's driver); or set PYTHON to an interpreter
that has one.

Every result is written as soon as it is there. A run with the same file goes on with what is missing, and names what
it had no time for. Exit status: 0 all is well, 1 a case failed, 2 wrong usage, 3 there is no GPU.
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_check_report import failures, left_out, page

WEIGHTS = {"rates": 1, "correctness": 5, "attention": 6, "matmul": 3, "peers": 2, "generate": 4}  # shares of the time
SILENCE_S = {"generate": 240.0}  # after which a worker hangs, 100 elsewhere
GRACE_S = 20.0  # past the end of the time
LOG_LINES = 8
NO_GPU = 3


class Stop(Exception):
    """Ends the run with a line and an exit status."""

    def __init__(self, status: int, line: str):
        super().__init__(line)
        self.status = status


@dataclass
class Worker:
    """The process that runs cases, as the driver sees it."""

    process: subprocess.Popen[str]
    log: Path
    events: "queue.Queue[dict[str, Any] | None]" = field(default_factory=queue.Queue)
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)

    @classmethod
    def start(cls, command: Sequence[str], orders: dict[str, Any], log: Path) -> "Worker":
        """Start it on its orders."""
        with log.open("a") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True,
                env=environment(os.environ, orders["interpret"]),
            )  # fmt: skip
        worker = cls(process, log)
        assert process.stdin is not None
        process.stdin.write(json.dumps(orders))
        process.stdin.close()
        worker.reader.start()
        return worker

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))
        self.events.put(None)

    def next_event(self, seconds: float) -> dict[str, Any]:
        """What happens next: an event of the worker's, or ``died`` or ``silent`` with a message."""
        try:
            event = self.events.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return {"event": "silent", "message": f"no answer for {seconds:.0f} s"}
        if event is None:
            status = self.process.wait()
            tail = " / ".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            return {"event": "died", "message": f"the process ended with status {status}: {tail[-600:]}"}
        return event

    def close(self) -> None:
        """End it and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def environment(given: Mapping[str, str], interpret: bool) -> dict[str, str]:
    """The worker's: no memory taken ahead, products by cuBLAS, which need no minutes to tune, and the CPU at hand."""
    result = dict(given)
    result["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    result["XLA_FLAGS"] = f"{given.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false".strip()
    platforms = given.get("JAX_PLATFORMS", "")
    if interpret:
        result["JAX_PLATFORMS"] = "cpu"
    elif platforms and "cpu" not in platforms.split(","):
        result["JAX_PLATFORMS"] = f"{platforms},cpu"
    return result


@dataclass
class Check:
    """A run: what is known, where it is written, and how long it may take.

    Attributes:
        report: ``facts`` of the machine; ``sections``, each with its ``planned`` cases and their ``results``.
        path: of the report.
        deadline: on the monotonic clock.
        threads: that compile at once; 1 after a crash of which nobody knows whose it was.
    """

    report: dict[str, Any]
    path: Path
    deadline: float
    options: argparse.Namespace
    threads: int

    @property
    def log(self) -> Path:
        """What the workers print."""
        return self.path.with_suffix(".log")

    def run(self, command: Sequence[str]) -> None:
        """Start workers until all is done or the time is up.

        Raises:
            Stop: there is no GPU, the file is another machine's, or no worker gets anywhere.
        """
        self.log.unlink(missing_ok=True)
        while (left := self.deadline - time.monotonic()) > 1:
            worker = Worker.start(command, self._orders(left), self.log)
            try:
                if self._follow(worker):
                    return
            finally:
                worker.close()

    def _orders(self, seconds: float) -> dict[str, Any]:
        sections = []
        names = self.options.sections
        for at, name in enumerate(names):
            # A section takes its share of what is left, so that what one does not use goes to the next.
            share = WEIGHTS[name] / sum(WEIGHTS[one] for one in names[at:])
            known = self.report["sections"].get(name, {})
            done = list(known.get("results", ()))
            is_done = bool(known) and set(known["planned"]) <= set(done)
            allotted = 0.0 if is_done else seconds * share
            seconds -= allotted
            sections.append({"name": name, "seconds": allotted, "done": done})
        return {
            "sections": sections,
            "memory": int(self.options.memory * 2**30),
            "interpret": self.options.interpret,
            "threads": self.threads,
        }

    def _follow(self, worker: Worker) -> bool:
        """Write down what a worker reports; True when it has come to its end."""
        section, running, has_planned = "", "", False
        while True:
            silence = SILENCE_S.get(section, 100.0)
            event = worker.next_event(min(silence, self.deadline + GRACE_S - time.monotonic()))
            match event["event"]:
                case "no-gpu":
                    self.log.unlink()
                    raise Stop(NO_GPU, event["message"])
                case "device":
                    self._know(event["facts"])
                case "plan":
                    section, has_planned = event["section"], True
                    self._plan(section, event["cases"])
                case "start":
                    running = event["case"]
                case "result":
                    running = ""
                    self._write(event["section"], event["case"], event["result"])
                case "lost":
                    say("the device is lost to this process: another one goes on")
                    return False
                case "end":
                    return True
                case "died" | "silent":
                    if time.monotonic() >= self.deadline:
                        return True
                    if running:
                        self._write(section, running, {"status": "failed", "message": event["message"]})
                    elif self.threads == 1 or not has_planned:
                        raise Stop(1, f"no case ran: {event['message']}")
                    self.threads = self.threads if running else 1
                    return False

    def _know(self, facts: dict[str, Any]) -> None:
        known = self.report.setdefault("facts", facts)
        if known != facts:
            raise Stop(2, f"{self.path} is of {known}, and this is {facts}: choose another --json FILE")
        say(f"{facts['device']}, jax {facts['jax']}")

    def _plan(self, section: str, cases: Sequence[str]) -> None:
        results = self.report["sections"].get(section, {}).get("results", {})
        self.report["sections"][section] = {
            "planned": cases,
            "results": {case: result for case, result in results.items() if case in cases},
        }
        say(f"{section}: {len(cases)} cases, {len(self.report['sections'][section]['results'])} of them done")

    def _write(self, section: str, case: str, result: dict[str, Any]) -> None:
        self.report["sections"][section]["results"][case] = result
        if result["status"] == "failed":
            say(f"{section}: {case}: {result['message']}")
        save(self.report, self.path)


def save(report: dict[str, Any], path: Path) -> None:
    """Write the report so that a crash leaves the old one or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(report, indent=1) + "\n")
    fresh.replace(path)


def say(line: str) -> None:
    """Print a line of progress."""
    print(f"gpu_check: {line}", file=sys.stderr, flush=True)


def read(path: Path, again: Sequence[str]) -> dict[str, Any]:
    """The report of an earlier run without the sections to repeat, or an empty one.

    Raises:
        Stop: the file is none of ours.
    """
    if not path.exists():
        return {"sections": {}}
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        report["sections"] = {name: one for name, one in report["sections"].items() if name not in again}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Stop(2, f"{path} is no report of gpu_check: choose another --json FILE") from error
    return report


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="only these")
    parser.add_argument("--again", nargs="+", choices=WEIGHTS, default=[], metavar="SECTION", help="repeat these")
    parser.add_argument("--minutes", type=float, default=8.0, help="how long it may take (default 8)")
    parser.add_argument("--memory", type=float, default=16.0, metavar="GIB", help="of the device, to fit (default 16)")
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1), help="that compile at once")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE", help="the results")
    parser.add_argument("--table", type=Path, metavar="FILE", help="the tables (default: FILE of --json, as .md)")
    parser.add_argument(
        "--interpret", action="store_true", help="toy sizes on the CPU, to try this script: no time means anything"
    )
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.memory < 1 or options.threads < 1:
        parser.error("--minutes must be above 0, --memory and --threads at least 1")
    if options.json.suffix in (".new", ".log", ".md"):
        parser.error("--json must not end in .new, .log or .md, which are names of other files of a run")
    options.sections = [name for name in WEIGHTS if name in options.sections]
    return options


def main(arguments: Sequence[str] | None = None, command: Sequence[str] = ()) -> int:
    """Run the check and return the exit status.

    Args:
        arguments: of the command line.
        command: that starts a worker; by default the file beside this one.
    """
    options = parse(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    try:
        check = Check(read(options.json, options.again), options.json, deadline, options, options.threads)
        check.run(command or [sys.executable, str(Path(__file__).with_name("gpu_check_worker.py"))])
    except (Stop, OSError) as error:
        say(str(error))
        return error.status if isinstance(error, Stop) else 2
    save(check.report, options.json)
    text = page(check.report, options.sections)
    (options.table or options.json.with_suffix(".md")).write_text(text)
    print(text)
    for line in left_out(check.report, options.sections):
        say(f"no time was left for {line}")
    failed = failures(check.report, options.sections)
    say(f"{len(failed)} cases failed" if failed else "no case failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
