"""What a router knows of one replica: what it has sent there itself, and what the replica last said of itself.

The counts follow every request as it is sent, streams and ends, so a decision reads them and computes nothing over the
requests in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from math import inf

from penstock.core.engine import EngineStats

_AVERAGED = 0.1  # weight of the latest stream in the averages
_USUAL_BATCH = 32  # sequences that `EngineStats.loaded_step_seconds` is about
_turns = count(1)


@dataclass(slots=True, eq=False)
class Snapshot:
    """One replica. `slot` is its bit in the prefix index. Times are seconds of a monotonic clock."""

    id: str
    slot: int
    available: bool = True
    max_model_len: int = 0  # 0: unknown
    kv_tokens: int = 0  # that its KV cache holds; 0: unknown
    streams: int = 0  # in flight
    prefilling: int = 0  # of these, those whose first token has not come
    prefill_tokens: int = 0  # that those have to compute: less expected prefix hits
    context_tokens: int = 0  # of all streams in flight, prompt and output
    stats: EngineStats = field(default_factory=EngineStats)  # as last heard
    ttft: float = 0.0  # moving average of what was measured, which follows a rise at once
    ttft_at: float = 0.0  # when it was last measured
    stream_seconds: float = 0.0  # moving average of how long a stream lasts
    turn: int = 0  # when something was last sent there, in requests sent to all replicas
    elsewhere: int = 0  # streams there that other gateways have sent, by the last reading
    stale: bool = True  # something has changed since these were derived:
    load: int = 0  # streams there, whoever sent them
    longest: float = 0.0  # tokens of one request that it has room for; inf: unknown
    kv_free: float = 0.0  # tokens of the KV cache beside all that was sent there; inf: unknown
    token_seconds: float = 0.0  # to prefill one token; 0: unknown
    backlog_seconds: float = 0.0  # until the prefill of a request that is sent now begins
    kv_token_seconds: float = 0.0  # until streams that end have freed one more token of the KV cache
    seed: int = 0  # of rendezvous hashing

    def __post_init__(self) -> None:
        self.seed = int.from_bytes(blake2b(self.id.encode(), digest_size=8).digest(), "little")

    def heard(self, stats: EngineStats) -> None:
        """The replica has sent a reading."""
        self.stats = stats
        self.elsewhere = max(0, stats.running + stats.waiting - self.streams)
        self.stale = True

    def sent(self, tokens: int, cached: int, now: float) -> Stream:
        """A request with so many tokens is sent there, of which `cached` are expected in its prefix cache."""
        stream = Stream(self, tokens - cached, tokens, now)
        self.turn = next(_turns)
        self.streams += 1
        self.prefilling += 1
        self.prefill_tokens += stream.prefill
        self.context_tokens += tokens
        self.stale = True
        return stream

    def restarted(self) -> None:
        """Another process serves this replica: readings and averages of the one before say nothing of it."""
        self.stats = EngineStats()
        self.elsewhere = 0
        self.ttft = self.stream_seconds = 0.0
        self.stale = True

    def derive(self) -> None:
        """Compute from the counts what policies read, once for many decisions."""
        self.stale = False
        stats = self.stats
        self.load = self.streams + self.elsewhere
        self.longest = min(self.max_model_len or inf, self.kv_tokens or inf)
        used = self.kv_tokens * stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else 0.0
        self.kv_free = self.kv_tokens - used - self.prefill_tokens if self.kv_tokens else inf
        self.kv_token_seconds = self.stream_seconds / self.context_tokens if self.context_tokens else 0.0
        rate = stats.prefill_tokens_per_second
        self.token_seconds = 1.0 / rate if rate else 0.0
        joined = self.load - stats.running  # since the reading, or waiting in the engine
        step = stats.decode_step_seconds + joined * stats.loaded_step_seconds / _USUAL_BATCH
        self.backlog_seconds = self.prefill_tokens * self.token_seconds + max(0.0, step)


@dataclass(slots=True, eq=False)
class Stream:
    """One request in flight on a replica, for the counts of its snapshot."""

    snapshot: Snapshot
    prefill: int  # tokens that it was expected to compute before its first token
    context: int
    began: float
    emitted_tokens: int = 0
    over: bool = False

    def emitted(self, tokens: int, now: float) -> None:
        """A chunk with so many tokens has come."""
        snapshot = self.snapshot
        if not self.emitted_tokens and tokens:
            snapshot.prefilling -= 1
            snapshot.prefill_tokens -= self.prefill
            measured = now - self.began
            snapshot.ttft, snapshot.ttft_at = max(measured, average(snapshot.ttft, measured)), now
            snapshot.stale = True
        self.emitted_tokens += tokens
        self.context += tokens
        snapshot.context_tokens += tokens

    def ended(self, now: float, *, completed: bool = True) -> None:
        """No more chunks come. Not `completed`: the client left or the replica failed, so its length says nothing."""
        if self.over:
            return
        self.over = True
        snapshot = self.snapshot
        snapshot.streams -= 1
        snapshot.context_tokens -= self.context
        if not self.emitted_tokens:
            snapshot.prefilling -= 1
            snapshot.prefill_tokens -= self.prefill
        if completed:
            snapshot.stream_seconds = average(snapshot.stream_seconds, now - self.began)
        snapshot.stale = True


def average(so_far: float, latest: float) -> float:
    """A moving average, which begins with the first value."""
    return so_far + _AVERAGED * (latest - so_far) if so_far else latest
