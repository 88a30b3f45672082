"""``AsyncLLM``: many streams at once, clients that leave, and every way the engine can end."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from chain_model import ChainModel
from small_engine import FLAGS, TEXT, greedy, write_small_model

from pagedjax import (
    AsyncLLM,
    BeamSearchParams,
    CompletionOutput,
    QueueFull,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from pagedjax.request import OutputCollector
from pagedjax.text import TextStream


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, step_cache: Path) -> ChainModel:
    return write_small_model(tmp_path_factory.mktemp("small"))


Start = Callable[..., Awaitable[AsyncLLM]]


@pytest.fixture
async def start(chain: ChainModel) -> AsyncIterator[Start]:
    """Starts engines, and ends them when the test is over."""
    engines: list[AsyncLLM] = []

    async def make(**options: Any) -> AsyncLLM:
        engines.append(AsyncLLM(str(chain.folder), **FLAGS, **options))
        return engines[-1]

    yield make
    for engine in engines:
        await asyncio.wait_for(engine.shutdown(), 10)
        assert not engine._thread.is_alive()


@pytest.fixture
async def llm(start: Start) -> AsyncLLM:
    return await start()


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams | BeamSearchParams, **options: Any) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params, **options)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


async def until(holds: Callable[[], bool], seconds: float = 10) -> None:
    """Wait for what another thread does."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def is_idle(llm: AsyncLLM) -> bool:
    engine = llm._engine
    return not engine.has_work and engine.blocks_held == 0 and llm.num_unfinished == 0


async def assert_serves(llm: AsyncLLM) -> None:
    """Nothing is left of what was before, and the next request is answered."""
    await until(lambda: is_idle(llm))
    assert (await last(llm, "<go>", greedy())).outputs[0].text == TEXT
    await until(lambda: is_idle(llm))


# ---- many at once ----------------------------------------------------------------------------------------


async def test_fifty_streams_are_not_mixed_up(llm: AsyncLLM, chain: ChainModel) -> None:
    async def client(number: int) -> None:
        kind, count = f"<n{number % 10}>", 5 + number
        output = await last(llm, kind, greedy(max_tokens=count), request_id=f"client-{number}")
        assert output.request_id == f"client-{number}"
        assert output.prompt == kind
        assert output.outputs[0].token_ids == chain.follow(kind, count)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(client(number))
    await assert_serves(llm)


async def test_clients_that_leave_at_any_moment(llm: AsyncLLM, chain: ChainModel) -> None:
    rng = random.Random(5)

    async def client(number: int) -> bool:
        kind = f"<n{number % 10}>"
        seen: list[int] = []
        async for output in llm.generate(kind, greedy(max_tokens=60, n=1 + number % 2), delta=True):
            for out in output.outputs:
                if out.index == 0:
                    seen += out.token_ids
            if number % 5 == 4 and len(seen) > number:
                break  # the iterator is left alone; the event loop closes it
        assert seen == chain.follow(kind, 60)[: len(seen)]
        return len(seen) == 60

    tasks = [asyncio.create_task(client(number)) for number in range(50)]

    async def leave(task: asyncio.Task[bool]) -> None:
        await asyncio.sleep(rng.random() * 0.3)
        task.cancel()

    async with asyncio.timeout(60):
        await asyncio.gather(*(leave(task) for task in tasks[::2]))
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) > 5
    assert not [result for result in results if isinstance(result, Exception)]
    assert all(results[number] is True for number in range(1, 50, 2) if number % 5 != 4)
    await assert_serves(llm)


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_a_client_that_leaves_frees_its_blocks_before_the_next_step(llm: AsyncLLM, how: str) -> None:
    gone = asyncio.Event()
    steps_after, original, aborted = 0, llm._engine.step, False

    def step() -> list[RequestOutput]:
        nonlocal steps_after
        if aborted:
            steps_after += llm._engine.blocks_held > 0
        return original()

    llm._engine.step = step  # type: ignore[method-assign]

    async def read() -> None:
        nonlocal aborted
        stream = llm.generate("<loop>", greedy(max_tokens=120), request_id="leaver")
        async for _ in stream:
            gone.set()
            if how == "close":
                break
        await stream.aclose()

    task = asyncio.create_task(read())
    await gone.wait()
    original_abort = llm._engine.abort

    def abort(request_id: str) -> None:
        nonlocal aborted
        original_abort(request_id)
        aborted = True

    llm._engine.abort = abort  # type: ignore[method-assign]
    if how == "cancel":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await task
    await until(lambda: is_idle(llm))
    assert aborted
    assert steps_after == 0
    metrics = llm.metrics()
    assert metrics["generation_tokens"] < 120


