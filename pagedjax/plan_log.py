"""Plans on record: what a live scheduler was told and what it planned, and the same again from the record.

A record is JSON lines, each an event in the order of things: ``add``, ``fork``, ``finish`` and ``plan``. Under
``known`` a line first says what has changed meanwhile about sequences that matter to it: tokens committed, and so on.
Sequences and block keys are numbered as they come, so that a record holds no token and no text.
"""

import json
from collections.abc import Iterable
from itertools import count
from typing import Any, TextIO

from pagedjax.block_keys import BlockKey
from pagedjax.block_tables import BlockTables
from pagedjax.request import Sequence, SequenceState
from pagedjax.scheduler import ScheduledSequence, SchedulePlan, Scheduler
from pagedjax.simulator import counted_tokens

# What others than the scheduler change about a sequence, beside its tokens and the keys of their blocks.
_FLAGS = ("num_pending", "waits_for_token", "is_paused", "reads_cache")


class RecordingScheduler:
    """Stands before a scheduler, passes everything on, and writes it down.

    Nothing is written of a device's fault, after which the pool forgets what it held: a record ends there.

    Args:
        scheduler: new, or idle with an empty cache.
        file: gets the lines.
    """

    def __init__(self, scheduler: Scheduler, file: TextIO):
        self._scheduler, self._file = scheduler, file
        self._numbers: dict[Sequence, int] = {}
        self._next_number = count()
        self._keys: dict[BlockKey, int] = {}
        self._seen: dict[Sequence, list[Any]] = {}  # what the record says of each

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def add(self, *sequences: Sequence) -> None:
        """See ``Scheduler.add``; a request that is refused leaves no trace."""
        self._scheduler.add(*sequences)
        self._write([], add=[self._born(sequence) for sequence in sequences])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """See ``Scheduler.fork``."""
        self._write([parent], fork=[self._numbers[parent], self._born(child)])
        self._scheduler.fork(parent, child)
        self._seen[child] = _state(child)  # with its parent's keys, which it gets in a replay too

    def finish(self, sequence: Sequence) -> None:
        """See ``Scheduler.finish``."""
        self._write([sequence], finish=self._numbers[sequence])
        self._scheduler.finish(sequence)
        del self._numbers[sequence], self._seen[sequence]

    def schedule(self) -> SchedulePlan:
        """See ``Scheduler.schedule``."""
        known = self._changes(self._numbers)
        plan = self._scheduler.schedule()
        self._seen = {sequence: _state(sequence) for sequence in self._numbers}  # a replay's plan changes it alike
        self._file.write(json.dumps({"known": known, "plan": describe(plan, self._numbers, self.tables)}) + "\n")
        return plan

    def _born(self, sequence: Sequence) -> dict[str, Any]:
        number = self._numbers[sequence] = next(self._next_number)
        self._name(sequence)
        self._seen[sequence] = _state(sequence)
        return {
            "number": number,
            "index": sequence.index,
            "tokens": len(sequence.token_ids),
            "num_prompt": sequence.num_prompt,
            "max_tokens": sequence.max_tokens,
            "priority": sequence.priority,
            "keeps_history": sequence.keeps_history,
            "keys": None if sequence.root_key is None else self._numbered(sequence.block_keys),
        } | {name: getattr(sequence, name) for name in _FLAGS}

    def _write(self, changing: Iterable[Sequence], **event: Any) -> None:
        self._file.write(json.dumps({"known": self._changes(changing)} | event) + "\n")

    def _changes(self, sequences: Iterable[Sequence]) -> dict[int, Any]:
        """By number: new tokens, keys of blocks that are full with them, flags as they are now."""
        changes = {}
        for sequence in sequences:
            self._name(sequence)
            now, before = _state(sequence), self._seen[sequence]
            if now != before:
                keys = self._numbered(sequence.block_keys[before[1] :])
                changes[self._numbers[sequence]] = [now[0] - before[0], keys, *now[2:]]
                self._seen[sequence] = now
        return changes

    def _name(self, sequence: Sequence) -> None:
        if sequence.root_key is not None:
            self.tables.name_blocks(sequence, len(sequence.token_ids) // self.tables.block_size)

    def _numbered(self, keys: Iterable[BlockKey]) -> list[int]:
        return [self._keys.setdefault(key, len(self._keys)) for key in keys]


def _state(sequence: Sequence) -> list[Any]:
    flags = [getattr(sequence, name) for name in _FLAGS]
    return [len(sequence.token_ids), len(sequence.block_keys), *flags]


def describe(plan: SchedulePlan, numbers: dict[Sequence, int], tables: BlockTables) -> dict[str, Any]:
    """A plan as plain values that JSON gives back equal: shares with their lanes and the blocks that they reach."""

    def share(s: ScheduledSequence) -> list[Any]:
        first, end = s.start // tables.block_size, tables.blocks_for(s.start + s.num_tokens)
        blocks = [table[first:end] for table in s.sequence.block_tables]
        return [
            numbers[s.sequence],
            s.sequence.lane,
            s.start,
            s.num_tokens,
            s.first_write,
            s.samples,
            s.num_again,
            blocks,
        ]

    return {
        "decodes": [share(s) for s in plan.decodes],
        "prefills": [share(s) for s in plan.prefills],
        "preemptions": [[numbers[p.sequence], p.num_lost, p.mode] for p in plan.preemptions],
        "transfers": [[t.block, t.slot, t.out] for t in plan.transfers],
        "copies": [[c.source, c.target] for c in plan.copies],
        "queried": plan.queried,
        "hits": plan.hits,
    }


def replay(lines: Iterable[str], scheduler: Scheduler) -> int:
    """Feed a record's events to a scheduler and compare every plan with the recorded one.

    Args:
        lines: of the record.
        scheduler: new, with the sizes and policies of the one that was recorded.

    Returns:
        How many plans were compared.

    Raises:
        ValueError: a plan differs; the message has the line's number and both plans.
    """
    sequences: dict[int, Sequence] = {}
    plans = 0
    for number, line in enumerate(lines, start=1):
        event = json.loads(line)
        for key, (tokens, keys, *flags) in event["known"].items():
            _change(sequences[int(key)], tokens, keys, flags)
        if "add" in event:
            born = [_sequence(fields, number) for fields in event["add"]]
            sequences |= {fields["number"]: made for fields, made in zip(event["add"], born, strict=True)}
            scheduler.add(*born)
        elif "fork" in event:
            parent, fields = event["fork"]
            child = sequences[fields["number"]] = _sequence(fields, number)
            scheduler.fork(sequences[parent], child)
        elif "finish" in event:
            scheduler.finish(sequences.pop(event["finish"]))
        else:
            numbers = {sequence: key for key, sequence in sequences.items()}
            plan = json.loads(json.dumps(describe(scheduler.schedule(), numbers, scheduler.tables)))
            if plan != event["plan"]:
                raise ValueError(f"line {number}: planned {plan}, recorded {event['plan']}")
            plans += 1
    return plans


def _sequence(fields: dict[str, Any], line: int) -> Sequence:
    return Sequence(
        request_id=str(line),
        index=fields["index"],
        token_ids=counted_tokens(fields["tokens"]),
        num_prompt=fields["num_prompt"],
        max_tokens=fields["max_tokens"],
        priority=fields["priority"],
        keeps_history=fields["keeps_history"],
        root_key=None if fields["keys"] is None else -1,
        block_keys=list(fields["keys"] or ()),
        state=SequenceState.WAITING,
        **{name: fields[name] for name in _FLAGS},
    )


def _change(sequence: Sequence, tokens: int, keys: list[int], flags: list[Any]) -> None:
    sequence.token_ids.extend(bytes(tokens))
    sequence.block_keys.extend(keys)
    for name, value in zip(_FLAGS, flags, strict=True):
        setattr(sequence, name, value)
