"""What a fleet knows of one request: the tokens it has been given, and by whom. Enough to go on elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import inf

from penstock.core.engine import ServedEngine
from penstock.core.errors import DeadlineExceeded, EngineFailure, Overloaded
from penstock.core.ledger import Failover, Ledger
from penstock.core.request import Chunk, GenerateRequest


class Journal:
    """Kept for as long as the request runs. The seed, the position and the output decide every further token, so an
    engine that is given them goes on as the lost one would have."""

    __slots__ = (
        "_clock",
        "attempt",
        "begun",
        "engine",
        "engine_id",
        "failovers",
        "first",
        "fruitless",
        "heard",
        "held",
        "on_trial",
        "output",
        "plain",
        "prompt_scored",
        "refused",
        "replica",
        "request",
        "routing",
        "started",
        "suspected",
    )

    def __init__(self, request: GenerateRequest, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.request = request
        self.output: list[int] = []
        self.replica = ""  # where it is now, and why
        self.routing = ""
        self.engine: ServedEngine | None = None
        self.engine_id = request.id  # its name there: one out of reach may still be busy with the attempt before
        self.attempt = 0
        self.fruitless = 0  # attempts since its last token, without those that were refused
        self.on_trial = False  # no other suspect runs beside it: if its replica crashes, it is to blame
        self.suspected = 0  # replicas that crashed with it since its last token
        self.failovers: list[Failover] = []
        # By the replica that had no room for it, or could not start it, since it was accepted by one last.
        self.refused: dict[str, Overloaded | EngineFailure] = {}
        self.started = self.begun = self.heard = clock()  # it arrived; came to its replica; last heard of
        self.held = 0.0  # how long it waited until there was a replica, before it was at any
        self.first: float | None = None  # first token
        self.prompt_scored = False  # the first chunk has been handed on
        self.plain = False  # chunks before the last are handed on as they are

    def next_request(self) -> GenerateRequest:
        """What the next replica is asked for: the request as it was, or the rest of it. Raises DeadlineExceeded."""
        now, request = self._clock(), self.request
        self.begun = self.heard = now
        self.attempt += 1
        self.plain = False
        deadline = None if request.deadline is None else self.remaining()
        if self.attempt == 1:
            return replace(request, deadline=deadline) if self.held else request
        self.engine_id = f"{request.id}.{self.attempt}"
        params = request.params
        if deadline is not None and deadline <= 0:
            raise DeadlineExceeded(f"the deadline passed after {len(self.output)} tokens")
        if self.prompt_scored and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        return replace(
            request,
            id=self.engine_id,
            params=params,
            output=[*request.output, *self.output],
            resumed=bool(self.failovers),
            deadline=deadline,
        )

    def remaining(self) -> float:
        """Seconds until its deadline; infinite without one."""
        deadline = self.request.deadline
        return inf if deadline is None else deadline - (self._clock() - self.started)

    @property
    def waits(self) -> bool:
        """Whether it waits for a replica, which one does not in whose place another model can answer."""
        return self.request.waits == "always" or (self.request.waits == "begun" and bool(self.output))

    def first_to_end(self) -> Overloaded | EngineFailure:
        """Of the reasons why replicas refused it."""

        def after(error: Overloaded | EngineFailure) -> tuple[bool, float]:
            return not error.retryable, error.retry_after if isinstance(error, Overloaded) else inf

        return min(self.refused.values(), key=after)

    def waited(self) -> None:
        """There is a replica for it now, as there was not when it came or when its own was lost."""
        if not self.attempt:
            self.held = self._clock() - self.started

    def hedged_request(self) -> GenerateRequest:
        """The same for a second replica, beside the first one."""
        deadline = None if self.request.deadline is None else self.remaining()
        return replace(self.request, id=f"{self.engine_id}.hedge", deadline=deadline)

    def hedge(self, replica: str, routing: str, engine_id: str, began: float) -> None:
        """The second replica was faster. It was asked at `began`."""
        waited = began - self.begun
        cause = f"no first token within {waited * 1000:.0f} ms, and another replica was faster"
        self.failovers.append(Failover(self.replica, cause, 0, 0.0, waited))
        self.replica, self.routing, self.engine_id = replica, routing, engine_id
        self.begun = began

    def note(self, chunk: Chunk) -> Chunk:
        """Note what a chunk brings. All there is to do where one is handed on as it is."""
        self.heard = self._clock()
        self.output += chunk.token_ids
        return chunk

    def take(self, chunk: Chunk) -> Chunk:
        """Note what a chunk brings and make it a chunk of the one stream that the client sees."""
        self.note(chunk)
        if not self.plain:
            self._adapt(chunk)
        if chunk.ledger is not None:
            self.settle(chunk.ledger)
        return chunk

    def _adapt(self, chunk: Chunk) -> None:
        """The first chunk says where it comes from. What only first chunks have must not come a second time."""
        if self.first is None and chunk.token_ids:
            self.first = self.heard
        chunk.request_id = self.request.id
        if self.prompt_scored:
            chunk.cached_tokens, chunk.queue_seconds = 0, 0.0
        else:
            self.prompt_scored = True
            chunk.replica = self.replica
        self.plain = self.engine_id == self.request.id and self.first is not None

    def lose(self, cause: str) -> None:
        """Its replica is lost. `resume` follows when another one has the request. That may be one that had no room for
        it before: it has been accepted since, so admission is behind it."""
        self.refused.clear()
        served = self.heard - self.begun
        self.failovers.append(Failover(self.replica, cause, len(self.output), served, 0.0))

    def resume(self, replica: str, routing: str) -> None:
        """It goes to this replica now."""
        self.replica, self.routing = replica, routing
        if self.failovers and not self.failovers[-1].lost:
            self.failovers[-1].lost = self._clock() - self.heard

    def settle(self, ledger: Ledger) -> None:
        """Make of the last replica's ledger one of the whole request."""
        request, objective = self.request, self.request.objective
        ledger.request_id = request.id
        ledger.replica, ledger.routing = self.replica, self.routing
        if not self.failovers and not self.held:
            return
        ledger.failovers, ledger.held = self.failovers, self.held
        earlier = ledger.failover + ledger.held
        ledger.arrived -= earlier
        ledger.total += earlier
        if self.first is not None:
            ledger.ttft = self.first - self.started
        if objective.ttft is not None and ledger.ttft is not None:
            ledger.met_ttft = ledger.ttft <= objective.ttft
        if objective.itl is not None and any(each.output_tokens for each in self.failovers):
            # The longest inter-token latency is beyond the 99th percentile only of a long answer.
            ledger.met_gap = ledger.met_gap is not False and len(self.output) >= 100 * len(self.failovers)
