"""Which offset of a Kafka partition can be committed: all before it must be done, and they end in any order."""

from __future__ import annotations


class Offsets:
    """Of one partition."""

    def __init__(self) -> None:
        self._running: dict[int, bool] = {}  # whether it is done, in the order of delivery

    def begin(self, offset: int) -> None:
        self._running[offset] = False

    def done(self, offset: int) -> int | None:
        """The offset to go on from after a restart; None: as before. One that was not begun changes nothing."""
        if offset not in self._running:
            return None
        self._running[offset] = True
        committed = None
        for first in list(self._running):
            if not self._running[first]:
                break
            del self._running[first]
            committed = first + 1
        return committed

    @property
    def unfinished(self) -> int:
        return len(self._running)
