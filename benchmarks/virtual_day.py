"""A day of requests for a fleet on a virtual clock, with the number of its replicas decided by a policy or by a plan.

Replicas are the engine's own scheduler and loop, requests go through the fleet's own routing policy; only the executor
is a formula.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from math import ceil

from penstock.autoscaling.load import Load, Meter
from penstock.autoscaling.scaler import Scaler
from penstock.autoscaling.settings import AutoscaleConfig
from penstock.core.engine import EngineStats
from penstock.core.errors import Overloaded
from penstock.core.request import Chunk, GenerateRequest, Objective, SamplingParams
from penstock.engine.limits import SchedulerLimits
from penstock.engine.scheduler import Scheduler
from penstock.engine.step_time import StepShape, StepTimes
from penstock.fleet.routing import RoutedRequest, choose, forecast_ttft
from penstock.fleet.settings import RoutingConfig
from penstock.fleet.snapshot import Snapshot, Stream
from penstock.fleet.stats import combined, counters
from penstock.simulation.traffic import Arrival, Traffic
from penstock.simulation.virtual_engine import VirtualEngine
from penstock.simulation.virtual_fleet import VirtualFleet

TTFT, ITL = 2.0, 0.3
OBJECTIVE = Objective("chat", ttft=TTFT, itl=ITL)
ROUTING = RoutingConfig()
LIMITS = SchedulerLimits(
    num_blocks=4096,
    block_size=16,
    max_seqs=256,
    max_step_tokens=1024,
    max_model_len=4096,
    vocab_size=2**16,
    prefix_caching=False,  # prompts have nothing in common
)
DAY_SECONDS = 7_200.0
READING_SECONDS = 0.5  # between two readings of a replica
DAYS_BEFORE = 3  # that the forecast has seen
SLOT_SECONDS = 5.0  # of the clairvoyant plan
TOKEN, CONTEXT_TOKEN, FIXED = 3e-4, 1.2e-5, 0.08  # seconds of a step


requests_of = cache(Traffic.day)


def step_seconds(shape: StepShape) -> float:
    return FIXED + (shape.decodes + shape.prefill) * TOKEN + shape.context * CONTEXT_TOKEN


def work_seconds(arrival: Arrival) -> float:
    """What a request adds to steps."""
    context = arrival.prompt_tokens + arrival.output_tokens / 2
    return arrival.prompt_tokens * TOKEN + arrival.output_tokens * (TOKEN + context * CONTEXT_TOKEN)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A day of requests and the replicas that may serve it."""

    traffic: Traffic
    warmup: float = 20.0  # seconds until a replica serves
    day: int = DAYS_BEFORE
    seconds: float | None = None  # how much of the day; default: all of it
    config: AutoscaleConfig = field(
        default_factory=lambda: AutoscaleConfig(max_replicas=24, period_seconds=DAY_SECONDS, down_cooldown_seconds=30.0)
    )

    def arrivals(self) -> list[Arrival]:
        return [one for one in requests_of(self.traffic, self.day) if one.at < self.length]

    @property
    def length(self) -> float:
        return self.seconds or self.traffic.seconds


@dataclass(slots=True)
class Result:
    requests: int
    met: int = 0  # both objectives
    late: int = 0  # first token
    slow: int = 0  # inter-token latency
    refused: int = 0
    replica_seconds: float = 0.0  # from the launch of a replica to its end, warming up included
    sizes: list[tuple[float, int]] = field(default_factory=list)  # when the number of replicas was changed, to what

    @property
    def attainment(self) -> float:
        return self.met / self.requests

    def flaps(self, seconds: float) -> int:
        """How often the number of replicas was lowered and raised again within this time."""
        changes = [(at, size - before) for (_, before), (at, size) in pairwise(self.sizes)]
        return sum(down < 0 < up and later - at < seconds for (at, down), (later, up) in pairwise(changes))


@dataclass(slots=True, eq=False)
class VirtualReplica:
    launched: float
    snapshot: Snapshot
    state: str = "starting"


def new_engine(times: StepTimes, seed: int) -> VirtualEngine:
    return VirtualEngine(Scheduler(LIMITS, times), step_seconds, runs_ahead=False, noise=0.04, seed=seed)


def learnt_times() -> StepTimes:
    """The step-time model of an engine that has run for a while."""
    times, draw = StepTimes(), random.Random(99)
    arrivals = []
    for i in range(300):
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        arrivals.append((i * 0.5, GenerateRequest(f"w{i}", token_ids(draw, 20 + i * 37 % 1500), params)))
    new_engine(times, 99).run(arrivals)
    return times


def token_ids(draw: random.Random, count: int) -> list[int]:
    return list(memoryview(draw.randbytes(2 * count)).cast("H"))


