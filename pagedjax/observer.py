"""What the engine tells its metrics: moments of requests and steps, and how full the pool is."""

from collections.abc import Callable

from pagedjax.beam_request import Beam, BeamRequest
from pagedjax.fetch import StepInFlight
from pagedjax.generation import Generation, RunningRequest
from pagedjax.metrics import Metrics
from pagedjax.occupancy import slots_filled
from pagedjax.scheduler import SchedulePlan, Scheduler


class Observer:
    """Turns what happens into numbers.

    Args:
        metrics: where they are kept.
        scheduler: whose sequences and blocks are looked at.
        clock: seconds, monotonic.
    """

    def __init__(self, metrics: Metrics, scheduler: Scheduler, clock: Callable[[], float]):
        self.metrics, self._scheduler, self._clock = metrics, scheduler, clock
        self._host_seconds = 0.0  # spent and not yet observed with a step
        self._slot_steps = [0, 0]  # slots filled, slots held, summed over steps

    @property
    def kv_waste(self) -> float:
        """Share of held slots that held no token, over all steps so far."""
        filled, held = self._slot_steps
        return 1.0 - filled / held if held else 0.0

    def plan(self, plan: SchedulePlan) -> None:
        """A step was planned."""
        for preemption in plan.preemptions:
            self.metrics.observe_preemption(preemption.mode)
        computed = again = 0
        for share in plan:
            again += share.num_again
            if share.start < share.sequence.num_prompt:
                end = min(share.start + share.num_tokens, share.sequence.num_prompt)
                computed += max(0, end - share.start - share.num_again)
        self.metrics.observe_plan(
            prompt_tokens=computed, recomputed=again, queried=plan.queried, hits=plan.hits, copies=len(plan.copies)
        )

    def token(self, request: RunningRequest | BeamRequest, generation: Generation | Beam, now: float) -> None:
        """A sequence got its next token."""
        self.metrics.observe_generation_tokens(1)
        times = request.metrics
        if times.first_token_time is None:
            times.first_token_time = now
            self.metrics.observe_first_token(now - times.arrival_time)
        elif generation.last_token_time is not None:
            self.metrics.observe_token_gap(now - generation.last_token_time)
        generation.last_token_time = times.last_token_time = now

    def finished(self, request: RunningRequest | BeamRequest, reason: str | None = None) -> None:
        """A request ended; ``reason`` that of its first sequence unless it is given."""
        times, now = request.metrics, self._clock()
        times.finished_time = now
        scheduled = times.first_scheduled_time or now
        first = times.first_token_time or now
        last = times.last_token_time or now
        counts = [g.sequence.num_known_output for g in request.generations]
        longest = max(counts)
        self.metrics.observe_finished(
            reason or request.generations[0].finish_reason or "error",
            len(request.prompt_token_ids),
            sum(counts),
            now - times.arrival_time,
            scheduled - times.arrival_time,
            first - scheduled,
            last - first,
            (last - first) / (longest - 1) if longest > 1 else None,
        )

    def step(self, step: StepInFlight | None, host_seconds: float, device_seconds: float) -> None:
        """A step ended; None in a busy period's first call, whose host time goes to the next one."""
        filled, held = self.occupancy()
        self._host_seconds += host_seconds
        if step is None:
            return
        self._slot_steps[0] += filled
        self._slot_steps[1] += held
        self.metrics.observe_step(step.plan.num_tokens, self._host_seconds, device_seconds)
        self._host_seconds = 0.0

    def reset(self) -> None:
        """The steps so far came to nothing."""
        self._host_seconds = 0.0

    def occupancy(self) -> tuple[int, int]:
        """Set the gauges to what is true now; returns slots filled and slots held."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        filled = slots_filled(scheduler.tables, scheduler.running)
        held = pool.num_held * scheduler.tables.block_size
        self.metrics.set_occupancy(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            blocks_held=pool.num_held,
            blocks_cached=pool.num_cached,
            blocks_total=pool.num_blocks,
            slots_filled=filled,
            slots_held=held,
        )
        return filled, held
