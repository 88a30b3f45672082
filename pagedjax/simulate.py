"""``pagedjax simulate``: what a server of given sizes would do with a recorded trace, without one."""

import dataclasses
import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedjax.block_tables import BlockTables
from pagedjax.blocks import BlockPool
from pagedjax.config import UserError
from pagedjax.contiguous import ContiguousTables
from pagedjax.plan_log import RecordingScheduler
from pagedjax.scheduler import Scheduler
from pagedjax.simulator import SchedulerLike, Simulator, StepTime
from pagedjax.swap_space import SwapSpace
from pagedjax.traces import TraceRequest, at_rate, read_trace

ALLOCATORS = ("paged", "contiguous-max", "contiguous-pow2", "contiguous-oracle")


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """The server and its load; each field is a flag of ``pagedjax simulate``. Lengths are in tokens.

    Attributes:
        max_model_len: longer requests are cut; None takes the trace's longest, after scaling.
        model: what the cache groups are taken from; None for layers that see all.
        step_time_model: a file, or ``fit``.

    Raises:
        UserError: a value is out of its range.
    """

    num_kv_blocks: int
    step_time_model: str
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    swap_space_blocks: int = 0
    scheduling_policy: str = "fcfs"
    allocator: str = "paged"
    n: int = 1
    num_requests: int | None = None
    length_scale: float = 1.0
    request_rate: float | None = None
    speed_up: float | None = None
    model: str | None = None
    load_format: str = "auto"

    def __post_init__(self) -> None:
        for name in ("num_kv_blocks", "block_size", "max_num_seqs", "max_model_len", "n", "num_requests"):
            self._check(name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        self._check("swap_space_blocks", self.swap_space_blocks >= 0, "at least 0")
        for name in ("length_scale", "request_rate", "speed_up"):
            self._check(name, getattr(self, name) is None or getattr(self, name) > 0, "above 0")
        self._check("length_scale", math.isfinite(self.length_scale), "finite")
        self._check("scheduling_policy", self.scheduling_policy in ("fcfs", "priority"), "fcfs or priority")
        self._check("allocator", self.allocator in ALLOCATORS, f"one of {', '.join(ALLOCATORS)}")
        least = max(2, self.max_num_seqs)
        self._check("max_num_batched_tokens", self.max_num_batched_tokens >= least, f"at least --max-num-seqs, {least}")
        if self.request_rate is not None and self.speed_up is not None:
            raise UserError("--request-rate and --speed-up both say when requests come: give one of them")
        if self.step_time_model == "fit" and self.model is None:
            raise UserError("--step-time-model fit measures a model: say which with --model")
        if self.allocator != "paged" and (self.swap_space_blocks or self.model):
            raise UserError(f"--allocator {self.allocator} has neither swap space nor a model's cache groups")

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise UserError(f"--{name.replace('_', '-')} must be {rule}, got {getattr(self, name)}")


def simulate(
    trace: Path,
    config: SimulationConfig,
    step_time: StepTime,
    *,
    windows: tuple[int | None, ...] = (None,),
    record_plans: Path | None = None,
) -> dict[str, Any]:
    """Serve the trace in simulated time and return the numbers.

    Args:
        trace: see ``traces.read_trace``.
        config: of server and load.
        step_time: seconds of a plan's step on the device and on the host.
        windows: of the model's cache groups.
        record_plans: file that gets a record of every plan (see ``plan_log``).

    Raises:
        UserError: the trace cannot be read, a file not be written, or a request does not fit into the pool.
    """
    requests = [_servable(request) for request in read_trace(trace, config.num_requests)]
    if config.length_scale != 1:
        requests = [request.scaled(config.length_scale) for request in requests]
    if config.request_rate is not None:
        requests = at_rate(requests, config.request_rate)
    elif config.speed_up is not None:
        requests = [dataclasses.replace(r, arrival=r.arrival / config.speed_up) for r in requests]
    longest = config.max_model_len or max(r.prompt_tokens + r.output_tokens for r in requests)
    fitting = [request.clipped(longest) for request in requests]
    tables = _tables(config, windows, longest)
    if (blocks := tables.most(longest)) > config.num_kv_blocks:
        raise UserError(
            f"--num-kv-blocks {config.num_kv_blocks} is too few: one request of {longest} tokens needs {blocks}; "
            "give more, or --max-model-len less"
        )
    scheduler = Scheduler(
        tables,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        by_priority=config.scheduling_policy == "priority",
    )
    recorded: SchedulerLike = scheduler
    with ExitStack() as stack:
        if record_plans is not None:
            try:
                file = stack.enter_context(record_plans.open("w", encoding="utf-8"))
            except OSError as error:
                raise UserError(f"--record-plans {record_plans} cannot be written: {error.strerror}") from None
            recorded = RecordingScheduler(scheduler, file)
        caching = config.enable_prefix_caching and config.allocator == "paged"
        numbers = Simulator(recorded, step_time, prefix_caching=caching, n=config.n).run(fitting)
    clipped = sum(request != before for request, before in zip(fitting, requests, strict=True))
    return numbers | {"clipped": clipped, "max_model_len": longest}


def _servable(request: TraceRequest) -> TraceRequest:
    """A server computes one token at least, and gives one."""
    return dataclasses.replace(
        request, prompt_tokens=max(1, request.prompt_tokens), output_tokens=max(1, request.output_tokens)
    )


def _tables(config: SimulationConfig, windows: tuple[int | None, ...], longest: int) -> BlockTables:
    chunk = config.max_num_batched_tokens
    if config.allocator != "paged":
        kind = config.allocator.removeprefix("contiguous-")
        return ContiguousTables(
            config.num_kv_blocks, block_size=config.block_size, kind=kind, max_model_len=longest, chunk=chunk
        )
    return BlockTables(
        BlockPool(config.num_kv_blocks, len(windows), keeps=config.enable_prefix_caching),
        block_size=config.block_size,
        windows=windows,
        chunk=chunk,
        swap=SwapSpace(config.swap_space_blocks) if config.swap_space_blocks else None,
    )
