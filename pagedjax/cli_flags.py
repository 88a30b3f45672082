"""The flags of the command line as tables: each flag fills one field of a settings dataclass.

A flag that is not given is not passed on, so that each default has one home, its dataclass. Defaults stand
here for the help text alone, because ``server.ServerConfig`` cannot be read without loading JAX; a test
compares them.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        field: the settings' field that it fills.
        meaning: for the help text.
        default: what holds without the flag, for the help text.
        kind: makes the value from the argument; ``bool`` gives ``--flag`` and ``--no-flag``.
        metavar: what stands for the value in the help text.
        options: its spellings, where they are not the field's name.
        repeatable: may be given several times; the field is a tuple.
        several: takes several values at once; the field is a tuple.
    """

    field: str
    meaning: str
    default: str
    kind: Callable[[str], Any] = str
    metavar: str = ""
    options: tuple[str, ...] = ()
    repeatable: bool = False
    several: bool = False

    def add_to(self, group: Any) -> None:
        """Add it to an argparse parser or group."""
        names = self.options or ("--" + self.field.replace("_", "-"),)
        options: dict[str, Any] = {"dest": self.field, "default": argparse.SUPPRESS}
        options["help"] = f"{self.meaning} (default: {self.default})".replace("%", "%%")
        if self.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = self.kind
            options["metavar"] = self.metavar or {int: "N", float: "F"}.get(self.kind, "TEXT")  # type: ignore[call-overload]
            options["action"] = "append" if self.repeatable else "store"
            if self.several:
                options["nargs"] = "+"
        group.add_argument(*names, **options)


def add_flags(parser: argparse.ArgumentParser, title: str, flags: Sequence[Flag]) -> None:
    """Add a table of flags under a title of its own."""
    group = parser.add_argument_group(title)
    for flag in flags:
        flag.add_to(group)


