"""What one process does while a profile is taken.

Functions and methods are replaced by recording ones for as long as that lasts, and put back afterwards: code that is
not profiled has nothing of this in it, not even a condition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from itertools import count
from time import monotonic_ns
from typing import Any, NamedTuple

Describe = Callable[..., dict[str, Any]]  # (result, *arguments of the call) -> what the trace shows of it

MAX_EVENTS = 300_000  # of a process: some 40 MB of JSON
_ABSENT = object()


class Event(NamedTuple):
    """From `began` to `ended`, by time.monotonic_ns."""

    name: str
    category: str
    began: int
    ended: int
    track: str  # a thread, or what else runs beside the others
    args: dict[str, Any] | None = None
    overlaps: str | None = None  # an id: other events of this track may begin before it ends


class Recorder:
    """Events of several threads."""

    def __init__(self, limit: int = MAX_EVENTS) -> None:
        self.events: list[Event] = []
        self.dropped = 0
        self._limit = limit
        self._replaced: list[tuple[Any, str, Any]] = []
        self._ids = count()

    def add(self, event: Event) -> None:
        if len(self.events) < self._limit:
            self.events.append(event)
        else:
            self.dropped += 1

    def replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        """Put another function in the place of one of a module, a class or an object, until `restore`."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, new)

    def watch(self, owner: Any, name: str, label: str, category: str, describe: Describe | None = None) -> None:
        """Record every call of a function that is not a coroutine."""
        call = getattr(owner, name)

        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            began, shown = monotonic_ns(), None
            try:
                result = call(*args, **kwargs)
                if describe is not None:
                    shown = describe(result, *args)
                return result
            finally:
                self.add(Event(label, category, began, monotonic_ns(), threading.current_thread().name, shown))

        self.replace(owner, name, watched)

    def watch_async(self, owner: Any, name: str, label: str, category: str) -> None:
        """Record every call of a coroutine function, from its call to its end. Calls overlap."""
        call = getattr(owner, name)

        @wraps(call)
        async def watched(*args: Any, **kwargs: Any) -> Any:
            began = monotonic_ns()
            try:
                return await call(*args, **kwargs)
            finally:
                self.add(Event(label, category, began, monotonic_ns(), category, overlaps=f"c{next(self._ids)}"))

        self.replace(owner, name, watched)

    def restore(self) -> None:
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
