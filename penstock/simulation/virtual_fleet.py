"""Several virtual engines on one timeline: requests arrive, chunks come and readings are taken in the order of time.

fleet = VirtualFleet([engine, another])
fleet.clock.at(0.5, lambda: fleet.submit(0, request, chunks.append))
fleet.run(until=60.0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from penstock.core.request import Chunk, GenerateRequest
from penstock.simulation.clock import VirtualClock
from penstock.simulation.virtual_engine import VirtualEngine


class VirtualFleet:
    """Engines have clocks of their own, each at the end of its latest step. `clock` is that of everybody else: an event
    on it happens when no engine has work to do before."""

    def __init__(self, engines: Sequence[VirtualEngine] = ()) -> None:
        self.engines: list[VirtualEngine] = []
        self.clock = VirtualClock()
        self._sinks: dict[str, Callable[[Chunk], object]] = {}
        self._busy: set[int] = set()
        for engine in engines:
            self.add(engine)

    def add(self, engine: VirtualEngine) -> int:
        """It takes part from now on. Returns its index."""
        engine.on_chunk = partial(self._deliver, engine)
        self.engines.append(engine)
        return len(self.engines) - 1

    def submit(self, index: int, request: GenerateRequest, sink: Callable[[Chunk], object]) -> None:
        """Now, to one engine. If that is in the middle of a step, the request waits for its end as all do. Raises
        Overloaded if the engine refuses it."""
        engine = self.engines[index]
        engine.clock.advance(self.clock.now)
        engine.submit(request)
        if (refused := engine.outcomes[request.id].refused) is not None:
            del engine.outcomes[request.id]
            raise refused
        self._sinks[request.id] = sink
        self._busy.add(index)

    def run(self, until: float) -> None:
        clock, engines, busy = self.clock, self.engines, self._busy
        while clock.now < until:
            behind = min(busy, key=lambda index: engines[index].now, default=None)
            if behind is not None and engines[behind].now <= clock.next_event:
                if not engines[behind].step():
                    busy.remove(behind)
            elif not clock.advance_to_next_event():
                return

    def _deliver(self, engine: VirtualEngine, chunk: Chunk) -> None:
        ended = chunk.finish_reason is not None
        sink = self._sinks[chunk.request_id]
        if ended:
            del self._sinks[chunk.request_id], engine.outcomes[chunk.request_id]
        self.clock.at(engine.now, partial(sink, chunk))