def given(args: argparse.Namespace, flags: Sequence[Flag]) -> dict[str, Any]:
    """The fields whose flags were given, with their values; repeatable ones as tuples."""
    values = {flag.field: getattr(args, flag.field) for flag in flags if hasattr(args, flag.field)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


# Every field of config.EngineConfig but `model`, in its order.
ENGINE_FLAGS = (
    Flag("dtype", "type of weights, cache and arithmetic", "auto", metavar="auto|bfloat16|float32"),
    Flag(
        "max_model_len",
        "tokens that a prompt and its output may have together",
        "what the model and the cache allow",
        int,
    ),
    Flag("block_size", "tokens in a block of the KV cache: 8, 16, 32, 64 or 128", "16", int),
    Flag("num_kv_blocks", "blocks in the KV cache", "as many as there is memory for", int),
    Flag(
        "kv_cache_memory",
        "size of the KV cache, such as 512MiB or 2GiB",
        "up to 2GiB on a CPU",
        metavar="SIZE",
    ),
    Flag(
        "memory_utilization",
        "share of the memory that may be used, above 0 and at most 1",
        "0.9 on a GPU",
        float,
    ),
    Flag("max_num_seqs", "sequences that run at once; others wait", "64 on a CPU, else 256", int),
    Flag("max_num_batched_tokens", "tokens computed in one step", "512 on a CPU, else 2048", int),
    Flag("enable_prefix_caching", "share the KV blocks of equal prompt beginnings", "on", bool),
    Flag("kv_cache_dtype", "type of the KV cache; only auto is built", "auto", metavar="auto|int8|fp8"),
    Flag("quantization", "type to hold the weights in; not built yet", "as dtype", metavar="int8|int4|fp8"),
    Flag(
        "swap_space",
        "host memory for the blocks of preempted requests, such as 4GiB",
        "none; as much as the KV cache with --preemption-mode swap",
        metavar="SIZE",
    ),
    Flag(
        "preemption_mode",
        "how preempted requests come back: computed again, or from the swap space",
        "swap where there is swap space, else recompute",
        metavar="recompute|swap",
    ),
    Flag(
        "scheduling_policy",
        "who runs next: the first to come, or the least priority value",
        "fcfs",
        metavar="fcfs|priority",
    ),
    Flag("tensor_parallel_size", "devices to spread the model over; not built yet", "1", int),
    Flag("speculative_config", "how to draft tokens ahead, as JSON; not built yet", "none", metavar="JSON"),
    Flag(
        "attention_backend",
        "what computes attention; only auto and xla are built",
        "auto",
        metavar="auto|xla|cpu|pallas|pallas-interpret",
    ),
    Flag(
        "load_format",
        "kind of weight files; dummy makes random weights, orbax is not built yet",
        "auto",
        metavar="auto|safetensors|gguf|orbax|dummy",
    ),
    Flag(
        "tokenizer",
        "folder, tokenizer.json or hub id to take the tokenizer from",
        "the model's own",
        metavar="PATH",
    ),
    Flag("seed", "seed of sampling, and of random weights", "0", int),
)

# Every field of server.ServerConfig, in its order.
SERVER_FLAGS = (
    Flag("host", "address to listen on; 0.0.0.0 for all", "127.0.0.1"),
    Flag("port", "port to listen on; 0 takes a free one and prints it", "8000", int),
    Flag(
        "api_keys",
        "a key that opens the door; may be repeated",
        "$PAGEDJAX_API_KEY, else none is needed",
        metavar="KEY",
        options=("--api-key",),
        repeatable=True,
    ),
    Flag("served_model_name", "what clients call the model", "its own name", metavar="NAME"),
    Flag("shutdown_timeout", "seconds that running requests may go on after SIGTERM", "30.0", float, "S"),
    Flag("ssl_certfile", "certificate chain, PEM: serve HTTPS", "none", metavar="FILE"),
    Flag("ssl_keyfile", "the certificate's private key, PEM", "none", metavar="FILE"),
    Flag("cors_origin", "origin of web pages that may call this server; * for any", "none", metavar="ORIGIN"),
    Flag(
        "metrics_prefix",
        "what metric names begin with; vllm: gives vLLM's names",
        "pagedjax:",
        metavar="PREFIX",
    ),
    Flag("log_level", "what to log", "info", metavar="debug|info|warning|error"),
    Flag("log_format", "how to log", "text", metavar="text|json"),
    Flag("log_requests", "log the parameters of each request (never its text)", "off", bool),
    Flag("hang_timeout", "seconds without progress after which /health says 503", "60.0", float, "S"),
    Flag("request_timeout", "seconds that one request may take", "no limit", float, "S"),
    Flag(
        "tool_call_parser",
        "how the model writes its calls of functions; auto goes by its chat template",
        "auto",
        metavar="auto|hermes|mistral|llama3_json|pythonic",
    ),
    Flag(
        "reasoning_parser",
        "part what the model thinks, <think>...</think>, from its answer, as reasoning_content",
        "none",
        metavar="none|think",
    ),
)

# Fields of config.SamplingParams whose effect `generate` can show; `seed` is the engine's flag of that name.
SAMPLING_FLAGS = (
    Flag("max_tokens", "tokens to generate at the most", "16", int),
    Flag("temperature", "0 takes the likeliest token; higher is more random", "1.0", float),
    Flag("top_p", "sample from the likeliest tokens that together have this probability", "1.0", float),
    Flag("top_k", "sample from this many of the likeliest tokens; 0 for all", "0", int),
    Flag("min_p", "least probability of a token, as a share of the likeliest one's", "0.0", float),
    Flag("n", "samples for each prompt", "1", int, options=("-n", "--n")),
    Flag("stop", "text that ends the output; may be repeated", "none", repeatable=True),
    Flag("stop_token_ids", "token id that ends the output; may be repeated", "none", int, "ID", repeatable=True),
    Flag("include_stop_str_in_output", "keep the stop text in the output", "off", bool),
    Flag("ignore_eos", "go on after the model's end-of-sequence token", "off", bool),
    Flag("min_tokens", "tokens to generate at the least", "0", int),
    Flag("presence_penalty", "lower what has come already, -2 to 2", "0.0", float),
    Flag("frequency_penalty", "lower what has come already, for each time, -2 to 2", "0.0", float),
    Flag("repetition_penalty", "divide the logits of what has come already; 1 for none", "1.0", float),
    Flag("bad_words", "text that must not come; may be repeated", "none", repeatable=True),
    Flag("skip_special_tokens", "leave special tokens out of the text", "on", bool),
)

# Every field of simulate.SimulationConfig, in its order.
SIMULATION_FLAGS = (
    Flag("num_kv_blocks", "blocks in the KV cache", "must be given", int),
    Flag(
        "step_time_model",
        "what a step takes: a file of records (`bench throughput --step-times`) or of a fitted model; "
        "fit runs --model here first",
        "must be given",
        metavar="FILE|fit",
    ),
    Flag("block_size", "tokens in a block", "16", int),
    Flag("max_num_seqs", "sequences that run at once; others wait", "256", int),
    Flag("max_num_batched_tokens", "tokens computed in one step", "2048", int),
    Flag("max_model_len", "tokens of a request; longer ones are cut", "the trace's longest", int),
    Flag("enable_prefix_caching", "share the blocks of equal prompt beginnings", "on", bool),
    Flag("swap_space_blocks", "blocks in host memory for preempted requests; 0 computes them again", "0", int),
    Flag("scheduling_policy", "who runs next", "fcfs", metavar="fcfs|priority"),
    Flag(
        "allocator",
        "who gives out the memory: the block pool, or reserved lengths in one piece as before PagedAttention",
        "paged",
        metavar="paged|contiguous-max|contiguous-pow2|contiguous-oracle",
    ),
    Flag("n", "samples per request, which share its prompt", "1", int, options=("-n", "--n")),
    Flag("num_requests", "the trace's first requests only", "all", int),
    Flag("length_scale", "multiply all lengths by it", "1.0", float),
    Flag(
        "request_rate", "requests per second on average, the pauses in proportion; inf: at once", "the trace's", float
    ),
    Flag("speed_up", "divide all pauses by it", "none", float),
    Flag("model", "model whose sliding windows the cache follows, and that fit runs", "none", metavar="MODEL"),
    Flag("load_format", "kind of weight files for fit; dummy makes random weights", "auto"),
)

# Every field of bench_serve.ServeBench, in its order.
SERVE_BENCH_FLAGS = (
    Flag("num_prompts", "requests", "100", int),
    Flag("input_len", "tokens of each prompt", "128", int),
    Flag("output_len", "tokens of each output at the most", "64", int),
    Flag("shared_prefix_len", "tokens at the beginning of all prompts that are the same", "0", int),
    Flag(
        "trace",
        "take lengths, arrivals and shared beginnings from an Azure (.csv) or Mooncake (.jsonl) trace's first requests",
        "none",
        Path,
        "FILE",
    ),
    Flag("trace_scale", "multiply the trace's lengths by it", "1.0", float),
    Flag("base_url", "the server's address, with or without /v1", "must be given", metavar="URL"),
    Flag("model", "what the server calls the model", "must be given", metavar="NAME"),
    Flag("endpoint", "what to ask", "completions", metavar="completions|chat"),
    Flag(
        "request_rate",
        "requests per second on average, inf: all at once; several are run one after another; with a trace all its "
        "pauses in proportion",
        "the trace's, else inf",
        float,
        "R",
        several=True,
    ),
    Flag(
        "burstiness",
        "1: requests come as a Poisson process; less: in bursts; more: evenly (shape of a gamma distribution)",
        "1.0",
        float,
    ),
    Flag("max_concurrency", "requests that run at once; others wait", "no limit", int),
    Flag(
        "goodput",
        "count the requests per second that are within all of these: ttft, tpot, e2el, each with milliseconds",
        "none",
        metavar="NAME:MS",
        several=True,
    ),
    Flag("ignore_eos", "send vLLM's field of that name, so that outputs have their full length", "off", bool),
    Flag("vocab_size", "prompts are token ids drawn below it", "prompts are words", int),
    Flag("tokenizer", "prompts are token ids out of this model's vocabulary", "prompts are words", metavar="MODEL"),
    Flag("extra_body", "fields to put into each request; null takes one out", "{}", metavar="JSON"),
    Flag("api_key", "sent as a bearer token", "$PAGEDJAX_API_KEY, else none", metavar="KEY"),
    Flag("timeout", "seconds that one request may take", "3600.0", float, "S"),
    Flag("seed", "seed of prompts and arrivals", "0", int),
)
