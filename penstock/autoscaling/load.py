"""What a policy sees of a fleet, and how that comes from the readings of its engines.

Work is counted in seconds of one replica. By the step-time model a step takes a fixed time, and longer by so much for
each stream and each prompt token in it. The work of a request is what it adds to steps:

    work = prompt tokens that are not cached x prefill time + output tokens x time of a stream in a step

A replica spends the rest of its time on the fixed part of steps. If they may take as long as the ITL objective, that
part is fixed / ITL of it; if the KV cache or the number of sequences limits it to N streams, the share left for work is
N x work / (N x work + output tokens x fixed). The smaller share is the capacity of a replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from penstock.core.engine import EngineStats

_AVERAGED_REQUESTS = 200.0  # over which the usual request is averaged
_PLANNED_ITL = 0.7  # share of the ITL objective that steps are planned to take: their times vary
_SPEED_WEIGHT = 0.05  # of the latest look in averages of speeds
_LEAST_CAPACITY = 0.05
_FIRST_REQUEST = (256.0, 128.0)  # prompt and output tokens of a usual request before there was one


@dataclass(frozen=True, slots=True)
class Load:
    """One look at a fleet. Times are seconds on a clock that never goes back and gives the time of day: the Unix time
    when the program started and what has passed since."""

    now: float
    ready: int  # replicas that serve
    starting: int  # replicas on their way
    warmup_seconds: float  # that a replica started now takes until it serves
    requests: float  # counter: that have arrived, also those that were refused
    work: float  # counter: what they have brought, in seconds of one replica
    request_work: float  # of a usual request
    capacity: float  # seconds of work that a replica does in a second; 0: not known yet
    queued: float  # seconds of one replica's work that prompts wait for, held ones too
    held: int  # requests that wait for a replica because there is none
    in_flight: int  # requests at replicas
    ttft: float = 0.0  # forecast for a usual prompt sent now to the best replica; 0: unknown
    idle_ttft: float = 0.0  # the same where nothing else is computed
    ttft_objective: float | None = None  # that the fleet is sized for

    @property
    def replicas(self) -> int:
        return self.ready + self.starting

    @property
    def lateness(self) -> float:
        """What a request sent now waits for others, as a share of what its objective leaves for that. Where it leaves
        nothing, with however many replicas, as a share of the objective."""
        objective = self.ttft_objective or inf
        left = objective - self.idle_ttft
        return max(0.0, self.ttft - self.idle_ttft) / (left if left > 0 else objective)


class Meter:
    """Makes a `Load` of the counters of a fleet, by what a request has usually been of late."""

    def __init__(self, ttft_objective: float | None = None, itl_objective: float | None = None) -> None:
        self.ttft_objective = ttft_objective
        self.itl_objective = itl_objective
        self.prompt_tokens, self.output_tokens = _FIRST_REQUEST  # of a usual request
        self._hit_ratio = 0.0  # of its prompt
        self._stream_blocks = 0.0  # of the KV cache, that its stream holds
        self._speed = _Speed()
        self._last: EngineStats | None = None
        self._held = 0
        self._requests = 0.0
        self._work = 0.0

    def load(
        self,
        now: float,
        stats: EngineStats,
        *,
        ready: int,
        starting: int,
        held: int,
        warmup_seconds: float,
        ttft: float = 0.0,
        idle_ttft: float = 0.0,
    ) -> Load:
        """`stats`: of all replicas together (`fleet/stats.py`), those that have gone included: counters only grow."""
        last = self._last or EngineStats()
        accepted = max(0, stats.requests - last.requests)
        if accepted:
            self._learn(stats, last, accepted)
        if stats.prefill_tokens_per_second:
            self._speed.learn(stats)
        newly_held = held - self._held  # below 0: they have been accepted, and were counted when they came
        refused = (stats.refused - last.refused) / max(1, ready)  # a request is refused by all replicas, one by one
        arrived = max(0.0, accepted + refused + newly_held)
        self._requests += arrived
        self._work += arrived * self.request_work
        self._last, self._held = stats, held
        waiting = stats.prefill_tokens + held * self.prompt_tokens * (1.0 - self._hit_ratio)
        return Load(
            now=now,
            ready=ready,
            starting=starting,
            warmup_seconds=warmup_seconds,
            requests=self._requests,
            work=self._work,
            request_work=self.request_work,
            capacity=self._capacity(stats, ready),
            queued=waiting * self._speed.token,
            held=held,
            in_flight=stats.running + stats.waiting,
            ttft=ttft,
            idle_ttft=idle_ttft,
            ttft_objective=self.ttft_objective,
        )

    def _learn(self, stats: EngineStats, last: EngineStats, accepted: int) -> None:
        """Tokens of output and hits come later than their request, which evens out."""
        weight = min(1.0, accepted / _AVERAGED_REQUESTS)
        prompt = stats.prompt_tokens - last.prompt_tokens
        hits = min(1.0, (stats.cached_tokens - last.cached_tokens) / prompt) if prompt else 0.0
        self.prompt_tokens += weight * (prompt / accepted - self.prompt_tokens)
        self.output_tokens += weight * ((stats.output_tokens - last.output_tokens) / accepted - self.output_tokens)
        self._hit_ratio += weight * (hits - self._hit_ratio)
        if stats.running:
            weight = weight if self._stream_blocks else 1.0
            self._stream_blocks += weight * (stats.kv_blocks_used / stats.running - self._stream_blocks)

    @property
    def request_work(self) -> float:
        """Seconds of one replica that a usual request takes."""
        speed, context = self._speed, self.prompt_tokens + self.output_tokens / 2
        prefill = self.prompt_tokens * (1.0 - self._hit_ratio) * speed.token
        return prefill + self.output_tokens * (speed.stream + context * speed.context_token)

    def _capacity(self, stats: EngineStats, ready: int) -> float:
        work, fixed, shares = self.request_work, self._speed.fixed, [1.0]
        if not work:
            return 0.0
        if self.itl_objective is not None:
            shares.append(1.0 - fixed / (_PLANNED_ITL * self.itl_objective))
        if self._stream_blocks and ready:
            streams = stats.kv_blocks / ready / self._stream_blocks
            shares.append(streams * work / (streams * work + self.output_tokens * fixed))
        return max(_LEAST_CAPACITY, min(shares))


@dataclass(slots=True)
class _Speed:
    """Seconds that a replica takes, on average over the latest looks."""

    token: float = 0.0  # to prefill one token
    fixed: float = 0.0  # of a step
    stream: float = 0.0  # that each stream adds to a step
    context_token: float = 0.0  # and each token of its context

    def learn(self, stats: EngineStats) -> None:
        weight = _SPEED_WEIGHT if self.token else 1.0
        self.token += weight * (1.0 / stats.prefill_tokens_per_second - self.token)
        self.fixed += weight * (stats.fixed_step_seconds - self.fixed)
        self.stream += weight * (stats.stream_step_seconds - self.stream)
        self.context_token += weight * (stats.context_token_seconds - self.context_token)
