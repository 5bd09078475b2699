"""Which replica a request goes to. Policies are pure functions of a request, the snapshots of replicas and the time.

forecast     the least forecast time to first token, and delay of the streams there by its prefill; a prefix hit counts
             as the work it saves
latency      the least measured time to first token times streams in flight, for servers that tell nothing else
round_robin  the replica that nothing was sent to for longest

All of them choose among the replicas that `candidates` leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import exp, inf

from penstock.fleet.settings import PolicyName, RoutingConfig
from penstock.fleet.snapshot import Snapshot

_REMEMBERED_SECONDS = 10.0  # in which a measured time to first token loses two thirds of its weight
_LEAST_TTFT = 1e-3  # seconds
_ODD = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a policy looks at. `cached` is by slot and may end before the largest one."""

    tokens: int  # of the prompt, and of output that another replica has emitted
    cached: Sequence[int] = ()  # leading tokens that each replica is expected to hold
    max_tokens: int = 0  # of output that may be asked for
    session: int = 0  # from `session_digest`: requests that should meet on one replica; 0: none


@dataclass(frozen=True, slots=True)
class Decision:
    snapshot: Snapshot
    reason: str  # a phrase for the account of the request
    cached: int  # tokens expected in its prefix cache


Policy = Callable[[RoutedRequest, Sequence[Snapshot], float, RoutingConfig], Decision]


def choose(request: RoutedRequest, snapshots: Sequence[Snapshot], now: float, config: RoutingConfig) -> Decision | None:
    """None if no replica can serve the request now. Those to be avoided are left out of `snapshots`."""
    found = candidates(request, snapshots, config)
    return POLICIES[config.policy](request, found, now, config) if found else None


def candidates(request: RoutedRequest, snapshots: Sequence[Snapshot], config: RoutingConfig) -> list[Snapshot]:
    """Available replicas whose context and KV cache are large enough: long prompts go to the pool with room, as do
    requests for a long answer if there is such a pool. A
    prompt that settings call long goes where the KV cache has room for it now, if that is anywhere."""
    tokens, long = request.tokens, config.long_prompt_tokens
    whole = tokens + (request.max_tokens or 1)
    for s in snapshots:
        if s.stale:
            s.derive()
    found = [s for s in snapshots if s.available and s.longest >= whole]
    if not found:
        found = [s for s in snapshots if s.available and s.longest > tokens]
    if long is not None and tokens > long:
        found = [s for s in found if s.kv_free >= tokens] or found
    return found


def by_forecast(request: RoutedRequest, snapshots: Sequence[Snapshot], now: float, config: RoutingConfig) -> Decision:
    """The least delay in all: the forecast time to first token, and for each stream there the time that it stands still
    while this prompt is computed. A prefix hit shortens both, so affinity and balance are one number: no replica is
    preferred for what it holds once so much runs there that all of them together wait longer than that saves."""
    tokens, cached, slots = request.tokens, request.cached, len(request.cached)
    home = _home(request, snapshots, config)
    best, least, fastest = snapshots[0], inf, 0.0
    for s in snapshots:
        hit = cached[s.slot] if s.slot < slots else 0
        if s is home and hit < config.session_tokens:
            hit = config.session_tokens
        if s.token_seconds:
            own = s.token_seconds * (tokens - hit if hit < tokens else 1)
            delay = s.backlog_seconds + own * (s.load + 1)
            if s.kv_free < tokens:
                delay += (tokens - s.kv_free) * s.kv_token_seconds
        else:
            fastest = fastest or _fastest(snapshots)
            delay = measured_ttft(s, now, fastest) * (s.load + 1)
        if delay < least:
            best, least = s, delay
    hit = min(_hit(request, best), tokens - 1)
    ttft = forecast_ttft(best, tokens, hit) if best.token_seconds else measured_ttft(best, now, fastest)
    where = ", its session's replica" if best is home else ""
    reason = f"forecast TTFT {ttft * 1e3:.0f} ms, {hit:,} of {tokens:,} tokens cached there{where}"
    return Decision(best, reason, hit)


def forecast_ttft(s: Snapshot, tokens: int, cached: int) -> float:
    """Seconds to the first token of a prompt: after all that was sent there before, and where its KV cache is full
    after as much has been freed as is missing."""
    short = max(0.0, tokens - s.kv_free)
    return s.backlog_seconds + (tokens - cached) * s.token_seconds + short * s.kv_token_seconds


def by_latency(request: RoutedRequest, snapshots: Sequence[Snapshot], now: float, config: RoutingConfig) -> Decision:
    """Peak EWMA: the measured time to first token, which follows a rise at once and forgets it with time, times the
    streams in flight. A prompt that is cached as a whole, or the replica of its session, halves it."""
    home = _home(request, snapshots, config)
    best, least, fastest = snapshots[0], inf, _fastest(snapshots)
    for s in snapshots:
        hit = max(_hit(request, s), config.session_tokens if s is home else 0)
        load = measured_ttft(s, now, fastest) * (s.load + 1) * (1 - 0.5 * min(1.0, hit / request.tokens))
        if load < least:
            best, least = s, load
    ttft = measured_ttft(best, now, fastest)
    reason = f"least TTFT times streams: {ttft * 1e3:.0f} ms measured, {best.load} in flight"
    return Decision(best, reason, _hit(request, best))


def measured_ttft(s: Snapshot, now: float, fastest: float) -> float:
    """What was measured lately. A replica that nothing was heard of for long is taken for as fast as the fastest one,
    and is soon measured."""
    return max(fastest, s.ttft * exp((s.ttft_at - now) / _REMEMBERED_SECONDS))


def _fastest(snapshots: Sequence[Snapshot]) -> float:
    return min((s.ttft for s in snapshots if s.ttft), default=_LEAST_TTFT)


def by_round_robin(
    request: RoutedRequest, snapshots: Sequence[Snapshot], now: float, config: RoutingConfig
) -> Decision:
    best = min(snapshots, key=lambda s: s.turn)
    return Decision(best, "round robin", _hit(request, best))


def _hit(request: RoutedRequest, s: Snapshot) -> int:
    return request.cached[s.slot] if s.slot < len(request.cached) else 0


def session_digest(key: str) -> int:
    """Of what names a session, such as a conversation or a user, for `RoutedRequest.session`."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") | 1


def _home(request: RoutedRequest, snapshots: Sequence[Snapshot], config: RoutingConfig) -> Snapshot | None:
    """The replica of a session, by rendezvous hashing: gateways that know nothing of each other agree on it, and if
    one replica goes only its own sessions move."""
    session = request.session
    if not (session and config.session_tokens):
        return None
    return max(snapshots, key=lambda s: (session ^ s.seed) * _ODD & _MASK)


POLICIES: dict[PolicyName, Policy] = {
    "forecast": by_forecast,
    "latency": by_latency,
    "round_robin": by_round_robin,
}
