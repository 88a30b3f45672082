"""Room in host memory for blocks of preempted sequences: which slot holds which block's content."""

from dataclasses import dataclass

from pagedjax.block_keys import BlockKey


@dataclass(frozen=True, slots=True)
class Transfer:
    """A block's content moves between the device and a slot of the swap space; ``out`` is towards the host."""

    block: int
    slot: int
    out: bool


class SwapSpace:
    """Slots of one block each, found by group and key. Sequences that share a block share its slot.

    Only full blocks are swapped: they have a key. The few tokens after a sequence's last full block are computed again
    in the same chunk as the token that must be computed anyway.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[tuple[int, BlockKey], int] = {}
        self._ref_counts: dict[tuple[int, BlockKey], int] = {}

    @property
    def num_used(self) -> int:
        """Slots that hold a block."""
        return len(self._slots)

    def hold(self, group: int, key: BlockKey) -> bool:
        """One more reference to the slot of this name; False where there is none."""
        name = (group, key)
        if name not in self._slots:
            return False
        self._ref_counts[name] += 1
        return True

    def take(self, group: int, key: BlockKey) -> int | None:
        """A slot for a block of this name, with one reference; None where all are used. It must not have one yet."""
        assert (group, key) not in self._slots, "a block is swapped once"
        if not self._free:
            return None
        slot = self._slots[group, key] = self._free.pop()
        self._ref_counts[group, key] = 1
        return slot

    def lookup(self, group: int, key: BlockKey) -> int | None:
        """The slot that holds this block."""
        return self._slots.get((group, key))

    def drop(self, group: int, key: BlockKey) -> None:
        """One reference less; a slot without any is free."""
        name = (group, key)
        self._ref_counts[name] -= 1
        if not self._ref_counts[name]:
            del self._ref_counts[name]
            self._free.append(self._slots.pop(name))