async def test_an_iterator_that_nobody_reads_asks_for_nothing(llm: AsyncLLM) -> None:
    stream = llm.generate("<loop>", greedy())
    await asyncio.sleep(0.01)
    assert llm.num_unfinished == 0
    await stream.aclose()


async def test_a_slow_reader_gets_everything(llm: AsyncLLM, chain: ChainModel) -> None:
    seen: list[int] = []
    async for delta in llm.generate("<loop>", greedy(max_tokens=20), delta=True):
        seen += delta.outputs[0].token_ids
        await asyncio.sleep(0.005)
    assert seen == chain.follow("<loop>", 20)


# ---- beams, salts and blocks -----------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [False, True])
async def test_a_beam_search_speaks_once(llm: AsyncLLM, chain: ChainModel, delta: bool) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=5)
    (output,) = [output async for output in llm.generate("<pqr>", params, delta=delta)]
    assert output.finished
    assert [out.index for out in output.outputs] == [0, 1, 2, 3]
    scores = [out.cumulative_logprob or 0.0 for out in output.outputs]
    assert scores == sorted(scores, reverse=True)
    for out in output.outputs:
        pairs = zip([chain.id("<pqr>"), *out.token_ids], out.token_ids, strict=False)
        assert out.cumulative_logprob == pytest.approx(float(sum(chain.log_probs[pair] for pair in pairs)), abs=1e-4)
    await assert_serves(llm)


