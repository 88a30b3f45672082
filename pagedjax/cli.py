"""The command line. Results go to standard output, everything else to standard error.

JAX takes seconds to import, so that a command imports what it needs when it runs: help, the version and
errors of usage do not wait for it.
"""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pagedjax.cli_flags import (
    ENGINE_FLAGS,
    SAMPLING_FLAGS,
    SERVE_BENCH_FLAGS,
    SERVER_FLAGS,
    SIMULATION_FLAGS,
    add_flags,
    given,
)
from pagedjax.config import EngineConfig, SamplingParams, UserError
from pagedjax.prompts import Prompt, read_prompts

# Sequences that may wait in the server unless told otherwise: memory is bounded, and a burst is not refused.
DEFAULT_MAX_QUEUE = 4096

_MODEL = "demo, a folder (config.json with safetensors), a .gguf file, or a Hugging Face hub id"
_INTERRUPTED = 130  # what shells call the end by Ctrl-C
_BROKEN_PIPE = 141  # and by a reader that went away


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; None takes the process's own.

    Returns:
        The exit status: 0, 1 where a request failed, 2 for an error of the user's, 130 for Ctrl-C.
    """
    try:
        args = _parse(argv)
        _quiet_libraries()
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"pagedjax: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Nobody reads on, as after `| head`; the interpreter's own flush at the end must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _quiet_libraries() -> None:
    """Keep what XLA's C++ says to its own developers off the screen, unless the user asked for it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; takes no abbreviations, which a new flag could make ambiguous."""

    def __init__(self, **options: Any):
        super().__init__(**{"allow_abbrev": False} | options)

    def error(self, message: str) -> NoReturn:
        """Raise it as a UserError."""
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    args, unknown = _parser().parse_known_args(argv)
    if unknown and args.run is not _not_built:
        raise UserError(f"unknown argument {unknown[0]}; see {args.prog} --help")
    return args


def _parser() -> argparse.ArgumentParser:
    description = "Serve and run language models with JAX, from a paged KV cache."
    parser = _Parser(prog="pagedjax", description=description)
    parser.add_argument("--version", action="version", version=f"pagedjax {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_generate(commands)
    bench = commands.add_parser("bench", help="measure", description="Measure the engine.")
    benches = bench.add_subparsers(metavar="COMMAND", required=True)
    _add_throughput(benches)
    _add_serve_bench(benches)
    _add_simulate(commands)
    _add_not_built(benches, "latency", "time one batch")
    for name, meaning in {
        "plan": "say what fits, without loading the model",
        "convert": "convert a checkpoint",
    }.items():
        _add_not_built(commands, name, meaning)
    return parser


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], meaning: str, **options: Any
) -> Any:
    sentence = f"{meaning[0].upper()}{meaning[1:]}."
    options = {"help": meaning, "description": sentence, "usage": "%(prog)s MODEL [flags]"} | options
    command = commands.add_parser(name, **options)
    command.set_defaults(run=run, prog=command.prog)
    return command


def _add_not_built(commands: Any, name: str, meaning: str) -> None:
    _add_command(commands, name, _not_built, f"{meaning} (not built yet)", add_help=False)


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help=_MODEL)
    add_flags(command, "engine", ENGINE_FLAGS)


def _add_serve(commands: Any) -> None:
    command = _add_command(commands, "serve", _serve, "serve a model over OpenAI's HTTP API")
    _add_model(command)
    add_flags(command, "server", SERVER_FLAGS)
    queue = f"sequences that may wait before requests are refused with 429 (default: {DEFAULT_MAX_QUEUE})"
    command.add_argument("--max-queue", type=int, default=DEFAULT_MAX_QUEUE, metavar="N", help=queue)
    _add_chat_template(command)


def _add_chat_template(command: argparse.ArgumentParser) -> None:
    meaning = "Jinja template that turns messages into a prompt (default: the model's own)"
    command.add_argument("--chat-template", type=Path, metavar="FILE", help=meaning)


