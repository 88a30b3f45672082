"""A snapshot shows the pool as the block tables have it, at every moment, and takes milliseconds."""

import json
import random
import time
from collections import Counter
from typing import Any

import pytest

from pagedjax.block_keys import root_key
from pagedjax.block_tables import BlockTables
from pagedjax.blocks import BlockPool
from pagedjax.request import NO_BLOCK, Sequence
from pagedjax.scheduler import SchedulePlan, Scheduler
from pagedjax.snapshot import pool_snapshot
from pagedjax.swap_space import SwapSpace

SIZE = 4


def make(
    *, num_blocks: int = 24, windows: tuple[int | None, ...] = (None,), max_num_seqs: int = 4, swap: int = 0
) -> Scheduler:
    tables = BlockTables(
        BlockPool(num_blocks, len(windows)),
        block_size=SIZE,
        windows=windows,
        chunk=16,
        swap=SwapSpace(swap) if swap else None,
    )
    return Scheduler(tables, max_num_seqs=max_num_seqs, token_budget=16)


def add(scheduler: Scheduler, request_id: str, prompt: list[int], *, n: int = 1, max_tokens: int = 8) -> list[Sequence]:
    sequences = [
        Sequence(request_id, index, list(prompt), len(prompt), max_tokens, root_key=root_key()) for index in range(n)
    ]
    scheduler.add(*sequences)
    return sequences


def step(scheduler: Scheduler, rng: random.Random | None = None) -> SchedulePlan:
    """Plan a step, and commit it at once."""
    plan = scheduler.schedule()
    for share in plan:
        if share.samples:
            share.sequence.num_pending -= 1
            share.sequence.token_ids.append(rng.randrange(3) if rng else 7)
    return plan


def block(number: int, state: str, **more: Any) -> dict[str, Any]:
    nothing = {"ref_count": 0, "filled": 0, "owners": [], "hash_depth": 0, "group": None}
    return {"id": number, "state": state} | nothing | more


def check(scheduler: Scheduler) -> dict[str, Any]:
    """What must be true of every snapshot, worked out from the tables alone."""
    shown = pool_snapshot(scheduler)
    assert json.loads(json.dumps(shown)) == shown
    pool, sequences = scheduler.pool, [*scheduler.running, *scheduler.waiting]
    sequences += [fork for sequence in sequences for fork in sequence.forks]
    assert shown.keys() == {"num_blocks", "block_size", "blocks", "requests"}
    assert [entry["id"] for entry in shown["blocks"]] == list(range(pool.num_blocks))
    held = [
        (block, group, sequence, index)
        for sequence in sequences
        for group, table in enumerate(sequence.block_tables)
        for index, block in enumerate(table)
        if block != NO_BLOCK
    ]
    counts = Counter(block for block, *_ in held)
    written = {
        (block, offset)
        for block, _, sequence, index in held
        for offset in range(SIZE)
        if index * SIZE + offset < sequence.num_stored
    }
    for entry in shown["blocks"]:
        number = entry["id"]
        assert entry["ref_count"] == counts[number] == pool.ref_counts[number]
        assert entry["state"] == pool.state(number)
        owners = {sequence.request_id for block, _, sequence, _ in held if block == number}
        assert sorted(entry["owners"]) == sorted(owners)
        groups = {group for block, group, _, _ in held if block == number}
        if entry["state"] == "referenced":
            assert entry["filled"] == sum(block == number for block, _ in written)
            assert groups == {entry["group"]}
        if entry["state"] == "free":
            assert entry == block(number, "free")
        if entry["state"] == "cached":
            assert entry == block(number, "cached", filled=SIZE, hash_depth=entry["hash_depth"], group=entry["group"])
        if entry["hash_depth"]:
            assert entry["filled"] == SIZE
            assert {index + 1 for block, _, _, index in held if block == number} <= {entry["hash_depth"]}
        else:
            assert entry["state"] != "cached"
    found = Counter(
        (entry["id"], entry["state"], entry["tokens"], json.dumps(entry["block_tables"])) for entry in shown["requests"]
    )
    assert found == Counter(
        (s.request_id, s.state.value, s.num_tokens, json.dumps(s.block_tables).replace(str(NO_BLOCK), "null"))
        for s in sequences
    )
    return shown


def test_an_empty_pool() -> None:
    assert check(make(num_blocks=2)) == {
        "num_blocks": 2,
        "block_size": SIZE,
        "blocks": [block(0, "free"), block(1, "free")],
        "requests": [],
    }


