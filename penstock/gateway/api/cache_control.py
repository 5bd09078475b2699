"""`Cache-Control` of a request, and what a response says about where it came from."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.request import CacheControl, CacheStatus
from penstock.gateway.http.request import Request

NAME = b"x-penstock-cache"

_LEAST_CACHED = ("miss", "bypass", "shared", "similar", "hit")
_COMPUTED = {state: state.encode() for state in _LEAST_CACHED[:3]}  # for this request or another one


def cache_control(request: Request) -> CacheControl | None:
    """None: nothing was said. Directives this cache does not know are left alone, as HTTP wants it."""
    if b"cache-control" not in request.headers:
        return None
    given = [value for name, value in request.raw_headers if name == b"cache-control"]
    directives = dict(_directive(part) for part in b",".join(given).decode("latin-1").split(","))
    max_age = directives.get("max-age")
    return CacheControl(
        read="no-cache" not in directives,
        store="no-store" not in directives,
        # what is not a number of seconds is stale, says RFC 9111
        max_age=None if max_age is None else float(max_age) if _is_seconds(max_age) else 0.0,
        only_cached="only-if-cached" in directives,
    )


def _directive(part: str) -> tuple[str, str]:
    name, _, value = part.partition("=")
    return name.strip().lower(), value.strip().strip('"')


def _is_seconds(value: str) -> bool:
    return value.isascii() and value.isdigit() and len(value) < 12


def cache_header(statuses: Sequence[CacheStatus]) -> bytes:
    """Of several choices the one that was cached least speaks for all."""
    status = min(statuses, key=lambda status: _LEAST_CACHED.index(status.state)) if len(statuses) > 1 else statuses[0]
    if (computed := _COMPUTED.get(status.state)) is not None:
        return computed
    found = f"hit; tier={status.tier}" if status.state == "hit" else f"semantic; score={status.score:.3f}"
    return f"{found}; age={status.age:.0f}".encode()