def _add_generate(commands: Any) -> None:
    command = _add_command(commands, "generate", _generate, "continue one prompt, or each line of a file")
    prompts = command.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="print its continuation as it comes")
    meaning = 'one prompt per line or, in a .jsonl file, {"prompt": ...}: print a JSON object for each'
    prompts.add_argument("--prompts-file", type=Path, metavar="FILE", help=meaning)
    command.add_argument("--chat", action="store_true", help="a prompt is a user's message to a chat model")
    _add_chat_template(command)
    add_flags(command, "sampling", SAMPLING_FLAGS)
    _add_model(command)


def _add_throughput(commands: Any) -> None:
    command = _add_command(commands, "throughput", _throughput, "run many random requests at once")
    load = command.add_argument_group("workload")
    for name, default, meaning in (
        ("--num-prompts", 32, "requests"),
        ("--input-len", 128, "tokens of each prompt"),
        ("--output-len", 64, "tokens of each output"),
        ("--shared-prefix-len", 0, "tokens at the beginning of all prompts that are the same"),
    ):
        meaning = f"{meaning} (default: {default})"
        load.add_argument(name, type=int, default=default, metavar="N", help=meaning)
    meaning = "take the lengths from an Azure (.csv) or Mooncake (.jsonl) trace's first requests; may be .gz"
    load.add_argument("--trace", type=Path, metavar="FILE", help=meaning)
    meaning = "multiply the trace's lengths by it (default: 1)"
    load.add_argument("--trace-scale", type=float, default=1.0, metavar="F", help=meaning)
    meaning = "write what each step computed and how long it took, for `simulate --step-time-model`"
    command.add_argument("--step-times", type=Path, metavar="FILE", help=meaning)
    _add_json(command)
    _add_model(command)


def _add_serve_bench(commands: Any) -> None:
    usage = "%(prog)s --base-url URL --model NAME [flags]"
    meaning = "drive any OpenAI-compatible server over HTTP"
    command = _add_command(commands, "serve", _serve_bench, meaning, usage=usage)
    add_flags(command, "server and load", SERVE_BENCH_FLAGS)
    _add_json(command)
    meaning = "draw latency against request rate there, as PNG"
    command.add_argument("--plot", type=Path, metavar="FILE", help=meaning)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")


def _add_simulate(commands: Any) -> None:
    usage = "%(prog)s TRACE --num-kv-blocks N --step-time-model FILE|fit [flags]"
    meaning = "serve a recorded trace in simulated time, with the engine's own scheduler and no device"
    command = _add_command(commands, "simulate", _simulate, meaning, usage=usage)
    meaning = "Azure (.csv) or Mooncake (.jsonl) trace; may be .gz"
    command.add_argument("trace", type=Path, metavar="TRACE", help=meaning)
    add_flags(command, "server and load", SIMULATION_FLAGS)
    _add_json(command)
    command.add_argument("--record-plans", type=Path, metavar="FILE", help="write every plan there, as JSON lines")


def _version() -> str:
    try:
        return importlib.metadata.version("pagedjax")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(model=args.model, **given(args, ENGINE_FLAGS))