def test_a_prompt_runs_is_shared_and_stays_cached() -> None:
    scheduler = make(num_blocks=5)
    (first,) = add(scheduler, "a", [1, 2, 3, 4, 5])
    assert check(scheduler)["requests"] == [{"id": "a", "state": "waiting", "tokens": 5, "block_tables": [[]]}]
    scheduler.schedule()
    shown = check(scheduler)
    assert shown["blocks"][:3] == [
        block(0, "referenced", ref_count=1, filled=4, owners=["a"], hash_depth=1, group=0),
        block(1, "referenced", ref_count=1, filled=1, owners=["a"], group=0),
        block(2, "free"),
    ]
    assert shown["requests"] == [{"id": "a", "state": "running", "tokens": 6, "block_tables": [[0, 1]]}]
    add(scheduler, "b", [1, 2, 3, 4, 6])
    scheduler.schedule()
    shown = check(scheduler)
    assert shown["blocks"][0] == block(0, "referenced", ref_count=2, filled=4, owners=["a", "b"], hash_depth=1, group=0)
    assert [request["block_tables"] for request in shown["requests"]] == [[[0, 1]], [[0, 2]]]
    assert [entry["filled"] for entry in shown["blocks"]] == [4, 2, 1, 0, 0]
    for sequence in list(scheduler.running):
        scheduler.finish(sequence)
    assert first.state.value == "finished"
    assert check(scheduler)["blocks"][:2] == [block(0, "cached", filled=4, hash_depth=1, group=0), block(1, "free")]


def test_forks_wait_and_then_share() -> None:
    """Each sequence of a request has an entry; a block that several hold has the request as its owner once."""
    scheduler = make()
    add(scheduler, "a", list(range(20)), n=3)
    scheduler.schedule()  # the first 16 tokens
    shown = check(scheduler)
    assert [(entry["id"], entry["state"]) for entry in shown["requests"]] == [
        ("a", "running"),
        ("a", "waiting"),
        ("a", "waiting"),
    ]
    step(scheduler)
    shown = check(scheduler)
    assert [entry["state"] for entry in shown["requests"]] == ["running"] * 3
    assert [(entry["ref_count"], entry["owners"]) for entry in shown["blocks"][:5]] == [(3, ["a"])] * 5


def test_a_block_that_left_the_window_is_null() -> None:
    scheduler = make(windows=(None, 6))
    add(scheduler, "a", list(range(30)), max_tokens=4)
    for _ in range(4):
        step(scheduler)
    whole, windowed = check(scheduler)["requests"][0]["block_tables"]
    assert len(whole) == len(windowed)
    assert None not in whole
    assert windowed[0] is None
    assert windowed[-1] is not None
    groups = {entry["id"]: entry["group"] for entry in check(scheduler)["blocks"]}
    assert {groups[number] for number in whole} == {0}
    assert {groups[number] for number in windowed if number is not None} == {1}


@pytest.mark.parametrize(("windows", "num_blocks"), [((None,), 16), ((None, 6), 24), ((5,), 8)])
@pytest.mark.parametrize("swap", [0, 6])
def test_at_every_moment(windows: tuple[int | None, ...], num_blocks: int, swap: int) -> None:
    """Requests that share, fork, are preempted, swapped out and evicted, and end at any time."""
    rng = random.Random(f"{windows} {swap}")
    scheduler = make(num_blocks=num_blocks, windows=windows, swap=swap)
    seen: Counter[str] = Counter()
    for number in range(300):
        if rng.random() < 0.4 and len(scheduler.waiting) < 4:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
            add(scheduler, str(number), prompt, n=rng.choice([1, 1, 3]), max_tokens=rng.randrange(1, 24))
        plan = scheduler.schedule()
        check(scheduler)  # while the step runs
        for share in plan:
            if share.samples:
                share.sequence.num_pending -= 1
                share.sequence.token_ids.append(rng.randrange(2))
        for sequence in list(scheduler.running):
            if sequence.num_known_output >= sequence.max_tokens or rng.random() < 0.02:
                scheduler.finish(sequence)
        shown = check(scheduler)
        seen.update(entry["state"] for entry in shown["blocks"])
        seen["shared"] += any(entry["ref_count"] > 1 for entry in shown["blocks"])
        seen["preempted"] += len(plan.preemptions)
        seen["full without a key"] += any(e["filled"] == SIZE and not e["hash_depth"] for e in shown["blocks"])
    kinds = {"free", "cached", "referenced", "shared", "full without a key", "preempted"}
    if None not in windows:
        kinds.remove("preempted")  # what is let in keeps so few blocks that it stays
    assert all(seen[kind] for kind in kinds), seen


def test_ten_thousand_blocks_take_milliseconds() -> None:
    """Between two steps there is no time to lose."""
    scheduler = make(num_blocks=10_000, max_num_seqs=16)
    for number in range(16):
        add(scheduler, str(number), [*range(1000), *([number] * 1000)], max_tokens=100)
    while not scheduler.running or scheduler.waiting:
        step(scheduler)
    for _ in range(1500):
        step(scheduler)
    taken: list[float] = []
    shown: dict[str, Any] = {}
    for _ in range(7):
        began = time.perf_counter()
        shown = pool_snapshot(scheduler)
        taken.append(time.perf_counter() - began)
    assert shown["blocks"][0]["ref_count"] > 1
    assert min(taken) < 0.1
