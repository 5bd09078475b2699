"""Where the time of one request went. The engine keeps it; its parts add up to the time from arrival to the last token.

Seconds throughout. A request is at any moment in exactly one of these states: queued (it holds no memory), prefilling,
decoding, or stalled: it could have been computed but the engine did something else, or the step that computed it took
longer because of another request. Where there was no replica, or one was lost, the fleet adds the time until one had
the request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

QueueCause = Literal["step", "order", "rows", "memory", "adapters", "preempted"]
MissCause = Literal["never_seen", "evicted", "too_short", "other_salt", "off"]

MAX_CHUNKS = 64  # a ledger is sent with the answer: what is beyond these is summed up in the last entry
MAX_STALLS = 16


@dataclass(slots=True)
class PrefillChunk:
    tokens: int
    seconds: float


@dataclass(slots=True)
class Stall:
    """Time lost to another request's prefill, or to its turn."""

    request_id: str  # "" if it is of another tenant, or no single one
    seconds: float
    steps: int = 1


@dataclass(slots=True)
class Failover:
    """A replica that was lost while it worked for the request, or was too slow; it went on elsewhere."""

    replica: str
    cause: str
    output_tokens: int  # that the request had by then
    served: float  # until its last chunk came; the replica's own ledger is lost with it
    lost: float  # from then until another replica had the request: noticing it, and waiting for one


@dataclass(slots=True)
class Ledger:
    request_id: str
    tenant: str = ""
    objective: str = ""  # name of the class
    arrived: float = 0.0  # seconds since 1970
    total: float = 0.0  # from arrival to the last token
    ttft: float | None = None
    predicted_ttft: float | None = None  # as forecast on arrival; None: the engine knew too little to say
    # step: the step under way at arrival had to end; order: others went first; rows, memory, adapters: none was free;
    # preempted: its memory was taken away
    queued: dict[QueueCause, float] = field(default_factory=dict)
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: float = 0.0
    decode_steps: int = 0
    stalled: float = 0.0
    stalls: list[Stall] = field(default_factory=list)  # the longest first; they sum to at most `stalled`
    prompt_tokens: int = 0
    cached_tokens: int = 0
    missed_tokens: dict[MissCause, int] = field(default_factory=dict)  # with cached_tokens: the whole prompt
    output_tokens: int = 0
    forced_tokens: int = 0  # of the output: those that its grammar forced and nobody sampled
    drafted_tokens: int = 0  # guessed ahead of sampling, to be sampled several in a step
    accepted_tokens: int = 0  # those of them that were sampled
    preemptions: int = 0
    recomputed_tokens: int = 0
    met_ttft: bool | None = None  # None: nothing was promised
    met_gap: bool | None = None  # of the 99th percentile of its inter-token latencies
    held: float = 0.0  # until there was a replica; these four are the fleet's
    replica: str = ""  # that finished it
    routing: str = ""  # why that one
    failovers: list[Failover] = field(default_factory=list)

    @property
    def accounted(self) -> float:
        """Equals `total`."""
        computed = sum(self.queued.values()) + sum(chunk.seconds for chunk in self.prefill) + self.decode + self.stalled
        return computed + self.held + self.failover

    @property
    def failover(self) -> float:
        """Time at replicas that were lost, and until another one took over."""
        return sum(each.served + each.lost for each in self.failovers)