def _chat_template(args: argparse.Namespace) -> str | None:
    if args.chat_template is None:
        return None
    try:
        return str(args.chat_template.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template {args.chat_template} cannot be read: {error}") from None


def _not_built(args: argparse.Namespace) -> int:
    raise UserError(f"`{args.prog}` is not built yet")


def _serve(args: argparse.Namespace) -> int:
    _engine_config(args)  # wrong flags are reported before anything is imported or loaded
    template = _chat_template(args)
    if args.max_queue < 1:
        raise UserError(f"--max-queue must be at least 1, got {args.max_queue}")
    from pagedjax.async_engine import AsyncLLM
    from server import ServerConfig, serve

    settings = given(args, SERVER_FLAGS)
    if "api_keys" not in settings and (key := os.environ.get("PAGEDJAX_API_KEY")) is not None:
        if not key:  # a secret that was lost must not leave the door open
            raise UserError("PAGEDJAX_API_KEY is empty: put a key in it, or unset it")
        settings["api_keys"] = (key,)
    flags = given(args, ENGINE_FLAGS)
    return serve(
        ServerConfig(**settings),
        lambda: AsyncLLM(args.model, max_queue=args.max_queue, chat_template=template, **flags),
    )


def _generate(args: argparse.Namespace) -> int:
    config, template = _engine_config(args), _chat_template(args)
    params = _sampling_params(args)
    prompts = read_prompts(args.prompts_file) if args.prompts_file else [Prompt("--prompt", args.prompt)]
    from pagedjax.generate import generate

    streams = args.prompts_file is None and params.n == 1
    return generate(config, prompts, params, chat=args.chat, chat_template=template, streams=streams)


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    # The engine's seed gives the draws of a request without a seed of its own; the one flag sets both.
    seed = {"seed": args.seed} if hasattr(args, "seed") else {}
    try:
        return SamplingParams(**given(args, SAMPLING_FLAGS), **seed)
    except ValueError as error:
        name, _, rule = str(error).partition(" ")
        raise UserError(f"--{name.replace('_', '-')} {rule}") from None


def _throughput(args: argparse.Namespace) -> int:
    config = _engine_config(args)
    _check_folders(args, "json", "step_times")
    from pagedjax.bench import Workload, bench_throughput

    names = ("num_prompts", "input_len", "output_len", "shared_prefix_len", "trace", "trace_scale")
    workload = Workload(**{name: getattr(args, name) for name in names})
    return _report(bench_throughput(config, workload, _version(), step_times=args.step_times), args.json)


def _serve_bench(args: argparse.Namespace) -> int:
    _check_given(args, "base_url", "model")
    _check_folders(args, "json", "plot")
    from pagedjax.bench_report import plot, table
    from pagedjax.bench_serve import ServeBench, bench_serve

    settings = given(args, SERVE_BENCH_FLAGS)
    settings.setdefault("api_key", os.environ.get("PAGEDJAX_API_KEY"))
    numbers = bench_serve(ServeBench(**settings), lambda run: print(table(run), flush=True))
    if args.json is not None:
        _write(args.json, json.dumps(numbers | {"version": _version()}) + "\n")
    if args.plot is not None:
        plot(args.plot, numbers["runs"])
    return int(any(run["failed"] for run in numbers["runs"]))


def _simulate(args: argparse.Namespace) -> int:
    _check_given(args, "num_kv_blocks", "step_time_model")
    _check_folders(args, "json", "record_plans")
    from pagedjax.simulate import SimulationConfig, simulate
    from pagedjax.step_time import load_step_time_model

    config = SimulationConfig(**given(args, SIMULATION_FLAGS))
    windows: tuple[int | None, ...] = (None,)
    if config.model is not None:
        from pagedjax.calibrate import cache_windows

        windows = cache_windows(config.model)
    if config.model is not None and config.step_time_model == "fit":
        from pagedjax.calibrate import calibrate

        names = ("model", "load_format", "block_size", "max_num_seqs", "max_num_batched_tokens")
        step_time = calibrate(EngineConfig(**{name: getattr(config, name) for name in names}))
    else:
        step_time = load_step_time_model(Path(config.step_time_model))
    numbers = simulate(args.trace, config, step_time, windows=windows, record_plans=args.record_plans)
    return _report(numbers | {"step_time_model": step_time.as_dict(), "version": _version()}, args.json)


def _check_given(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if not hasattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} must be given; see {args.prog} --help")


def _check_folders(args: argparse.Namespace, *names: str) -> None:
    """Before anything long begins: a file to be written needs its folder."""
    for name in names:
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            raise UserError(f"--{name.replace('_', '-')} {path}: there is no folder {path.parent}")


def _report(numbers: dict[str, Any], path: Path | None) -> int:
    """Print the numbers as one JSON object, and write them to a file if there is one."""
    line = json.dumps(numbers)
    print(line)
    if path is not None:
        _write(path, line + "\n")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
