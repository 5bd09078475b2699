"""Which replica a request goes to. Policies are pure functions of a request, the snapshots of replicas and the time.

forecast     the least forecast time to first token, in which a prefix hit counts as the work it saves
latency      the least measured time to first token times streams in flight, for servers that tell nothing else
round_robin  one after the other

All of them choose among `candidates`: available, of the version that the request was assigned, and with room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.fleet.snapshot import Snapshot

_MIX = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a policy looks at. `cached` is by slot, and may end before the largest one."""

    tokens: int  # prompt, and output that another replica has emitted
    max_tokens: int = 0  # output asked for; 0: not said
    cached: Sequence[int] = ()  # leading tokens that each replica is expected to hold
    session: int = 0  # digest of the key that is to stay where it is; 0: none
    version: str = ""  # "": any


@dataclass(frozen=True, slots=True)
class Decision:
    snapshot: Snapshot
    reason: str  # a phrase for the account of the request
    cached: int  # tokens expected in its prefix cache


Policy = Callable[[RoutedRequest, Sequence[Snapshot], float], Decision | None]


def candidates(request: RoutedRequest, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Replicas that may serve the request. One whose context or KV cache is too small never does: long prompts go to
    the pool with room."""
    least = request.tokens + 1
    return [
        s
        for s in snapshots
        if s.available
        and (s.version == request.version or not request.version)
        and (s.max_model_len >= least or not s.max_model_len)
        and (s.kv_tokens >= least or not s.kv_tokens)
    ]


def by_forecast(request: RoutedRequest, snapshots: Sequence[Snapshot], now: float) -> Decision | None:
    tokens, cached, slots = request.tokens, request.cached, len(request.cached)
    best, least, hit = None, float("inf"), 0
    for s in candidates(request, snapshots):
        here = min(cached[s.slot], tokens - 1) if s.slot < slots else 0
        seconds = forecast_ttft(s, tokens, here)
        if seconds < least or (seconds == least and best is not None and s.streams < best.streams):
            best, least, hit = s, seconds, here
    if best is None:
        return None
    return Decision(best, f"least forecast TTFT {least * 1e3:.0f} ms, {hit:,} of {tokens:,} tokens cached there", hit)


def forecast_ttft(s: Snapshot, tokens: int, cached: int) -> float:
    if not s.token_seconds:
        return s.ttft * (s.prefilling + 1)
    seconds = (s.prefill_tokens + tokens - cached) * s.token_seconds + s.step_seconds
    short = s.kv_claimed + tokens - s.kv_tokens
    if short > 0 and s.kv_tokens and s.context_tokens:
        seconds += short * s.stream_seconds / s.context_tokens
    return seconds


def by_round_robin(request: RoutedRequest, snapshots: Sequence[Snapshot], now: float) -> Decision | None:
    found = candidates(request, snapshots)
    if not found:
        return None
    best = min(found, key=lambda s: s.last_sent)
    cached = request.cached[best.slot] if best.slot < len(request.cached) else 0
    return Decision(best, "round robin", cached)
