"""The outermost layer: every exchange is routed, let in at its door, answered, counted and logged here."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import NotFound, PenstockError
from penstock.gateway.api.reading import LongRequests
from penstock.gateway.errors import ClientGone, MethodNotAllowed
from penstock.gateway.http.exchange import Exchange, Traffic
from penstock.gateway.http.origins import Origins
from penstock.gateway.tenancy.keys import redacted
from penstock.observability.account import Account
from penstock.observability.logging import log
from penstock.observability.metrics import GatewayMetrics
from penstock.observability.request_log import RequestLog
from penstock.observability.tracing import Tracing

logger = logging.getLogger("penstock.gateway")

Handler = Callable[[Exchange], Awaitable[None]]
Enter = Callable[[Exchange], Awaitable[None]]  # finds out who asks, or refuses

_QUIET = frozenset(("/health", "/metrics", "/ready"))  # polled every few seconds; not worth a log line
_PLACE = re.compile(r"\{(\w+)(:path)?\}")


async def anybody(exchange: Exchange) -> None:
    """For endpoints that need no key."""


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str  # "{name}" stands for one segment, "{name:path}" for all the rest
    handle: Handler
    enter: Enter


class Routes:
    def __init__(self, routes: list[Route]) -> None:
        self._plain: dict[str, dict[str, Route]] = {}
        self._patterns: dict[re.Pattern[str], dict[str, Route]] = {}
        for route in routes:
            if "{" in route.path:
                pattern = _PLACE.sub(lambda place: f"(?P<{place[1]}>{'.*' if place[2] else '[^/]+'})", route.path)
                self._patterns.setdefault(re.compile(pattern, re.DOTALL), {})[route.method] = route
            else:
                self._plain.setdefault(route.path, {})[route.method] = route
        for methods in (*self._plain.values(), *self._patterns.values()):
            path = next(iter(methods.values())).path
            methods["OPTIONS"] = Route("OPTIONS", path, _Options(_allowed([*methods, "OPTIONS"])), anybody)

    def find(self, exchange: Exchange) -> Route:
        method, path = exchange.method, exchange.path
        methods = self._plain.get(path) or self._plain.get(path.removesuffix("/")) or self._match(exchange)
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            raise MethodNotAllowed(f"{method} is not allowed on {path}", allow=_allowed(methods))
        return route

    def _match(self, exchange: Exchange) -> dict[str, Route]:
        for pattern, methods in self._patterns.items():
            if (match := pattern.fullmatch(exchange.path.removesuffix("/"))) is not None:
                exchange.path_params = match.groupdict()
                return methods
        raise NotFound(f"unknown path: {exchange.method} {exchange.path}", code="unknown_path")


def _allowed(methods: Iterable[str]) -> str:
    found = set(methods)
    return ", ".join(sorted(found | {"HEAD"} if "GET" in found else found))


@dataclass(frozen=True, slots=True)
class _Options:
    """What a path allows; a browser that asks for a page gets its leave from `Origins`."""

    allow: str

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.send(204, b"", (b"allow", self.allow.encode()))


@dataclass(frozen=True, slots=True)
class Edge:
    """`traffic` drains: `drain()` refuses new generation requests, `idle()` waits for those in flight, `abort()` ends
    them."""

    routes: Routes
    origins: Origins
    traffic: Traffic
    metrics: GatewayMetrics
    requests: RequestLog
    long_requests: LongRequests
    tracing: Tracing | None = None

    async def answer(self, exchange: Exchange) -> None:
        if self.tracing is not None and exchange.path not in _QUIET:
            self.tracing.begin(exchange)
        self.traffic.enter(exchange)
        self.metrics.in_flight += 1
        reason: PenstockError | None = None
        try:
            self.origins.tell_browser(exchange)
            if exchange.error is not None:
                raise exchange.error
            route = self.routes.find(exchange)
            exchange.endpoint = route.path
            await route.enter(exchange)
            await route.handle(exchange)
        except (Exception, asyncio.CancelledError) as error:
            reason = exchange.reason(error)
            if not isinstance(reason, ClientGone):
                await exchange.send_error(reason)
        finally:
            self.metrics.in_flight -= 1
            self.traffic.leave(exchange)
            self._record(exchange, reason)
            exchange.close()

    def _record(self, exchange: Exchange, reason: PenstockError | None) -> None:
        """An error in mid-stream is counted by its own status, though the response began with 200."""
        status = exchange.status if reason is None else reason.status
        why = None if reason is None else reason.message
        self.metrics.requests[exchange.endpoint, status] += 1
        account = None if exchange.account is None else exchange.account(status, why)
        if account is not None:
            self.metrics.settle(account)
            self.requests.add(account)
        if self.tracing is not None:
            self.tracing.end(exchange, status, why, account)
        if exchange.path not in _QUIET:
            log(
                logger,
                logging.INFO,
                "request",
                method=exchange.method,
                path=redacted(exchange.path),
                status=status,
                ms=exchange.elapsed() * 1000,
                tenant=exchange.tenant.name or None,
                **_log_fields(account),
                id=redacted(exchange.id),
                why=why and redacted(why),
            )


def _log_fields(account: Account | None) -> dict[str, Any]:
    if account is None:
        return {}
    parts = account.choices[0].parts
    return {
        "class": account.objective,
        "cache": account.choices[0].cache,
        "first_ms": account.ttft and account.ttft * 1000,
        "queued_ms": parts.queued * 1000,
        "prompt": account.prompt_tokens,
        "cached": account.cached_tokens,
        "output": account.output_tokens,
    }
