"""The engine: plans a step ahead, dispatches it, commits the step before, and hands out what is new."""

import dataclasses
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from typing import Any

import jax

from pagedjax.admission import Admission, Request
from pagedjax.beam_request import Beam, BeamRequest
from pagedjax.block_tables import BlockTables
from pagedjax.blocks import BlockPool
from pagedjax.config import BeamSearchParams, SamplingParams
from pagedjax.fetch import StepInFlight, fetch
from pagedjax.generation import Generation, TokenResult
from pagedjax.grammars import Grammar, GrammarError, Grammars
from pagedjax.metrics import Metrics
from pagedjax.observer import Observer
from pagedjax.pack import PackedRow, StepPacker
from pagedjax.request import RequestOutput, Sequence, SequenceState
from pagedjax.runner import StepRunner
from pagedjax.scheduler import ScheduledSequence, SchedulePlan, Scheduler
from pagedjax.sizing import EngineSizes
from pagedjax.snapshot import pool_snapshot
from pagedjax.swap_space import SwapSpace
from pagedjax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread owns it.

    ``step`` plans and dispatches step N+1 while step N runs, then waits for N and commits it. What N sampled reaches
    N+1 on the device; a stop condition is therefore known one step late, and the extra token is dropped. Where what may
    come next depends on the token that N samples (a grammar, a bad word of several tokens), N+1's larger part is
    dispatched first, N is committed and the mask is made while that runs, and the sampling of N+1 goes last.

    Args:
        runner: the device end, warmed up.
        sizes: of cache and batch.
        tokenizer: None for a model without one; text stays empty then.
        eos_token_ids: tokens that end a sequence.
        metrics: what is counted.
        prefix_caching: whether requests share blocks of equal beginnings, also with requests that have ended.
        by_priority: whether ``SamplingParams.priority`` decides whose turn it is.
        tables: block tables of another kind than paged ones.
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
        prefix_caching: bool = True,
        by_priority: bool = False,
        tables: BlockTables | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.sizes, self.shapes, self.metrics, self.tokenizer = sizes, runner.shapes, metrics, tokenizer
        self.on_step: Callable[[SchedulePlan, float, float], None] | None = None  # told device and host seconds too
        self._runner, self._packer, self._clock = runner, StepPacker(runner.shapes), clock
        self._scheduler = Scheduler(
            tables or paged_tables(sizes, runner.windows, keeps=prefix_caching),
            max_num_seqs=sizes.max_num_seqs,
            token_budget=sizes.token_budget,
            by_priority=by_priority,
        )
        self._observer = Observer(metrics, self._scheduler, clock)
        self.grammars = Grammars(tokenizer, runner.shapes.vocab_size, eos_token_ids)
        self._admission = Admission(
            self._scheduler,
            sizes,
            vocab_size=runner.shapes.vocab_size,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            grammars=self.grammars,
            prefix_caching=prefix_caching,
            seed=seed,
        )
        self._requests: dict[str, Request] = {}
        self._generations: dict[Sequence, tuple[Request, Generation | Beam]] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._admissions = [-1] * sizes.max_num_seqs  # the admission each lane's sampling settings belong to
        self._last_done = 0.0  # when the step before ended on the device
        self._device_seconds = 0.0  # of the step that ended last
        self._waited = 0.0  # for the device, in this call of step
        self._observer.occupancy()

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
        return self._scheduler.num_waiting

    @property
    def num_free_places(self) -> int:
        """Sequences that could run beside those that do."""
        return self._scheduler.num_free_lanes

    @property
    def blocks_held(self) -> int:
        """Blocks that sequences hold."""
        return self._scheduler.pool.num_held

    @property
    def kv_waste(self) -> float:
        """Share of held slots that held no token, over all steps so far."""
        return self._observer.kv_waste

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        prompt: str | None = None,
        cache_salt: str | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        """Queue a request. Requests with different ``cache_salt`` share nothing in the prefix cache.

        ``grammar`` is what ``grammars.compile`` made of ``params.structured_outputs``, in another thread perhaps; it is
        compiled here where it is not given.

        Raises:
            ValueError: it can't be served; the message begins with the field at fault.
        """
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")
        now = self._clock()
        request = self._admission.request(request_id, prompt_token_ids, params, prompt, cache_salt, now, grammar)
        self._scheduler.add(*(generation.sequence for generation in request.generations))
        self._requests[request_id] = request
        self._generations |= {generation.sequence: (request, generation) for generation in request.generations}

    def snapshot(self) -> dict[str, Any]:
        """Every block and every request as they are now (``GET /debug/blocks`` shows it)."""
        return pool_snapshot(self._scheduler)

    def abort(self, request_id: str) -> None:
        """End a request without a further word; its blocks are free at once. Unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for generation in request.generations:
            # Nobody reads the text that is held back: it is not asked for, and cannot fail.
            generation.finish_reason = generation.finish_reason or "abort"
            self._leave(generation.sequence)
        self._observer.finished(request, "abort")
        self._observer.occupancy()

    def step(self) -> list[RequestOutput]:
        """Dispatch the next step, commit the one before it, and return what is new, as deltas."""
        started, self._waited = self._clock(), 0.0
        try:
            plan = self._scheduler.schedule()
            self._observer.plan(plan)
            before = self._in_flight.popleft() if self._in_flight else None
            touched = self._dispatch(plan, before)
        except jax.errors.JaxRuntimeError as error:
            return self.fail_all(error)
        outputs = [delta for request in touched.values() if (delta := self._delta(request))]
        for output in outputs:
            if output.finished:
                self._observer.finished(self._requests.pop(output.request_id))
        host_seconds = self._clock() - started - self._waited
        self._observer.step(before, host_seconds, self._device_seconds)
        if self.on_step and before:
            self.on_step(before.plan, self._device_seconds, host_seconds)
        return outputs

    def _dispatch(self, plan: SchedulePlan, before: StepInFlight | None) -> dict[str, Request]:
        """Start a step and commit the one before it; returns the requests with news."""
        if plan.transfers:
            self._runner.swap(plan.transfers)
        rows, touched = self._rows(plan)
        late = [share for share, row in zip(plan, rows, strict=True) if self._is_late(share, row)]
        self._constrain([share for share in plan if share not in late], touched)
        if not rows:
            return touched | (self._commit(before) if before else {})
        copies = [(copy.source, copy.target) for copy in plan.copies]
        step_input = self._packer.pack(rows, len(plan.decodes), self._runner.last_tokens, copies)
        compiled, dispatched = self._runner.num_compiled, self._clock()
        forwarded = self._runner.forward(step_input)
        if late and before:
            touched |= self._commit(before)
            before = None
            self._constrain(late, touched)
            step_input = dataclasses.replace(step_input, rows=self._packer.with_masks(step_input.rows))
        output = self._runner.sample(step_input, forwarded)
        for _ in range(self._runner.num_compiled - compiled):
            self.metrics.count_compile_after_warmup()
        counts = tuple(len(row.prompt_targets) for row in rows)
        self._in_flight.append(StepInFlight(plan, output, counts, dispatched))
        return touched | (self._commit(before) if before else {})

    def _rows(self, plan: SchedulePlan) -> tuple[list[PackedRow], dict[str, Request]]:
        """The shares as rows, and the requests that failed as these were made.

        Their rows stay in the step: others may already count on the blocks that these fill.
        """
        failed: dict[str, Request] = {}
        rows = [self._bare_row(share) for share in plan]
        for index, share in enumerate(plan):
            if share.sequence not in self._generations:
                continue  # its request failed just now
            request, generation = self._generations[share.sequence]
            with self._blame(request):
                rows[index] = self._row(share, rows[index], request, generation)
            if request.error:
                failed[request.request_id] = request
        return rows, failed

    def _is_late(self, share: ScheduledSequence, row: PackedRow) -> bool:
        """Whether the token in flight decides what may come after it."""
        entry = self._generations.get(share.sequence)
        return share.samples and row.feedback and entry is not None and entry[1].needs_last_token

    def _constrain(self, shares: ListLike[ScheduledSequence], touched: dict[str, Request]) -> None:
        """Say which tokens may come next, where not all may; requests that fail at it are added to ``touched``."""
        found = [(s, *self._generations[s.sequence]) for s in shares if s.samples and s.sequence in self._generations]
        asking = [entry for entry in found if entry[2].has_constraints]
        masks = iter(self.grammars.masks([generation.grammar for _, _, generation in asking if generation.grammar]))
        for share, request, generation in asking:
            mask = next(masks) if generation.grammar else None
            if request.error:
                continue  # for another of its samples
            with self._blame(request):
                if isinstance(mask, GrammarError):
                    raise mask
                forbidden = generation.forbidden(share.start + share.num_tokens - share.sequence.num_prompt)
                self._packer.sampling_rows.constrain(share.sequence.lane, mask, forbidden)
            if request.error:
                touched[request.request_id] = request

    @contextmanager
    def _blame(self, request: Request) -> Iterator[None]:
        """One request's fault must not reach the others: it ends with an error, and the engine goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._fail(request, error)

    def _delta(self, request: Request) -> RequestOutput | None:
        with self._blame(request):
            return request.delta()
        return request.failure()

    def _bare_row(self, share: ScheduledSequence) -> PackedRow:
        sequence = share.sequence
        tokens = sequence.token_ids[share.start : share.start + share.num_tokens]
        feedback = len(tokens) < share.num_tokens  # the step in flight is sampling it
        return PackedRow(
            lane=sequence.lane,
            start=share.start,
            token_ids=[0] if feedback else tokens,
            block_tables=sequence.block_tables,
            samples=share.samples,
            feedback=feedback,
            first_write=share.first_write,
            table_key=sequence.admission,
        )

    def _row(
        self, share: ScheduledSequence, row: PackedRow, request: Request, generation: Generation | Beam
    ) -> PackedRow:
        """The row with what its request asks for."""
        sequence, lane = share.sequence, row.lane
        if self._admissions[lane] != sequence.admission:
            self._admissions[lane] = sequence.admission
            params, prompt_len = generation.device_params, sequence.num_prompt
            self._packer.sampling_rows.set(lane, params, prompt_len, generation.key)
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = self._clock()
        if sequence.index or not request.missing_prompt_logprobs:
            return row
        targets = request.prompt_token_ids[share.start + 1 : share.start + share.num_tokens + 1]
        return row._replace(prompt_targets=targets)

    def _commit(self, step: StepInFlight) -> dict[str, Request]:
        """Give each sequence its token; returns the requests with news."""
        began = self._clock()
        step.wait()
        now = self._clock()
        self._waited += now - began
        # A step starts when it is dispatched or, behind another, when that one ends.
        self._device_seconds = now - max(step.dispatched, self._last_done)
        self._last_done = now
        results = fetch(step, self._generations)
        touched: dict[str, Request] = {}
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
        for request in touched.values():
            if isinstance(request, BeamRequest):
                with self._blame(request):
                    self._advance(request)
        return touched

    def _advance(self, request: BeamRequest) -> None:
        """Fork and drop a search's beams, once each of them has given its candidates."""
        if decided := request.advance():
            for beam in decided.ended:
                self._leave(beam.sequence)
            for parent, child in decided.forks:
                self._scheduler.fork(parent.sequence, child.sequence)
                self._generations[child.sequence] = (request, child)

    def _take(
        self,
        request: Request,
        generation: Generation | Beam,
        share: ScheduledSequence,
        result: TokenResult | None,
        prompt: list[TokenResult],
        now: float,
    ) -> None:
        if prompt:
            request.take_prompt(share.start + 1, prompt, self.tokenizer)
            share.sequence.reads_cache = not request.missing_prompt_logprobs
        if result is not None:
            generation.take(result)
            self._observer.token(request, generation, now)
        elif share.start + share.num_tokens >= share.sequence.num_prompt and share.sequence.max_tokens == 0:
            generation.end("length")

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is not SequenceState.FINISHED:
            self._scheduler.finish(sequence)
        self._generations.pop(sequence, None)

    def _fail(self, request: Request, error: Exception) -> None:
        """End one request with an error; the log has the details under an id that the caller gets too."""
        if isinstance(error, GrammarError):
            request.error = str(error)
        else:
            error_id = secrets.token_hex(8)
            logger.error("error %s in request %s", error_id, request.request_id, exc_info=error)
            request.error = f"internal error {error_id}"
        for generation in request.generations:
            generation.finish_reason = generation.finish_reason or "error"
            self._leave(generation.sequence)

    def fail_all(self, error: Exception) -> list[RequestOutput]:
        """The device failed: end every request with an error, and start with an empty cache."""
        self._in_flight.clear()
        self._observer.reset()
        outputs = []
        for request in list(self._requests.values()):
            self._fail(request, error)
            if delta := self._delta(request):
                outputs.append(delta)
            self._observer.finished(self._requests.pop(request.request_id), "error")
        self._scheduler.pool.forget_all()
        self._observer.occupancy()
        self._runner.reset()
        return outputs


def paged_tables(sizes: EngineSizes, windows: tuple[int | None, ...], *, keeps: bool = True) -> BlockTables:
    """Block tables over a new pool; ``keeps`` says whether blocks stay cached when nobody holds them."""
    return BlockTables(
        BlockPool(sizes.num_blocks, len(windows), keeps=keeps),
        block_size=sizes.block_size,
        windows=windows,
        chunk=sizes.token_budget,
        swap=SwapSpace(sizes.swap_blocks) if sizes.swap_blocks else None,
    )
