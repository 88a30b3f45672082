"""Measure pagedjax against other engines: one machine, one run, equal prompts, medians of alternating rounds.

The model is a random Llama of 100 million parameters, made from its config alone: speed asks for shapes, not
for sense. Each engine is a worker process that loads once, warms up, and then runs one workload at a time
when it is told to; the others are stopped (SIGSTOP) meanwhile, so that no two ever share the processor. Each
request generates exactly the number of tokens asked for, greedily; prompts are random and new in every
round, so that no cache can answer them.

A worker is this same file under the engine's own Python, and so imports nothing but the standard library
until its engine is chosen. To add an engine, write a subclass of `Peer` and put it into `PEERS`.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Workload:
    """`requests` prompts of `prompt_tokens` tokens arrive at once; each generates `new_tokens` tokens."""

    title: str
    requests: int
    prompt_tokens: int
    new_tokens: int
    max_running: int
    shared_tokens: int = 0
    """Tokens at the start of every prompt of a round that are the same for all."""

    def prompts(self, round_number: int) -> list[list[int]]:
        """The prompts of one round, as token ids: equal for every peer, different from round to round."""
        rng = random.Random(f"{self.title} {round_number}")
        ids = range(3, MODEL_CONFIG["vocab_size"])
        shared = rng.choices(ids, k=self.shared_tokens)
        return [shared + rng.choices(ids, k=self.prompt_tokens - self.shared_tokens) for _ in range(self.requests)]

    def score(self, seconds: float) -> float:
        """What the table shows: output tokens per second, or the latency of one token in milliseconds."""
        return seconds * 1e3 if self.new_tokens == 1 else self.requests * self.new_tokens / seconds

    @property
    def unit(self) -> str:
        """The unit of `score`."""
        return "ms" if self.new_tokens == 1 else "tokens/s"


WORKLOADS = {
    "W1": Workload("32 x (128 + 64), all at once", 32, 128, 64, 32),
    "W1/16": Workload("32 x (128 + 64), 16 running", 32, 128, 64, 16),
    "W2": Workload("1 x (128 + 64)", 1, 128, 64, 32),
    "TTFT": Workload("first token of a 512-token prompt", 1, 512, 1, 32),
    "SP": Workload("32 x (512 shared + 16 own + 32)", 32, 528, 32, 32, shared_tokens=512),
}


@dataclass(frozen=True)
class Generated:
    """Of each request: how many tokens it gave, and the seconds from the call to its first token."""

    counts: list[int]
    ttft_s: list[float]


class Peer:
    """One engine. An instance lives in its worker process; the class says how the driver starts that."""

    name: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    """Packages whose versions are reported."""
    python: ClassVar[str | None] = None
    """`3.11`, say: the Python of the engine's own environment. None: it runs in the driver's."""
    requirements: ClassVar[tuple[str, ...]] = ()
    """What pip installs into the engine's own environment."""

    def __init__(self, model: Path) -> None:
        """Load the model whose `config.json` lies in the folder `model`, in bfloat16, with random weights."""
        raise NotImplementedError

    def generate(self, prompts: list[list[int]], new_tokens: int, max_running: int) -> Generated:
        """Generate `new_tokens` tokens for each prompt, `max_running` at a time."""
        raise NotImplementedError


