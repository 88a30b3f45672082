"""How soon a queue gets shorter, by how fast it did so lately."""

from collections import deque

_WINDOW = 60.0  # seconds that are looked back at


class DrainRate:
    """Counts sequences that end while others wait or run; each makes room for one that waits.

    All times are in seconds, of any one clock.
    """

    def __init__(self) -> None:
        self._began = 0.0  # when the engine last had nothing to do
        self._ended: deque[tuple[float, int]] = deque()

    def begin(self, now: float) -> None:
        """Work comes after a time without: what was before says nothing about now."""
        self._began = now
        self._ended.clear()

    def count(self, sequences: int, now: float) -> None:
        """So many have ended."""
        self._ended.append((now, sequences))
        self._forget(now)

    def seconds_for(self, sequences: int, now: float) -> float:
        """How long it takes until so many more have ended; where none has so far, as if one did just now."""
        self._forget(now)
        ended = sum(count for _, count in self._ended)
        return sequences * min(now - self._began, _WINDOW) / max(ended, 1)

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0][0] < now - _WINDOW:
            self._ended.popleft()
