"""The engine: plans a step ahead, dispatches it, commits the step before, and hands out what is new."""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager

import jax
import numpy as np

from pagedjax.blocks import BlockPool
from pagedjax.config import SamplingParams
from pagedjax.fetch import StepInFlight, fetch
from pagedjax.generation import Generation, RunningRequest, TokenResult, tokenize_bad_words
from pagedjax.metrics import Metrics
from pagedjax.pack import PackedRow, StepPacker
from pagedjax.request import RequestOutput, Sequence, SequenceState
from pagedjax.runner import StepRunner
from pagedjax.sampling_rows import derive_key
from pagedjax.scheduler import ScheduledSequence, SchedulePlan, Scheduler
from pagedjax.sizing import EngineSizes
from pagedjax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread owns it.

    ``step`` plans and dispatches step N+1 while step N runs, then waits for N and commits it. What N sampled reaches
    N+1 on the device; a stop condition is therefore known one step late, and the extra token is dropped.

    Args:
        runner: the device end, warmed up.
        sizes: of cache and batch.
        tokenizer: None for a model without one; text stays empty then.
        eos_token_ids: tokens that end a sequence.
        metrics: what is counted.
        seed: where requests without a seed of their own get theirs from.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: StepRunner,
        sizes: EngineSizes,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: ListLike[int],
        metrics: Metrics,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.sizes, self.metrics, self.tokenizer = sizes, metrics, tokenizer
        self._runner, self._packer, self._clock = runner, StepPacker(runner.shapes), clock
        self._eos = tuple(eos_token_ids)
        self._seeds = np.random.default_rng(seed)
        self._pool = BlockPool(sizes.num_blocks)
        self._scheduler = Scheduler(
            self._pool,
            block_size=sizes.block_size,
            max_num_seqs=sizes.max_num_seqs,
            token_budget=sizes.token_budget,
        )
        self._requests: dict[str, RunningRequest] = {}
        self._generations: dict[Sequence, tuple[RunningRequest, Generation]] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._admissions = [-1] * sizes.max_num_seqs  # the admission each lane's sampling settings belong to
        self._last_done = 0.0  # when the step before ended on the device
        self._device_seconds = 0.0  # of the step that ended last
        self._waited = 0.0  # for the device, in this call of step
        self._host_seconds = 0.0  # spent and not yet observed with a step
        self._slot_steps = [0, 0]  # slots filled, slots held, summed over steps
        self._show_occupancy()

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting, running or yet to be reported."""
        return bool(self._requests or self._in_flight)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._runner.shapes.vocab_size

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a place."""
        return len(self._scheduler.waiting)

    @property
    def num_free_places(self) -> int:
        """Sequences that could run beside those that do."""
        return self._scheduler.num_free_lanes

    @property
    def blocks_held(self) -> int:
        """Blocks that sequences hold."""
        return self._pool.num_held

    @property
    def kv_waste(self) -> float:
        """Share of held slots that held no token, over all steps so far."""
        filled, held = self._slot_steps
        return 1.0 - filled / held if held else 0.0

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, prompt: str | None = None
    ) -> None:
        """Queue a request.

        Raises:
            ValueError: it can't be served; the message begins with the field at fault.
        """
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")
        max_tokens = self._check(prompt_token_ids, params)
        request = RunningRequest(request_id, prompt, prompt_token_ids, params, self._clock())
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        bad_words = tokenize_bad_words(params.bad_words, self.tokenizer)
        for index in range(params.num_samples):
            sequence = Sequence(
                request_id=request_id,
                index=index,
                token_ids=list(prompt_token_ids),
                num_prompt=len(prompt_token_ids),
                max_tokens=max_tokens,
                priority=params.priority,
            )
            key = derive_key(seed, index)
            request.generations.append(Generation(sequence, params, self.tokenizer, self._eos, key, bad_words))
        self._scheduler.add(*(generation.sequence for generation in request.generations))
        self._requests[request_id] = request
        self._generations |= {generation.sequence: (request, generation) for generation in request.generations}

    def abort(self, request_id: str) -> None:
        """End a request without a further word; its blocks are free at once. Unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for generation in request.generations:
            # Nobody reads the text that is held back: it is not asked for, and cannot fail.
            generation.finish_reason = generation.finish_reason or "abort"
            self._leave(generation.sequence)
        self._observe_finished(request, "abort")
        self._show_occupancy()

    def step(self) -> list[RequestOutput]:
        """Dispatch the next step, commit the one before it, and return what is new, as deltas."""
        started, self._waited = self._clock(), 0.0
        try:
            plan = self._scheduler.schedule()
            for preemption in plan.preemptions:
                self.metrics.observe_preemption("recompute", preemption.num_lost)
            before = self._in_flight.popleft() if self._in_flight else None
            touched = self._dispatch(plan)
            if before:
                touched |= self._commit(before)
        except jax.errors.JaxRuntimeError as error:
            return self.fail_all(error)
        outputs = [delta for request in touched.values() if (delta := self._delta(request))]
        for output in outputs:
            if output.finished:
                self._observe_finished(self._requests.pop(output.request_id))
        self._observe_step(before, started)
        return outputs

    def _check(self, prompt_token_ids: ListLike[int], params: SamplingParams) -> int:
        """The most output tokens that the request may have."""
        count, limit = len(prompt_token_ids), self.sizes.max_model_len
        if not count:
            raise ValueError("prompt has no tokens")
        if params.priority:
            raise ValueError("priority needs --scheduling-policy priority, which is not built yet")
        max_tokens = limit - count if params.max_tokens is None else params.max_tokens
        if count + max_tokens > limit or (params.max_tokens is None and max_tokens < 1):
            wanted = "" if params.max_tokens is None else f" and max_tokens is {max_tokens}"
            raise ValueError(f"prompt has {count} tokens{wanted}, over the limit of {limit} tokens in all")
        vocab = self.vocab_size
        ids: ListLike[object] = prompt_token_ids
        for i in ids:
            if not isinstance(i, int | np.integer) or not 0 <= i < vocab:
                raise ValueError(f"prompt has token id {i!r}, and the vocabulary ends at {vocab - 1}")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            bad = next((i for i in getattr(params, name) or () if not 0 <= i < vocab), None)
            if bad is not None:
                raise ValueError(f"{name} has token id {bad}, and the vocabulary ends at {vocab - 1}")
        return max_tokens

    def _dispatch(self, plan: SchedulePlan) -> dict[str, RunningRequest]:
        """Start a step, without the requests that fail as their rows are made; returns those."""
        rows: dict[Sequence, PackedRow] = {}
        failed: dict[str, RunningRequest] = {}
        for share in plan:
            if share.sequence not in self._generations:
                continue  # its request failed just now
            request, _ = self._generations[share.sequence]
            with self._blame(request):
                rows[share.sequence] = self._row(share)
            if request.error:
                failed[request.request_id] = request
        if failed:  # their blocks are free by now: no row of theirs may be written
            plan = plan.only(share.sequence for share in plan if share.sequence in self._generations)
        kept = [rows[share.sequence] for share in plan]
        if kept:
            step_input = self._packer.pack(kept, len(plan.decodes), self._runner.last_tokens)
            compiled = self._runner.num_compiled
            output = self._runner.dispatch(step_input)
            for _ in range(self._runner.num_compiled - compiled):
                self.metrics.count_compile_after_warmup()
            counts = tuple(len(row.prompt_targets) for row in kept)
            self._in_flight.append(StepInFlight(plan, output, counts, self._clock()))
        return failed

    @contextmanager
    def _blame(self, request: RunningRequest) -> Iterator[None]:
        """One request's fault must not reach the others: it ends with an error, and the engine goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._fail(request, error)

    def _delta(self, request: RunningRequest) -> RequestOutput | None:
        with self._blame(request):
            return request.delta()
        return request.failure()

    def _row(self, share: ScheduledSequence) -> PackedRow:
        sequence = share.sequence
        request, generation = self._generations[sequence]
        lane = sequence.lane
        if self._admissions[lane] != sequence.admission:
            self._admissions[lane] = sequence.admission
            params, prompt_len = generation.device_params, sequence.num_prompt
            self._packer.sampling_rows.set(lane, params, prompt_len, generation.key)
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = self._clock()
        if share.samples and generation.has_constraints:
            self._packer.sampling_rows.clear_forbidden(lane)
            if forbidden := generation.forbidden(share.start + share.num_tokens - sequence.num_prompt):
                self._packer.sampling_rows.forbid(lane, forbidden)
        end = share.start + share.num_tokens
        tokens = sequence.token_ids[share.start : end]
        feedback = len(tokens) < share.num_tokens  # the step in flight is sampling it
        wants_prompt = sequence.index == 0 and request.missing_prompt_logprobs
        return PackedRow(
            lane=lane,
            start=share.start,
            token_ids=[0] if feedback else tokens,
            block_table=sequence.block_table,
            samples=share.samples,
            feedback=feedback,
            prompt_targets=request.prompt_token_ids[share.start + 1 : end + 1] if wants_prompt else (),
            table_key=sequence.admission,
        )

    def _commit(self, step: StepInFlight) -> dict[str, RunningRequest]:
        """Give each sequence its token; returns the requests with news."""
        began = self._clock()
        step.wait()
        now = self._clock()
        self._waited += now - began
        # A step starts when it is dispatched or, behind another, when that one ends.
        self._device_seconds = now - max(step.dispatched, self._last_done)
        self._last_done = now
        results = fetch(step, self._generations)
        touched: dict[str, RunningRequest] = {}
        for share, result, prompt in results:
            sequence = share.sequence
            if share.samples:
                sequence.num_pending -= 1
            if sequence.state is SequenceState.FINISHED:
                continue  # it ended, or was aborted, while this step ran: the extra token is dropped
            request, generation = self._generations[sequence]
            with self._blame(request):
                self._take(request, generation, share, result, prompt, now)
            if generation.finish_reason is not None:
                self._leave(sequence)
            touched[request.request_id] = request
        return touched

    def _take(
        self,
        request: RunningRequest,
        generation: Generation,
        share: ScheduledSequence,
        result: TokenResult | None,
        prompt: list[TokenResult],
        now: float,
    ) -> None:
        if prompt:
            request.take_prompt(share.start + 1, prompt, self.tokenizer)
        computed = min(share.start + share.num_tokens, share.sequence.num_prompt) - share.start
        if computed > 0:
            self.metrics.observe_prompt_tokens(computed)
        if result is not None:
            generation.take(result)
            self._observe_token(request, generation, now)
        elif share.start + share.num_tokens >= share.sequence.num_prompt and share.sequence.max_tokens == 0:
            generation.end("length")

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is not SequenceState.FINISHED:
            self._scheduler.finish(sequence)
        self._generations.pop(sequence, None)

    def _fail(self, request: RunningRequest, error: Exception) -> None:
        """End one request with an error; the log has the details under an id that the caller gets too."""
        error_id = secrets.token_hex(8)
        logger.error("error %s in request %s", error_id, request.request_id, exc_info=error)
        request.error = f"internal error {error_id}"
        for generation in request.generations:
            generation.finish_reason = generation.finish_reason or "error"
            self._leave(generation.sequence)

    def fail_all(self, error: Exception) -> list[RequestOutput]:
        """The device failed: end every request with an error, and start with an empty cache."""
        self._in_flight.clear()
        self._host_seconds = 0.0
        outputs = []
        for request in list(self._requests.values()):
            self._fail(request, error)
            if delta := self._delta(request):
                outputs.append(delta)
            self._observe_finished(self._requests.pop(request.request_id), "error")
        self._show_occupancy()
        self._runner.reset()
        return outputs

    def _observe_token(self, request: RunningRequest, generation: Generation, now: float) -> None:
        self.metrics.observe_generation_tokens(1)
        times = request.metrics
        if times.first_token_time is None:
            times.first_token_time = now
            self.metrics.observe_first_token(now - times.arrival_time)
        elif generation.last_token_time is not None:
            self.metrics.observe_token_gap(now - generation.last_token_time)
        generation.last_token_time = times.last_token_time = now

    def _observe_finished(self, request: RunningRequest, reason: str | None = None) -> None:
        times, now = request.metrics, self._clock()
        times.finished_time = now
        scheduled = times.first_scheduled_time or now
        first = times.first_token_time or now
        last = times.last_token_time or now
        count = sum(g.sequence.num_known_output for g in request.generations)
        longest = max(g.sequence.num_known_output for g in request.generations)
        self.metrics.observe_finished(
            reason or request.generations[0].finish_reason or "error",
            len(request.prompt_token_ids),
            count,
            now - times.arrival_time,
            scheduled - times.arrival_time,
            first - scheduled,
            last - first,
            (last - first) / (longest - 1) if longest > 1 else None,
        )

    def _observe_step(self, step: StepInFlight | None, started: float) -> None:
        """Count a step that ended; None in a busy period's first call, whose host time goes to the next one."""
        filled, held = self._show_occupancy()
        self._host_seconds += self._clock() - started - self._waited
        if step is None:
            return
        self._slot_steps[0] += filled
        self._slot_steps[1] += held
        self.metrics.observe_step(step.plan.num_tokens, self._host_seconds, self._device_seconds)
        self._host_seconds = 0.0

    def _show_occupancy(self) -> tuple[int, int]:
        """Set the gauges to what is true now; returns slots filled and slots held."""
        running = self._scheduler.running
        filled = sum(sequence.num_computed for sequence in running)
        held = self._pool.num_held * self.sizes.block_size
        self.metrics.set_occupancy(
            running=len(running),
            waiting=len(self._scheduler.waiting),
            blocks_held=self._pool.num_held,
            blocks_total=self._pool.num_blocks,
            slots_filled=filled,
            slots_held=held,
        )
        return filled, held