class PagedJax(Peer):
    """This project, through its Python API."""

    name = "pagedjax"
    distributions = ("pagedjax", "jax", "jaxlib")
    flags: ClassVar[dict[str, Any]] = {}
    """Engine flags beside those that every workload needs."""

    def __init__(self, model: Path) -> None:
        from pagedjax import LLM, SamplingParams

        self.sampling_params = SamplingParams
        self.engines = {
            max_running: LLM(
                str(model),
                load_format="dummy",
                dtype="bfloat16",
                max_model_len=1024,
                max_num_seqs=max_running,
                kv_cache_memory="512MiB",
                **self.flags,
            )
            for max_running in {workload.max_running for workload in WORKLOADS.values()}
        }

    def generate(self, prompts: list[list[int]], new_tokens: int, max_running: int) -> Generated:
        """See `Peer`."""
        params = self.sampling_params(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        called = time.monotonic()
        outputs: Any = self.engines[max_running].generate(prompts, params)
        return Generated(
            counts=[len(output.outputs[0].token_ids) for output in outputs],
            ttft_s=[output.metrics.first_token_time - called for output in outputs],
        )


class PagedJaxWithoutPrefixCache(PagedJax):
    """This project, each prompt computed whole."""

    name = "no-prefix-cache"
    flags: ClassVar[dict[str, Any]] = {"enable_prefix_caching": False}


class Transformers(Peer):
    """Hugging Face `generate`: one padded batch at a time, sdpa attention, a thread for every core."""

    name = "transformers"
    distributions = ("transformers", "torch")
    python = "3.11"
    requirements = ("torch==2.13.0", "transformers==5.24.0", "numpy")

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(os.cpu_count() or 1)
        self.torch = torch
        config = AutoConfig.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        # With no end-of-sequence token every request runs to its full length; no logits processor is needed.
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def generate(self, prompts: list[list[int]], new_tokens: int, max_running: int) -> Generated:
        """See `Peer`. Prompts of one workload are equally long, so the batch needs no padding."""
        counts: list[int] = []
        ttft_s: list[float] = []
        called = time.monotonic()

        def look_at_the_clock(input_ids: Any, scores: Any, **_: Any) -> Any:
            """Called after each token; it stops nothing."""
            if len(ttft_s) == len(counts):
                ttft_s.extend([time.monotonic() - called] * len(input_ids))
            return self.torch.zeros(len(input_ids), dtype=self.torch.bool)

        with self.torch.inference_mode():
            for start in range(0, len(prompts), max_running):
                batch = self.torch.tensor(prompts[start : start + max_running])
                tokens = self.model.generate(
                    batch,
                    attention_mask=self.torch.ones_like(batch),
                    do_sample=False,
                    max_new_tokens=new_tokens,
                    stopping_criteria=[look_at_the_clock],
                )
                counts += [tokens.shape[1] - batch.shape[1]] * len(batch)
        return Generated(counts, ttft_s)


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (PagedJax, PagedJaxWithoutPrefixCache, Transformers)}


def run_worker(peer_class: type[Peer], model: Path, replies: TextIO, workloads: Sequence[str]) -> None:
    """Load and warm up, then answer each line `WORKLOAD ROUND` of standard input with one line of JSON."""

    def reply(**fields: Any) -> None:
        print(json.dumps(fields), file=replies, flush=True)

    def run(key: str, round_number: int) -> dict[str, float]:
        workload = WORKLOADS[key]
        prompts = workload.prompts(round_number)
        start = time.perf_counter()
        generated = peer.generate(prompts, workload.new_tokens, workload.max_running)
        seconds = time.perf_counter() - start
        if generated.counts != [workload.new_tokens] * workload.requests:
            raise RuntimeError(f"{key}: every request should give {workload.new_tokens} tokens, not {generated.counts}")
        return {"seconds": seconds, "mean_ttft_s": statistics.mean(generated.ttft_s)}

    start = time.perf_counter()
    peer = peer_class(model)
    load_s = time.perf_counter() - start
    for key in workloads:
        run(key, -1)
    versions = {name: importlib.metadata.version(name) for name in peer_class.distributions}
    reply(load_s=load_s, versions=versions | {"python": platform.python_version()})
    for line in sys.stdin:
        key, round_number = line.split()
        reply(**run(key, int(round_number)))


