"""Routing policies over four replicas on a virtual clock: conversations with a KV cache too small for all of them.

    python benchmarks/routing.py             # a table of the policies, beside one cache of the same total size
    python benchmarks/routing.py --decisions # how long a decision takes with 64 replicas, and the index at its largest

Each replica is the engine's own scheduler, block pool and loop; a step takes as long as that of an 8B model on an H200.
As many users as given talk in turns: a question, the answer, some time to read it, the next question with all that was
said before. Prompts begin with one of a few system prompts, and their lengths are heavy-tailed.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.core.block_hashes import extend_block_hashes
from penstock.core.engine import EngineStats
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.limits import SchedulerLimits
from penstock.engine.scheduler import Scheduler
from penstock.engine.step_time import StepShape, StepTimes
from penstock.fleet.prefix_index import PrefixIndex
from penstock.fleet.routing import RoutedRequest, choose
from penstock.fleet.settings import PolicyName, RoutingConfig
from penstock.fleet.snapshot import Snapshot
from penstock.simulation.virtual_engine import VirtualEngine, gpu_step_seconds
from penstock.simulation.virtual_fleet import VirtualFleet

BLOCK = 16
VOCAB = 100_000
READING_SECONDS = 0.25  # between two readings of a replica, as workers send them


@dataclass(frozen=True, slots=True)
class Load:
    """`blocks`: of KV cache on each replica."""

    replicas: int = 4
    users: int = 320
    blocks: int = 16_000
    seconds: float = 120.0
    warmup: float = 40.0  # not counted
    seed: int = 0
    system_tokens: tuple[int, ...] = (2400, 1600, 1200, 800, 600, 400, 300, 200)
    think_seconds: float = 2.0
    answer: float = 4.0  # logarithm of the median answer's tokens


@dataclass(slots=True)
class Conversation:
    tokens: list[int]
    turns: int
    hashes: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    hit_ratio: float
    output_per_second: float
    requests: list[int]
    outputs: list[int]
    computed: list[int]
    streams: list[float]
    preemptions: int
    ttfts: list[float]

    def busiest(self, values: Sequence[float]) -> float:
        return max(values) * len(values) / sum(values)


class Trace:
    """Who says what. Every user has a random generator of his own, so that all policies hear the same."""

    def __init__(self, load: Load) -> None:
        self.load = load
        draw = random.Random(load.seed)
        self.systems = [[draw.randrange(VOCAB) for _ in range(length)] for length in load.system_tokens]
        self.users = [random.Random(draw.random()) for _ in range(load.users)]

    def begin(self, user: int) -> Conversation:
        draw = self.users[user]
        system = draw.choices(self.systems, [1 / (rank + 1) for rank in range(len(self.systems))])[0]
        long = draw.random() < 0.1
        first = int(draw.lognormvariate(8.3, 0.5)) if long else int(draw.lognormvariate(5.5, 0.9))
        conversation = Conversation(list(system), min(30, 1 + int(draw.expovariate(1 / 8))))
        self.say(user, conversation, min(first, 16_000))
        return conversation

    def say(self, user: int, conversation: Conversation, tokens: int = 0) -> None:
        draw = self.users[user]
        tokens = tokens or min(4000, max(8, int(draw.lognormvariate(4.6, 1.0))))
        conversation.tokens += [draw.randrange(VOCAB) for _ in range(tokens)]

    def answer_tokens(self, user: int) -> int:
        return max(8, min(600, int(self.users[user].lognormvariate(self.load.answer, 0.6))))

    def think_seconds(self, user: int) -> float:
        return self.users[user].expovariate(1 / self.load.think_seconds)


class Run:
    def __init__(self, load: Load, policy: PolicyName, engines: Sequence[VirtualEngine]) -> None:
        self.load, self.config = load, RoutingConfig(policy)
        self.trace = Trace(load)
        self.fleet = VirtualFleet(engines)
        self.index = PrefixIndex(BLOCK)
        self.snapshots = []
        for slot, engine in enumerate(engines):
            limits = engine.scheduler.limits
            kv_tokens = limits.num_blocks * limits.block_size
            self.index.add_replica(slot, kv_tokens)
            snapshot = Snapshot(f"replica-{slot}", slot, max_model_len=limits.max_model_len, kv_tokens=kv_tokens)
            self.snapshots.append(snapshot)
        self.made = 0
        self.ttfts: list[float] = []
        self.counted = False
        self.requests = [0] * len(engines)
        self.streams = [0.0] * len(engines)
        self.readings = 0
        self.predicted: list[tuple[float, float]] = []
        self.hit_error = 0

    def result(self) -> Result:
        load, clock = self.load, self.fleet.clock
        clock.at(0.0, self._read)
        for user in range(load.users):
            clock.at(user * 10.0 / load.users, lambda user=user: self._ask(user, self.trace.begin(user)))  # type: ignore[misc]
        self.fleet.run(load.warmup)
        before = self._counters()
        self.counted = True
        self.ttfts.clear()
        self.requests = [0] * len(self.requests)
        self.streams = [0.0] * len(self.requests)
        self.readings = 0
        self.fleet.run(load.warmup + load.seconds)
        after = self._counters()

        def grown(name: str) -> list[int]:
            return [getattr(a, name) - getattr(b, name) for a, b in zip(after, before, strict=True)]

        return Result(
            hit_ratio=sum(grown("cached_tokens")) / sum(grown("prompt_tokens")),
            output_per_second=sum(grown("output_tokens")) / load.seconds,
            requests=self.requests,
            outputs=grown("output_tokens"),
            computed=grown("batch_tokens"),
            streams=[total / self.readings for total in self.streams],
            preemptions=sum(grown("preemptions")),
            ttfts=self.ttfts,
        )

    def _counters(self) -> list[EngineStats]:
        return [engine.scheduler.stats() for engine in self.fleet.engines]

    def _read(self) -> None:
        for snapshot, stats in zip(self.snapshots, self._counters(), strict=True):
            snapshot.heard(stats)
            self.streams[snapshot.slot] += snapshot.streams
        self.readings += 1
        self.fleet.clock.at(self.fleet.clock.now + READING_SECONDS, self._read)

    def _ask(self, user: int, conversation: Conversation) -> None:
        now = self.fleet.clock.now
        self.made += 1
        params = SamplingParams(max_tokens=self.trace.answer_tokens(user), ignore_eos=True)
        request = GenerateRequest(f"r{self.made}", tuple(conversation.tokens), params)
        hashes, tokens = conversation.hashes, conversation.tokens
        extend_block_hashes(hashes, request, tokens, BLOCK, len(tokens) // BLOCK)
        cached = self.index.held(hashes)
        decision = choose(RoutedRequest(len(tokens), cached), self.snapshots, now, self.config)
        assert decision is not None
        slot = decision.snapshot.slot
        self.requests[slot] += 1
        stream = decision.snapshot.sent(len(tokens), decision.cached, now)
        self.index.record(slot, hashes)

        def take(chunk: Chunk) -> None:
            at = self.fleet.clock.now
            if not stream.emitted_tokens and chunk.token_ids:
                self.ttfts.append(at - now)
            stream.emitted(len(chunk.token_ids), at)
            tokens.extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                stream.ended(at)
                extend_block_hashes(hashes, request, tokens, BLOCK, len(tokens) // BLOCK)
                self.index.record(slot, hashes)
                self._answered(user, conversation)

        self.fleet.submit(slot, request, take)

    def _answered(self, user: int, conversation: Conversation) -> None:
        conversation.turns -= 1
        if conversation.turns > 0 and len(conversation.tokens) < 24_000:
            self.trace.say(user, conversation)
        else:
            conversation = self.trace.begin(user)
        at = self.fleet.clock.now + self.trace.think_seconds(user)
        self.fleet.clock.at(at, lambda: self._ask(user, conversation))


def engine(load: Load, times: StepTimes, seed: int, faster: int = 1) -> VirtualEngine:
    """`faster`: as one with the hardware of so many."""
    limits = SchedulerLimits(
        num_blocks=load.blocks * faster,
        block_size=BLOCK,
        max_seqs=256 * faster,
        max_step_tokens=8192,
        max_model_len=32_768,
        vocab_size=VOCAB,
    )

    def seconds(shape: StepShape) -> float:
        return gpu_step_seconds(shape) / faster

    return VirtualEngine(Scheduler(limits, times), seconds, runs_ahead=True, noise=0.04, seed=seed)


def learnt_times(load: Load, faster: int = 1) -> StepTimes:
    """Of an engine that has run for a while."""
    times = StepTimes()
    draw = random.Random(99)
    arrivals = []
    for i in range(60):
        prompt = [draw.randrange(VOCAB) for _ in range(20 + i * 250)]
        arrivals.append((i * 0.02, GenerateRequest(f"w{i}", prompt, SamplingParams(max_tokens=20, ignore_eos=True))))
    engine(load, times, 99, faster).run(arrivals)
    return times


def measured(load: Load, policy: PolicyName) -> Result:
    times = learnt_times(load)
    return Run(load, policy, [engine(load, copy.deepcopy(times), seed) for seed in range(load.replicas)]).result()


def one_cache(load: Load) -> Result:
    """One engine with the KV cache and the speed of all replicas."""
    return Run(load, "round_robin", [engine(load, learnt_times(load, load.replicas), 0, load.replicas)]).result()


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[int(q * len(values))]


def main() -> None:
    import time

    DEFAULT = Load()
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=DEFAULT.users)
    parser.add_argument("--blocks", type=int, default=DEFAULT.blocks)
    parser.add_argument("--seconds", type=float, default=DEFAULT.seconds)
    parser.add_argument("--warmup", type=float, default=DEFAULT.warmup)
    args = parser.parse_args()
    load = Load(users=args.users, blocks=args.blocks, seconds=args.seconds, warmup=args.warmup)
    runs: list[tuple[str, Callable[[], Result]]] = [
        ("one cache", lambda: one_cache(load)),
        ("round robin", lambda: measured(load, "round_robin")),
        ("forecast", lambda: measured(load, "forecast")),
    ]
    for name, run in runs:
        t = time.time()
        r = run()
        print(
            f"{name:12} hits {r.hit_ratio:6.1%}  out/s {r.output_per_second:8,.0f}  "
            f"busiest: requests {r.busiest(r.requests):.2f} output {r.busiest(r.outputs):.2f} "
            f"computed {r.busiest(r.computed):.2f} streams {r.busiest(r.streams):.2f} ({sum(r.streams):.0f}) "
            f"preempt {r.preemptions} TTFT p50 {percentile(r.ttfts, 0.5) * 1e3:.0f} p99 {percentile(r.ttfts, 0.99) * 1e3:.0f} ms  {time.time() - t:.0f}s",
            flush=True,
        )


if __name__ == "__main__":
    main()
