"""`Cache-Control` of a request, and what a response says about where it came from."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.request import CacheControl, CacheStatus
from penstock.gateway.http.request import Header, Request

NAME = b"x-penstock-cache"

_LEAST_CACHED = ("miss", "bypass", "shared", "similar", "hit")


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


def cache_header(statuses: Iterable[CacheStatus]) -> Header:
    """Of several choices the one that was cached least speaks for all."""
    status = min(statuses, key=lambda status: _LEAST_CACHED.index(status.state))
    words: list[str] = ["semantic" if status.state == "similar" else status.state]
    if status.state == "hit":
        words.append(f"tier={status.tier}")
    if status.state == "similar":
        words.append(f"score={status.score:.3f}")
    if status.state in ("hit", "similar"):
        words.append(f"age={status.age:.0f}")
    return NAME, "; ".join(words).encode()