class Worker:
    """A peer's process, as the driver sees it. It is stopped whenever it is not asked for anything."""

    def __init__(self, peer: type[Peer], model: Path, workloads: Sequence[str], cache: Path) -> None:
        self.name = peer.name
        self.log = cache / f"{peer.name}.log"
        command = [peer_python(peer, cache), __file__, "--worker", peer.name, "--model", str(model)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--workloads", *workloads],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.facts = self._answer()

    def run(self, key: str, round_number: int) -> dict[str, float]:
        """Run one workload and return its `seconds` and its `mean_ttft_s`."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        print(key, round_number, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = "\n".join(self.log.read_text().splitlines()[-15:])
            sys.exit(f"{tail}\nbench_peers: the worker of {self.name} ended; all it said is in {self.log}")
        self.process.send_signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer


def peer_python(peer: type[Peer], cache: Path) -> str:
    """The path of the Python that runs `peer`; its environment is made when it is not there yet."""
    if peer.python is None:
        return sys.executable
    key = hashlib.sha256(json.dumps([peer.python, peer.requirements]).encode()).hexdigest()[:12]
    environment = cache / f"{peer.name}-{key}"
    finished = environment / "finished"
    if not finished.exists():
        say(f"making {environment} with {', '.join(peer.requirements)}")
        subprocess.run([find_python(peer.python), "-m", "venv", "--clear", environment], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
        log = environment / "install.log"
        with log.open("w") as output:
            result = subprocess.run([*pip, *peer.requirements], check=False, stdout=output, stderr=output)
        if result.returncode:
            sys.exit(f"bench_peers: pip could not install {', '.join(peer.requirements)}: see {log}")
        finished.touch()
    return str(environment / "bin" / "python")


def find_python(version: str) -> str:
    """The path of a Python of this minor version, on PATH or under pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    built = sorted((pyenv / "versions").glob(f"{version}.*/bin/python"), reverse=True)
    for candidate in (shutil.which(f"python{version}"), *built):
        # A pyenv shim can be a name on PATH without an interpreter behind it: run it rather than trust it.
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return str(candidate)
    sys.exit(f"bench_peers: no Python {version} on PATH or under pyenv: install it, or leave out this peer")


def machine() -> dict[str, Any]:
    """What the numbers depend on: the processor, its cores, its bfloat16 products, and how busy it was."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = fields.get("flags", fields.get("Features", "")).split()
    return {
        "cpu": fields.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "bf16": [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags],
        "load_before": os.getloadavg()[0],
    }


def table(report: dict[str, Any]) -> str:
    """The report as text, a line for each workload; a ratio over 1: the first peer beats the last."""
    names = list(report["peers"])
    lines = [" " * 42 + "".join(f"{name:>26}" for name in names) + (f"{'ratio':>9}" if len(names) > 1 else "")]
    for key, entry in report["workloads"].items():
        cells = ""
        for name in names:
            scores = entry["scores"][name]
            cells += f"{entry['median'][name]:11.1f} ({min(scores):.1f}-{max(scores):.1f})".rjust(26)
        if len(names) > 1:
            cells += f"{entry['ratio'][names[0]]:9.2f}"
        lines.append(f"{key:8}{WORKLOADS[key].title:34}{cells}  {entry['unit']}")
        ttft = "".join(f"{entry['mean_ttft_ms'][name]:11.1f}".ljust(26) for name in names)
        lines.append(f"{'':8}{'  mean time to first token':34}{ttft}{' ' * 9 * (len(names) > 1)}  ms")
    return "\n".join(lines)


def compare(peers: Sequence[str], workloads: Sequence[str], rounds: int) -> dict[str, Any]:
    """Start a worker for each peer, run every workload `rounds` times, alternating, and return the report."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pagedjax" / "bench_peers"
    cache.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(), "model": MODEL_CONFIG, "peers": {}, "workloads": {}}
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL_CONFIG))
        try:
            for name in peers:
                say(f"{name}: loading and warming up")
                workers.append(Worker(PEERS[name], Path(folder), workloads, cache))
                report["peers"][name] = workers[-1].facts
            for key in workloads:
                say(f"{key}: {WORKLOADS[key].title}, {rounds} rounds")
                runs: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
                for round_number in range(rounds):
                    for worker in workers:
                        runs[worker.name].append(worker.run(key, round_number))
                report["workloads"][key] = summary(WORKLOADS[key], runs)
        finally:
            for worker in workers:
                worker.close()
    return report


def summary(workload: Workload, runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Scores, medians and ratios of one workload; `runs` holds each peer's rounds."""
    seconds = {name: [run["seconds"] for run in of_peer] for name, of_peer in runs.items()}
    ttft_s = {name: statistics.median(run["mean_ttft_s"] for run in of_peer) for name, of_peer in runs.items()}
    median_s = {name: statistics.median(values) for name, values in seconds.items()}
    baseline_s = list(median_s.values())[-1]
    return {
        "unit": workload.unit,
        "scores": {name: [workload.score(value) for value in values] for name, values in seconds.items()},
        "median": {name: workload.score(value) for name, value in median_s.items()},
        "ratio": {name: baseline_s / value for name, value in median_s.items()},
        "mean_ttft_ms": {name: value * 1e3 for name, value in ttft_s.items()},
        "seconds": seconds,
    }


def say(line: str) -> None:
    """Print a line of progress."""
    print(f"bench_peers: {line}", file=sys.stderr, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench_peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="the last one is the baseline")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5, help="runs of each workload by each peer (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report there")
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        # Replies go to the standard output that we were given; whatever the engine prints goes to the log.
        replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        run_worker(PEERS[arguments.worker], arguments.model, replies, arguments.workloads)
        return
    report = compare(arguments.peers, arguments.workloads, arguments.rounds)
    facts = report["machine"]
    bf16 = " ".join(facts["bf16"]) or "none"
    print(f"{facts['cpu']}, {facts['cores']} cores, bf16: {bf16}, load before: {facts['load_before']:.2f}")
    print(table(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
