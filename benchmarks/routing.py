"""Routing policies over four replicas on a virtual clock: conversations, and a KV cache too small for all of them.

    python benchmarks/routing.py               # forecast and round robin, beside one cache of the same total size
    python benchmarks/routing.py --decisions   # how long a decision takes with 64 replicas; the index at its largest

Each replica is the engine's own scheduler, block pool and loop; a step takes as long as that of an 8B model on an H200,
or of a 135M model on two cores, by a formula. Users talk in turns: a question, the answer, some time to read it, and
the next question with all that was said before. Prompts begin with one of a few system prompts, and lengths are
heavy-tailed. The load is closed: as many users as given, so a fleet that answers sooner is asked more.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from penstock.core.block_hashes import chain_hashes, extend_block_hashes, root_hash
from penstock.core.engine import EngineStats
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.limits import SchedulerLimits
from penstock.engine.scheduler import Scheduler
from penstock.engine.step_time import StepShape, StepTimes
from penstock.fleet.prefix_index import MAX_ENTRIES, PrefixIndex
from penstock.fleet.routing import RoutedRequest, choose, session_digest
from penstock.fleet.settings import PolicyName, RoutingConfig
from penstock.fleet.snapshot import Snapshot, Stream
from penstock.simulation.virtual_engine import StepSeconds, VirtualEngine, cpu_step_seconds, gpu_step_seconds
from penstock.simulation.virtual_fleet import VirtualFleet

BLOCK = 16
VOCAB = 2**16
READING_SECONDS = 0.25  # between two readings of a replica
LONGEST_CONVERSATION = 24_000  # tokens


@dataclass(frozen=True, slots=True)
class Load:
    replicas: int = 4
    users: int = 400
    blocks: int = 18_000  # of KV cache on each replica
    seconds: float = 60.0
    warmup: float = 30.0  # not counted
    seed: int = 0
    system_tokens: tuple[int, ...] = (2400, 1600, 1200, 800, 600, 400, 300, 200)  # the first is the most frequent one
    think_seconds: float = 2.0
    answer_tokens: float = 55.0  # median
    length: float = 1.0  # of all that users say
    step_seconds: StepSeconds = gpu_step_seconds
    max_step_tokens: int = 8192


CONVERSATIONS = Load()
# One system prompt that everybody has, and replicas that are a third busy: nothing but the forecast spreads the users.
ONE_SYSTEM_PROMPT = Load(
    users=200, blocks=12_000, seconds=120.0, system_tokens=(2400,), think_seconds=8.0, answer_tokens=150.0
)
ON_CPUS = Load(
    users=220,
    blocks=3400,
    seconds=60.0,
    system_tokens=(400, 300, 200, 150, 100, 50),
    think_seconds=4.0,
    answer_tokens=20.0,
    length=0.25,
    step_seconds=cpu_step_seconds,
    max_step_tokens=256,
)


@dataclass(slots=True)
class Conversation:
    tokens: list[int]
    turns: int
    hashes: list[bytes] = field(default_factory=list)


def token_ids(draw: random.Random, count: int) -> list[int]:
    return list(memoryview(draw.randbytes(2 * count)).cast("H"))


class Users:
    """Who says what. Everyone has a random generator of his own, so all policies hear the same."""

    def __init__(self, load: Load) -> None:
        self._load = load
        draw = random.Random(load.seed)
        self._systems = [token_ids(draw, length) for length in load.system_tokens]
        self._draws = [random.Random(draw.random()) for _ in range(load.users)]

    def begin(self, user: int) -> Conversation:
        draw = self._draws[user]
        (system,) = draw.choices(self._systems, [1 / (rank + 1) for rank in range(len(self._systems))])
        conversation = Conversation(list(system), min(30, 1 + int(draw.expovariate(1 / 8))))
        is_long = draw.random() < 0.1
        self._say(draw, conversation, draw.lognormvariate(8.3, 0.5) if is_long else draw.lognormvariate(5.5, 0.9))
        return conversation

    def reply(self, user: int, conversation: Conversation) -> Conversation:
        """The next turn, or another conversation when this one is over."""
        conversation.turns -= 1
        if conversation.turns == 0 or len(conversation.tokens) > LONGEST_CONVERSATION * self._load.length:
            return self.begin(user)
        draw = self._draws[user]
        self._say(draw, conversation, min(4000, draw.lognormvariate(4.6, 1.0)))
        return conversation

    def _say(self, draw: random.Random, conversation: Conversation, tokens: float) -> None:
        conversation.tokens += token_ids(draw, max(8, int(min(16_000, tokens) * self._load.length)))

    def answer_tokens(self, user: int) -> int:
        return max(8, min(600, int(self._load.answer_tokens * self._draws[user].lognormvariate(0, 0.6))))

    def think_seconds(self, user: int) -> float:
        return self._draws[user].expovariate(1 / self._load.think_seconds)


@dataclass(slots=True)
class Result:
    """Lists are by replica."""

    hit_ratio: float  # prompt tokens that were in the prefix cache
    output_per_second: float
    ttfts: list[float]
    busy: list[float]  # seconds that a replica computed
    computed: list[int]  # tokens, of prompts and outputs
    streams: list[float]  # in flight, on average

    @property
    def busiest(self) -> float:
        """The busiest replica over the mean of all, by the measure that says the worst of it."""
        return max(max(values) / statistics.fmean(values) for values in (self.busy, self.computed, self.streams))


class Run:
    """A router in front of virtual engines, as a fleet would be: it counts, indexes and hears readings."""

    def __init__(self, load: Load, policy: PolicyName, engines: Sequence[VirtualEngine]) -> None:
        self._load = load
        self._config = RoutingConfig(policy)
        self._users = Users(load)
        self._fleet = VirtualFleet(engines)
        self._index = PrefixIndex(BLOCK)
        self._snapshots = []
        for slot, one in enumerate(engines):
            limits = one.scheduler.limits
            kv_tokens = limits.num_blocks * BLOCK
            self._index.add_replica(slot, kv_tokens)
            snapshot = Snapshot(f"replica-{slot}", slot, max_model_len=limits.max_model_len, kv_tokens=kv_tokens)
            self._snapshots.append(snapshot)
        self._asked = 0
        self._ttfts: list[float] = []
        self._streams: list[list[int]] = []  # at each reading

    def result(self) -> Result:
        load, clock, engines = self._load, self._fleet.clock, self._fleet.engines
        clock.at(0.0, self._read)
        for user in range(load.users):
            clock.at(user * load.warmup / 2 / load.users, partial(self._ask, user, self._users.begin(user)))
        self._fleet.run(load.warmup)
        self._ttfts.clear()
        self._streams.clear()
        before, busy_before = self._stats(), [one.executor.busy_seconds for one in engines]
        self._fleet.run(load.warmup + load.seconds)
        after, busy_after = self._stats(), [one.executor.busy_seconds for one in engines]

        def grown(counter: str) -> list[int]:
            return [getattr(a, counter) - getattr(b, counter) for a, b in zip(after, before, strict=True)]

        return Result(
            hit_ratio=sum(grown("cached_tokens")) / sum(grown("prompt_tokens")),
            output_per_second=sum(grown("output_tokens")) / load.seconds,
            ttfts=sorted(self._ttfts),
            busy=[a - b for a, b in zip(busy_after, busy_before, strict=True)],
            computed=grown("batch_tokens"),
            streams=[statistics.fmean(counts) for counts in zip(*self._streams, strict=True)],
        )

    def _stats(self) -> list[EngineStats]:
        return [one.scheduler.stats() for one in self._fleet.engines]

    def _read(self) -> None:
        for snapshot, stats in zip(self._snapshots, self._stats(), strict=True):
            snapshot.heard(stats)
        self._streams.append([snapshot.streams for snapshot in self._snapshots])
        self._fleet.clock.at(self._fleet.clock.now + READING_SECONDS, self._read)

    def _ask(self, user: int, conversation: Conversation) -> None:
        now, tokens, hashes = self._fleet.clock.now, conversation.tokens, conversation.hashes
        self._asked += 1
        params = SamplingParams(max_tokens=self._users.answer_tokens(user), ignore_eos=True)
        request = GenerateRequest(f"r{self._asked}", tuple(tokens), params)
        extend_block_hashes(hashes, request, tokens, BLOCK, len(tokens) // BLOCK)
        decision = choose(RoutedRequest(len(tokens), self._index.held(hashes)), self._snapshots, now, self._config)
        assert decision is not None
        self._index.record(decision.snapshot.slot, hashes)
        stream = decision.snapshot.sent(len(tokens), decision.cached, now)
        take = partial(self._take, user, conversation, request, stream)
        self._fleet.submit(decision.snapshot.slot, request, take)

    def _take(
        self, user: int, conversation: Conversation, request: GenerateRequest, stream: Stream, chunk: Chunk
    ) -> None:
        now, tokens, hashes = self._fleet.clock.now, conversation.tokens, conversation.hashes
        if not stream.emitted_tokens:
            self._ttfts.append(now - stream.began)
        stream.emitted(len(chunk.token_ids), now)
        tokens += chunk.token_ids
        if chunk.finish_reason is not None:
            stream.ended(now)
            extend_block_hashes(hashes, request, tokens, BLOCK, len(tokens) // BLOCK)
            self._index.record(stream.snapshot.slot, hashes)
            at = now + self._users.think_seconds(user)
            self._fleet.clock.at(at, partial(self._ask, user, self._users.reply(user, conversation)))


def engine(load: Load, times: StepTimes, seed: int, size: int = 1) -> VirtualEngine:
    """`size`: with the memory and the speed of so many replicas."""
    limits = SchedulerLimits(
        num_blocks=load.blocks * size,
        block_size=BLOCK,
        max_seqs=256 * size,
        max_step_tokens=load.max_step_tokens,
        max_model_len=32_768,
        vocab_size=VOCAB,
    )

    def seconds(shape: StepShape) -> float:
        return load.step_seconds(shape) / size

    on_gpu = load.step_seconds is gpu_step_seconds
    return VirtualEngine(Scheduler(limits, times), seconds, runs_ahead=on_gpu, noise=0.04, seed=seed)


def learnt_times(load: Load, size: int = 1) -> StepTimes:
    """The step-time model of an engine that has run for a while."""
    times, draw = StepTimes(), random.Random(99)
    arrivals = []
    for i in range(60):
        prompt = token_ids(draw, 20 + i * load.max_step_tokens // 32)
        arrivals.append((i * 0.05, GenerateRequest(f"w{i}", prompt, SamplingParams(max_tokens=20, ignore_eos=True))))
    engine(load, times, 99, size).run(arrivals)
    return times


def routed(load: Load, policy: PolicyName) -> Result:
    times = learnt_times(load)
    return Run(load, policy, [engine(load, copy.deepcopy(times), seed) for seed in range(load.replicas)]).result()


def one_cache(load: Load) -> Result:
    """One engine in place of all replicas."""
    return Run(load, "round_robin", [engine(load, learnt_times(load, load.replicas), 0, load.replicas)]).result()


def report(title: str, load: Load) -> None:
    print(f"{title}: {load.users} users, {load.replicas} replicas with {load.blocks * BLOCK:,} tokens of KV cache each")
    print("              prefix hits   of one cache   output/s   of round robin   busiest/mean   TTFT p50, p99")
    one, robin, forecast = one_cache(load), routed(load, "round_robin"), routed(load, "forecast")
    for name, result in (("one cache", one), ("round robin", robin), ("forecast", forecast)):
        p50, p99 = (1e3 * result.ttfts[int(q * len(result.ttfts))] for q in (0.5, 0.99))
        print(
            f"{name:12} {result.hit_ratio:12.1%} {result.hit_ratio / one.hit_ratio:14.1%} "
            f"{result.output_per_second:10,.0f} {result.output_per_second / robin.output_per_second:15.2f}x "
            f"{result.busiest:14.2f} {p50:11.0f}, {p99:.0f} ms"
        )
    print()


def report_decisions(replicas: int = 64) -> None:
    """On this machine's clock. All replicas hold the first third of a prompt, and a few others more of it each."""
    draw = random.Random(0)
    stats = EngineStats(running=4, kv_blocks=2500, kv_blocks_used=900, prefill_tokens_per_second=4e4)
    stats = replace(stats, decode_step_seconds=0.01, loaded_step_seconds=0.012)
    index, snapshots = PrefixIndex(BLOCK), []
    for slot in range(replicas):
        index.add_replica(slot, 40_000)
        snapshots.append(Snapshot(f"replica-{slot}", slot, max_model_len=32_768, kv_tokens=40_000, stats=stats))
    config, session = RoutingConfig(), session_digest("a conversation")
    for tokens in (1310, 8192):
        hashing, recording, chains = [], [], []
        deciding: list[float] = []
        with_session: list[float] = []
        for prompt in (token_ids(draw, tokens) for _ in range(10)):
            begun = time.perf_counter()
            chains.append(hashes := chain_hashes(root_hash("", ""), prompt, BLOCK))
            hashing.append(time.perf_counter() - begun)
            for slot in range(replicas):
                index.record(slot, hashes[: len(hashes) // 3])
            for slot in range(0, replicas, 16):
                index.record(slot, hashes[: len(hashes) // 3 + (slot + 1) * len(hashes) // 2 // replicas])
        for turn in range(1000):
            hashes = chains[turn % len(chains)]
            key, times = ((0, deciding), (session, with_session))[turn // 10 % 2]
            begun = time.perf_counter()
            decision = choose(RoutedRequest(tokens, index.held(hashes), session=key), snapshots, 0.0, config)
            times.append(time.perf_counter() - begun)
            assert decision is not None
            begun = time.perf_counter()
            index.record(decision.snapshot.slot, hashes)
            stream = decision.snapshot.sent(tokens, decision.cached, 0.0)
            recording.append(time.perf_counter() - begun)
            stream.ended(1.0)
        values = (1e6 * statistics.median(times) for times in (deciding, with_session, recording, hashing))
        print(
            "{} replicas, {:,} tokens: a decision takes {:.0f} us, {:.0f} with a session; recording it {:.0f}, "
            "hashing the prompt {:.0f}".format(replicas, tokens, *values)
        )
    print(f"the index at its largest: {index_bytes(replicas) / 1e6:.0f} MB")


def index_bytes(replicas: int) -> int:
    """At the peak, with as many entries as there may be and twice as many sent."""
    draw = random.Random(0)
    tracemalloc.start()
    index = PrefixIndex(BLOCK)
    for slot in range(replicas):
        index.add_replica(slot, MAX_ENTRIES // replicas * BLOCK)
    for request in range(2 * MAX_ENTRIES // 300):
        hashes = [draw.randbytes(16) for _ in range(300)]
        index.record(request % replicas, hashes)
        index.record((request * 7 + 1) % replicas, hashes[:30])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.decisions:
        report_decisions()
        return
    report("conversations", replace(CONVERSATIONS, seed=args.seed))
    report("one system prompt", replace(ONE_SYSTEM_PROMPT, seed=args.seed))
    report("conversations on CPUs", replace(ON_CPUS, seed=args.seed))


if __name__ == "__main__":
    main()