async def test_a_client_that_leaves_ends_its_beams(llm: AsyncLLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=48, ignore_eos=True)
    task = asyncio.create_task(last(llm, "<dice>", params))
    await until(lambda: llm.metrics()["generation_tokens"] > 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await assert_serves(llm)


async def test_a_salt_keeps_others_out(llm: AsyncLLM) -> None:
    async def cached(salt: str | None) -> int:
        return (await last(llm, "<n1>" * 20, greedy(max_tokens=2), cache_salt=salt)).num_cached_tokens

    assert [await cached(salt) for salt in (None, "a", "b", "a", None)] == [0, 0, 0, 16, 16]
    await assert_serves(llm)


async def test_blocks_between_two_steps(llm: AsyncLLM) -> None:
    running = [llm.generate("<n2>" * 9, greedy(max_tokens=100, n=2)) for _ in range(2)]
    for stream in running:
        await anext(stream)
    for _ in range(5):
        shown = await llm.blocks()
        held = [block for table in (t for r in shown["requests"] for t in r["block_tables"]) for block in table]
        assert [block["ref_count"] for block in shown["blocks"]] == [held.count(i) for i in range(24)]
        assert len(shown["requests"]) == 4
    for stream in running:
        await stream.aclose()
    await until(lambda: is_idle(llm))
    assert (await llm.blocks())["requests"] == []
    await llm.shutdown()
    with pytest.raises(RequestError, match="shut down"):
        await asyncio.wait_for(llm.blocks(), 10)


# ---- requests that are refused ---------------------------------------------------------------------------


async def test_bad_requests(llm: AsyncLLM) -> None:
    refused: list[tuple[Any, SamplingParams | BeamSearchParams, str]] = [
        ([], greedy(), "prompt"),
        ([10_000], greedy(), "prompt"),
        ("<go>", greedy(max_tokens=500), "prompt"),
        ("<go>", greedy(stop_token_ids=[10_000]), "stop_token_ids"),
        ("<go>", greedy(priority=1), "priority"),
        ("<go>", BeamSearchParams(beam_width=9, max_tokens=4), "beam_width"),
    ]
    for prompt, params, name in refused:
        with pytest.raises(ValueError, match=f"^{name}"):
            await last(llm, prompt, params)
    await assert_serves(llm)


async def test_an_id_that_is_in_use_does_not_harm_who_has_it(llm: AsyncLLM, chain: ChainModel) -> None:
    first = llm.generate("<loop>", greedy(max_tokens=100), request_id="one")
    await anext(first)
    with pytest.raises(ValueError, match=r"^request_id 'one'"):
        await last(llm, "<go>", greedy(), request_id="one")
    outputs = [output async for output in first]
    assert outputs[-1].outputs[0].token_ids == chain.follow("<loop>", 100)
    assert (await last(llm, "<go>", greedy(), request_id="one")).outputs[0].text == TEXT


async def test_a_full_queue(start: Start) -> None:
    llm = await start(max_queue=4)
    streams = [llm.generate("<loop>", greedy(max_tokens=100, n=4)) for _ in range(3)]
    for stream in streams[:2]:
        await anext(stream)  # these fill the eight places
    third = asyncio.create_task(anext(streams[2]))
    await until(lambda: llm._engine.num_waiting >= 4)
    with pytest.raises(QueueFull, match="try again later"):
        await last(llm, "<go>", greedy())
    assert llm.metrics()["admission_rejections{reason=queue_full}"] == 1
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    for stream in streams:
        await stream.aclose()
    await assert_serves(llm)


async def test_a_full_queue_says_when_to_come_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = await start(max_queue=1)
    monkeypatch.setattr(llm._drain_rate, "seconds_for", lambda sequences, now: 100.0 * sequences)
    running = [llm.generate("<loop>", greedy(max_tokens=100)) for _ in range(8)]
    for stream in running:
        await anext(stream)
    waiting = asyncio.create_task(last(llm, "<loop>", greedy(max_tokens=5)))
    await until(lambda: llm._engine.num_waiting == 1)
    with pytest.raises(QueueFull) as refused:
        await last(llm, "<go>", greedy(n=2))
    assert refused.value.retry_after == 200.0, "two have to leave before two may come"
    assert not llm._drain_rate._ended
    await running[0].aclose()
    await waiting
    for stream in running[1:]:
        await stream.aclose()
    await until(lambda: is_idle(llm))
    assert sum(count for _, count in llm._drain_rate._ended) == 9
    await last(llm, "<go>", greedy())
    assert sum(count for _, count in llm._drain_rate._ended) <= 1, "what was before an idle time does not count"


async def test_who_finds_a_free_place_does_not_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = await start(max_queue=2)
    hold = threading.Event()
    original = llm._engine.step

    def step() -> list[RequestOutput]:
        hold.wait(10)
        return original()

    monkeypatch.setattr(llm._engine, "step", step)
    tasks = [asyncio.create_task(last(llm, "<loop>", greedy())) for _ in range(12)]
    await until(lambda: llm.num_unfinished > 0)
    hold.set()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    kinds = [type(result) for result in results]
    assert kinds == [RequestOutput] * (FLAGS["max_num_seqs"] + 2) + [QueueFull] * 2
    await assert_serves(llm)


async def test_every_sample_has_to_wait(start: Start) -> None:
    llm = await start(max_queue=4)
    running = llm.generate("<loop>", greedy(max_tokens=100, n=4))
    await anext(running)
    with pytest.raises(QueueFull):
        await last(llm, "<go>", greedy(n=9))
    with pytest.raises(QueueFull, match="5 sequences would wait"):
        await last(llm, "<go>", BeamSearchParams(beam_width=9, max_tokens=4))
    await running.aclose()
    await until(lambda: is_idle(llm))
    assert len((await last(llm, "<go>", greedy(n=13, max_tokens=2))).outputs) == 13, "there will never be more room"


# ---- faults and ends -------------------------------------------------------------------------------------


async def test_one_step_that_fails_ends_what_ran_and_no_more(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    original = llm._engine._runner.sample
    calls = 0

    def sample(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("a fault of ours")
        return original(*args)

    monkeypatch.setattr(llm._engine._runner, "sample", sample)
    results = await asyncio.gather(*(last(llm, "<loop>", greedy()) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [RequestError] * 3
    assert all("internal error" in str(result) for result in results)
    assert llm.is_healthy(1.0)
    await assert_serves(llm)


async def test_shutdown_ends_running_requests(start: Start) -> None:
    llm = await start()
    # Far more than can run at once, so that some still wait.
    tasks = [asyncio.create_task(last(llm, "<loop>", greedy(max_tokens=100, n=2))) for _ in range(20)]
    await until(lambda: llm.metrics()["generation_tokens"] > 20)
    await asyncio.wait_for(llm.shutdown(), 10)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert {type(result) for result in results} == {RequestError}
    assert llm._engine.blocks_held == 0
    assert llm.num_unfinished == 0
    assert not llm.is_healthy(1.0)
    with pytest.raises(RequestError, match="shut down"):
        await asyncio.wait_for(last(llm, "<go>", greedy()), 10)
    await asyncio.wait_for(llm.shutdown(), 10)


async def test_shutdown_does_not_wait_for_a_step_that_hangs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = await start()
    hold, begun = threading.Event(), threading.Event()
    original = llm._engine.step

    def step() -> list[RequestOutput]:
        begun.set()
        hold.wait(10)
        return original()

    monkeypatch.setattr(llm._engine, "step", step)
    task = asyncio.create_task(last(llm, "<go>", greedy()))
    await until(begun.is_set)
    assert await llm.shutdown(timeout=0.05) is False
    hold.set()
    assert await llm.shutdown(timeout=10) is True
    with pytest.raises(RequestError, match="shut down"):
        await task


async def test_a_fault_as_a_client_hangs_up(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def finish(self: TextStream) -> str:
            raise RuntimeError("a fault of ours")

        patch.setattr(TextStream, "finish", finish)
        stream = llm.generate("<loop>", greedy(max_tokens=100))
        await anext(stream)
        await stream.aclose()
        await until(lambda: is_idle(llm))
    assert llm.is_healthy(1.0)
    await assert_serves(llm)


async def test_requests_that_come_while_it_shuts_down_do_not_hang(start: Start) -> None:
    llm = await start()
    running = asyncio.create_task(last(llm, "<loop>", greedy()))
    await until(lambda: llm.num_unfinished == 1)
    late = [asyncio.create_task(last(llm, "<go>", greedy())) for _ in range(3)]
    ending = asyncio.create_task(llm.shutdown())
    late += [asyncio.create_task(last(llm, "<go>", greedy())) for _ in range(3)]
    results = await asyncio.wait_for(asyncio.gather(running, *late, ending, return_exceptions=True), 10)
    assert results.pop() is True
    assert all(isinstance(result, RequestError | RequestOutput) for result in results)
    assert isinstance(results[-1], RequestError)


async def test_the_engines_thread_dies(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = await start()

    def fail_all(error: Exception) -> list[RequestOutput]:
        raise MemoryError("no room for another cache") from error

    monkeypatch.setattr(llm._engine, "fail_all", fail_all)
    original, calls = llm._engine.step, 0

    def step() -> list[RequestOutput]:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("the device is gone")
        return original()

    monkeypatch.setattr(llm._engine, "step", step)
    tasks = [asyncio.create_task(last(llm, "<loop>", greedy())) for _ in range(3)]
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert {type(result) for result in results} == {RequestError}
    assert all("has stopped" in str(result) for result in results)
    assert not llm.is_healthy(1.0)
    assert llm.num_unfinished == 0
    for _ in range(3):
        with pytest.raises(RequestError, match="has stopped"):
            await asyncio.wait_for(last(llm, "<go>", greedy()), 10)


async def test_health(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.is_healthy(0.5)
    await asyncio.sleep(0.6)
    assert llm.is_healthy(0.5), "the time without work is no hang"
    hold = threading.Event()
    original = llm._engine.step

    def step() -> list[RequestOutput]:
        hold.wait(10)
        return original()

    monkeypatch.setattr(llm._engine, "step", step)
    task = asyncio.create_task(last(llm, "<go>", greedy()))
    await until(lambda: llm.num_unfinished == 1)
    assert llm.is_healthy(0.5)
    await until(lambda: not llm.is_healthy(0.05))
    hold.set()
    assert (await task).outputs[0].text == TEXT
    assert llm.is_healthy(0.5)


# ---- several event loops ---------------------------------------------------------------------------------


async def in_threads(*programs: Callable[[], None]) -> None:
    await asyncio.wait_for(asyncio.gather(*(asyncio.to_thread(program) for program in programs)), 60)


async def test_two_event_loops(llm: AsyncLLM, chain: ChainModel) -> None:
    def program(first: int) -> None:
        async def clients() -> None:
            kinds = [f"<n{first + number}>" for number in range(5)] * 3
            outputs = await asyncio.gather(*(last(llm, kind, greedy(max_tokens=40)) for kind in kinds))
            for kind, output in zip(kinds, outputs, strict=True):
                assert output.outputs[0].token_ids == chain.follow(kind, 40)

        asyncio.run(clients())

    await in_threads(lambda: program(0), lambda: program(5))
    await assert_serves(llm)


async def test_an_event_loop_that_ends_with_requests_running(llm: AsyncLLM, chain: ChainModel) -> None:
    def leave() -> None:
        loop = asyncio.new_event_loop()

        async def begin() -> Any:
            stream = llm.generate("<loop>", greedy(max_tokens=120))
            await anext(stream)
            return stream

        streams = [loop.run_until_complete(begin()) for _ in range(3)]
        loop.close()  # without closing the streams first: nobody will ever read them
        assert len(streams) == 3

    def stay() -> None:
        output = asyncio.run(last(llm, "<n7>", greedy(max_tokens=120)))
        assert output.outputs[0].token_ids == chain.follow("<n7>", 120)

    await in_threads(leave, stay)
    assert llm.is_healthy(5.0)
    await assert_serves(llm)


# ---- what a request has given so far ---------------------------------------------------------------------


def delta_of(number: int, *, index: int = 0, finished: bool = False) -> RequestOutput:
    news = CompletionOutput(index=index, text="x", token_ids=[number], finish_reason="stop" if finished else None)
    return RequestOutput(request_id="r", prompt=None, prompt_token_ids=[1], outputs=[news], finished=finished)


def test_a_snapshot_stays_as_it_is() -> None:
    collector, deltas = OutputCollector(), [delta_of(1), delta_of(2, index=1), delta_of(3, finished=True)]
    snapshots = []
    for delta in deltas:
        collector.add(delta)
        snapshots.append(collector.snapshot())
    assert [[out.token_ids for out in s.outputs] for s in snapshots] == [[[1]], [[1], [2]], [[1, 3], [2]]]
    assert [[out.text for out in s.outputs] for s in snapshots] == [["x"], ["x", "x"], ["xx", "x"]]
    assert [s.finished for s in snapshots] == [False, False, True]
    assert [out.finish_reason for out in snapshots[-1].outputs] == ["stop", None]
    assert deltas == [delta_of(1), delta_of(2, index=1), delta_of(3, finished=True)]


def test_collecting_a_long_output_is_not_quadratic() -> None:
    collector, count = OutputCollector(), 40_000
    deltas = [delta_of(number) for number in range(count)]
    began = time.process_time()
    for delta in deltas:
        collector.add(delta)
    (out,) = collector.snapshot().outputs
    assert time.process_time() - began < 1.0
    assert out.token_ids == list(range(count))
    assert len(out.text) == count