class Run:
    """A fleet on a virtual clock whose number of replicas is decided anew at every look."""

    def __init__(self, scenario: Scenario, times: StepTimes, decide: Callable[[Load], int], first: int) -> None:
        self._scenario = scenario
        self._times = times
        self._decide = decide
        self._fleet = VirtualFleet()
        self._arrivals = iter(scenario.arrivals())
        self._draw = random.Random(1)
        self._meter = Meter(TTFT, ITL)
        self._replicas: list[VirtualReplica] = []
        self._retired = EngineStats()
        self._held: list[tuple[GenerateRequest, float]] = []
        self._result = Result(0, sizes=[(0.0, first)])
        for _ in range(first):
            self._serve(self._launch())

    def result(self) -> Result:
        scenario, fleet = self._scenario, self._fleet
        fleet.clock.at(0.0, self._read)
        fleet.clock.at(0.0, self._look)
        self._expect_next()
        fleet.run(scenario.length)
        self._result.replica_seconds += sum(scenario.length - replica.launched for replica in self._replicas)
        fleet.run(scenario.length + 60.0)  # until all is answered
        return self._result

    # -- replicas ------------------------------------------------------------------------------------------------------

    def _launch(self) -> VirtualReplica:
        slot = self._fleet.add(new_engine(copy.deepcopy(self._times), len(self._fleet.engines)))
        kv_tokens = LIMITS.num_blocks * LIMITS.block_size
        snapshot = Snapshot(f"replica-{slot}", slot, max_model_len=LIMITS.max_model_len, kv_tokens=kv_tokens)
        replica = VirtualReplica(self._fleet.clock.now, snapshot)
        self._replicas.append(replica)
        return replica

    def _serve(self, replica: VirtualReplica) -> None:
        if replica.state == "starting":
            replica.state = "ready"
            self._hear(replica)
            held, self._held = self._held, []
            for request, arrived in held:
                self._send(request, arrived)

    def _hear(self, replica: VirtualReplica) -> None:
        replica.snapshot.heard(self._fleet.engines[replica.snapshot.slot].scheduler.stats())

    def _read(self) -> None:
        for replica in list(self._replicas):
            if replica.state != "starting":
                self._hear(replica)
            if replica.state == "draining" and not replica.snapshot.streams:
                self._end(replica)
        self._fleet.clock.at(self._fleet.clock.now + READING_SECONDS, self._read)

    def _end(self, replica: VirtualReplica) -> None:
        self._replicas.remove(replica)
        self._retired = combined([self._retired, counters(replica.snapshot.stats)])
        if self._fleet.clock.now < self._scenario.length:
            self._result.replica_seconds += self._fleet.clock.now - replica.launched

    def _in(self, state: str) -> list[VirtualReplica]:
        return [replica for replica in self._replicas if replica.state == state]

    def _look(self) -> None:
        now, ready, starting = self._fleet.clock.now, self._in("ready"), self._in("starting")
        for replica in ready:
            replica.snapshot.derive()
        tokens = round(self._meter.prompt_tokens)
        load = self._meter.load(
            self._scenario.day * self._scenario.traffic.seconds + now,
            combined([self._retired, *(replica.snapshot.stats for replica in self._replicas)]),
            ready=len(ready),
            starting=len(starting),
            held=len(self._held),
            warmup_seconds=self._scenario.warmup,
            ttft=min((forecast_ttft(replica.snapshot, tokens, 0) for replica in ready), default=0.0),
        )
        self._resize(self._decide(load), ready, starting)
        if now < self._scenario.length:
            self._fleet.clock.at(now + self._scenario.config.interval_seconds, self._look)

    def _resize(self, wanted: int, ready: list[VirtualReplica], starting: list[VirtualReplica]) -> None:
        now, current = self._fleet.clock.now, len(ready) + len(starting)
        if wanted != current:
            self._result.sizes.append((now, wanted))
        for _ in range(wanted - current):
            self._fleet.clock.at(now + self._scenario.warmup, partial(self._serve, self._launch()))
        leaving = [*reversed(starting), *sorted(ready, key=lambda replica: replica.snapshot.streams)]
        for replica in leaving[: max(0, current - wanted)]:
            if replica.state == "starting":
                self._end(replica)
            replica.state = "draining"

    # -- requests ------------------------------------------------------------------------------------------------------

    def _expect_next(self) -> None:
        if (arrival := next(self._arrivals, None)) is not None:
            self._fleet.clock.at(arrival.at, partial(self._arrive, arrival))

    def _arrive(self, arrival: Arrival) -> None:
        self._expect_next()
        self._result.requests += 1
        params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
        prompt = token_ids(self._draw, arrival.prompt_tokens)
        self._send(GenerateRequest(f"r{self._result.requests}", prompt, params, objective=OBJECTIVE), arrival.at)

    def _send(self, request: GenerateRequest, arrived: float) -> None:
        """To the best replica, or where that refuses it to the next best, as a fleet does."""
        now, tokens = self._fleet.clock.now, len(request.prompt)
        snapshots = [replica.snapshot for replica in self._in("ready")]
        if not snapshots:
            self._held.append((request, arrived))
            return
        while (decision := choose(RoutedRequest(tokens), snapshots, now, ROUTING)) is not None:
            stream = decision.snapshot.sent(tokens, 0, now)
            try:
                self._fleet.submit(stream.snapshot.slot, request, partial(self._take, stream, arrived))
                return
            except Overloaded:
                stream.ended(now, completed=False)
                snapshots.remove(stream.snapshot)
        self._result.refused += 1

    def _take(self, stream: Stream, arrived: float, chunk: Chunk) -> None:
        now, result = self._fleet.clock.now, self._result
        stream.emitted(len(chunk.token_ids), now)
        if chunk.finish_reason is None:
            return
        stream.ended(now)
        ledger = chunk.ledger
        assert ledger is not None
        if stream.began - arrived + (ledger.ttft or 0.0) > TTFT:
            result.late += 1
        elif not ledger.met_gap:
            result.slow += 1
        else:
            result.met += 1


# -- who decides -------------------------------------------------------------------------------------------------------


def scaled(scenario: Scenario, times: StepTimes, policy: str, margin: float | None = None) -> Result:
    """By a policy, whose forecast has seen the days before."""
    margin = scenario.config.margin if margin is None else margin
    scaler = Scaler(replace(scenario.config, policy=policy, margin=margin))
    traffic, work = scenario.traffic, 0.0
    for day in range(scenario.day):
        slots = slot_work(requests_of(traffic, day), traffic.seconds)
        for slot, brought in enumerate(slots):
            work += brought
            scaler.arrivals.observe(day * traffic.seconds + (slot + 1) * SLOT_SECONDS, work, scenario.warmup)
    first = ceil(scaler.arrivals.level / 0.5) + 1

    def decide(load: Load) -> int:
        return scaler.look(replace(load, work=work + load.work)).replicas

    return Run(scenario, times, decide, first).result()


def slot_work(arrivals: Sequence[Arrival], seconds: float) -> list[float]:
    """Seconds of work that arrive in each slot of the plan."""
    slots = [0.0] * ceil(seconds / SLOT_SECONDS)
    for arrival in arrivals:
        slots[int(arrival.at / SLOT_SECONDS)] += work_seconds(arrival)
    return slots


def planned(scenario: Scenario, times: StepTimes, plan: Sequence[int]) -> Result:
    """By a plan for each slot. Replicas are launched so that they serve when the plan needs them."""
    lead, begin = ceil(scenario.warmup / SLOT_SECONDS), scenario.day * scenario.traffic.seconds

    def decide(load: Load) -> int:
        slot = int((load.now - begin) / SLOT_SECONDS)
        return max(plan[slot : slot + lead + 1], default=plan[-1])

    return Run(scenario, times, decide, plan[0]).result()


def static(scenario: Scenario, times: StepTimes, replicas: int) -> Result:
    return Run(scenario, times, lambda load: replicas, replicas).result()


def clairvoyant_plan(scenario: Scenario, capacity: float, price: float) -> list[int]:
    """The number of replicas for each slot of a day that is known beforehand, by dynamic programming.

    A replica does `capacity` seconds of work a second. What exceeds that in a slot is missed, and a second of it costs
    `price` seconds of a replica. A replica that is launched costs its warm-up as well.
    """
    most, warmup = scenario.config.ceiling, scenario.warmup
    costs, choices = [0.0] * (most + 1), []
    for work in reversed(slot_work(scenario.arrivals(), scenario.length)):
        own = [r * SLOT_SECONDS + price * max(0.0, work - r * capacity * SLOT_SECONDS) for r in range(most + 1)]
        own[0] = float("inf")  # at least one replica
        after = [cost + later for cost, later in zip(own, costs, strict=True)]
        # From r replicas before the slot: fewer of them at no cost, or more at that of their warm-up.
        chosen, best = [0] * (most + 1), 0
        for r in range(most + 1):
            best = r if after[r] <= after[best] else best
            chosen[r] = best
        best = most
        for r in range(most, -1, -1):
            best = r if after[r] + r * warmup <= after[best] + best * warmup else best
            if after[best] + (best - r) * warmup < after[chosen[r]]:
                chosen[r] = best
        costs = [after[to] + max(0, to - r) * warmup for r, to in enumerate(chosen)]
        choices.append(chosen)
    plan, current = [], most  # whatever it begins with is free
    for chosen in reversed(choices):
        current = chosen[current]
        plan.append(current)
    return plan
