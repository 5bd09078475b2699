"""The outermost layer: every request is routed, authenticated, answered, counted and logged here."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from penstock.core.errors import NotFound, PenstockError, Unavailable
from penstock.gateway.api.generation import Answer, Handler
from penstock.gateway.api.live import Live
from penstock.gateway.api.reading import LongRequests
from penstock.gateway.api.serving import Serving
from penstock.gateway.errors import OPENAI_ERRORS, ClientGone, ErrorFormat, InternalError, MethodNotAllowed
from penstock.gateway.http.origins import Origins
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.http.traffic import Traffic
from penstock.gateway.tenancy.auth import public
from penstock.gateway.tenancy.keys import redacted
from penstock.gateway.tenancy.tenants import OPEN, Tenant
from penstock.observability.account import Account
from penstock.observability.logging import log_event
from penstock.observability.metrics import GatewayMetrics
from penstock.observability.request_log import RequestLog
from penstock.observability.tracing import Exchange, Tracing, trace_id

logger = logging.getLogger("penstock.gateway")

Authenticate = Callable[[Request], Awaitable[Tenant]]  # raises when the request is refused

_QUIET = frozenset(
    ("/health", "/load", "/metrics", "/ping", "/ready")
)  # polled every few seconds; not worth a log line
_MOST_SEGMENTS = 4  # of a path, the empty one before it among them, that show which API it belongs to
_NO_IDS = frozenset(("/v1/responses/compact",))  # endpoints of OpenAI that are not here and look like ids
_PLACE = re.compile(r"\{(\w+)(:path)?\}")


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str  # "{name}" stands for one segment, "{name:path}" for all the rest
    handle: Handler
    authenticate: Authenticate
    errors: ErrorFormat = OPENAI_ERRORS
    aliases: tuple[str, ...] = ()  # other paths of it, without places


class Routes:
    def __init__(self, routes: list[Route]) -> None:
        self._routes = routes
        self._plain: dict[str, dict[str, Route]] = {}
        self._patterns: dict[re.Pattern[str], dict[str, Route]] = {}
        for route in routes:
            if "{" in route.path:
                pattern = _PLACE.sub(lambda place: f"(?P<{place[1]}>{'.*' if place[2] else '[^/]+'})", route.path)
                self._patterns.setdefault(re.compile(pattern, re.DOTALL), {})[route.method] = route
            else:
                for path in (route.path, *route.aliases):
                    self._plain.setdefault(path, {})[route.method] = route
        for methods in (*self._plain.values(), *self._patterns.values()):
            path = next(iter(methods.values())).path
            methods["OPTIONS"] = Route("OPTIONS", path, _Options(_allowed([*methods, "OPTIONS"])), public)

    def errors(self, path: str) -> ErrorFormat:
        """Of the API that a path belongs to which has no route: the one of all routes that begin as it does."""
        segments = path.split("/", _MOST_SEGMENTS)
        for length in range(min(len(segments), _MOST_SEGMENTS), 1, -1):
            formats = {r.errors for r in self._routes if r.path.split("/")[:length] == segments[:length]}
            if formats:
                return formats.pop() if len(formats) == 1 else OPENAI_ERRORS
        return OPENAI_ERRORS

    def has(self, path: str) -> bool:
        return path in self._plain

    def find(self, request: Request) -> Route:
        method, path = request.method, request.path
        methods = self._plain.get(path) or self._plain.get(path.removesuffix("/")) or self._match(request)
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            raise MethodNotAllowed(f"{method} is not allowed on {path}", allow=_allowed(methods))
        return route

    def _match(self, request: Request) -> dict[str, Route]:
        path = request.path.removesuffix("/")
        for pattern, methods in self._patterns.items() if path not in _NO_IDS else ():
            if (match := pattern.fullmatch(path)) is not None:
                request.path_params = match.groupdict()
                return methods
        raise NotFound(f"unknown path: {request.method} {request.path}", code="unknown_path")


def _allowed(methods: Iterable[str]) -> str:
    found = set(methods)
    return ", ".join(sorted(found | {"HEAD"} if "GET" in found else found))


@dataclass(frozen=True, slots=True)
class _Options:
    """Says which methods a path allows; `Origins` adds what a browser's preflight asks for."""

    allow: str

    async def __call__(self, request: Request, response: Response, tenant: Tenant) -> None:
        await response.send(204, b"", (b"allow", self.allow.encode()))


@dataclass(frozen=True, slots=True)
class Edge:
    """`traffic` drains: `drain()` refuses new generation requests, `idle()` waits for those in flight, `abort()` ends
    them."""

    routes: Routes
    origins: Origins
    serving: Serving
    requests: RequestLog
    live: Live
    tracing: Tracing | None = None

    @property
    def traffic(self) -> Traffic:
        return self.serving.traffic

    @property
    def metrics(self) -> GatewayMetrics:
        return self.serving.metrics

    @property
    def long_requests(self) -> LongRequests:
        return self.serving.long_requests

    async def answer(self, request: Request, response: Response, known: Tenant | None = None) -> None:
        """`known`: whose request it is, where that has been found out before."""
        quiet = request.path in _QUIET
        span = None
        if self.tracing is not None and not quiet:
            span = self.tracing.begin(request.raw_headers, response.headers)
            request.trace_id = trace_id(span)
        traffic, metrics = self.serving.traffic, self.serving.metrics
        traffic.enter(request)
        metrics.in_flight += 1
        endpoint, route, tenant = "other", None, OPEN
        answer: Answer | None = None
        error: PenstockError | None = None
        why: str | None = None
        try:
            self.origins.add_cors_headers(request, response.headers)
            if request.error is not None:
                raise request.error
            route = self.routes.find(request)
            endpoint = route.path
            tenant = await route.authenticate(request) if known is None else known
            answer = await route.handle(request, response, tenant)
            if answer is not None:
                self.live.running[request.unique] = answer
                await answer.respond()
        except (Exception, asyncio.CancelledError) as raised:
            error = _error_for_client(request, raised)
            errors = self.routes.errors(request.path) if route is None else route.errors
            why = errors.message(error)
            if not isinstance(error, ClientGone):
                await response.send_error(error, errors)
        finally:
            metrics.in_flight -= 1
            traffic.leave(request)
            # An error in mid-stream is counted by its own status, though the response began with 200.
            status = response.status if error is None else error.status
            account = None
            if answer is not None:
                del self.live.running[request.unique]
                account = answer.generation.account(status, why)
            elif why is not None:
                self.live.refused(endpoint, tenant.name, status, why)
            self._record(endpoint, status, account)
            if self.tracing is not None and span is not None:
                exchange = Exchange(request.method, endpoint, request.headers.get(b"host", b""), status, error, why)
                inference = answer.generation.inference() if answer is not None and span.is_recording() else None
                self.tracing.end(span, exchange, account, inference)
            if not quiet and logger.isEnabledFor(logging.INFO):
                fields = _log_fields(request, tenant, status, why, response.elapsed(), account)
                log_event(logger, logging.INFO, "request", fields)
            request.close()
            error = None  # its traceback refers to this frame, and so to all of the request

    def _record(self, endpoint: str, status: int, account: Account | None) -> None:
        self.metrics.requests[endpoint, status] += 1
        if account is not None:
            self.metrics.settle(account)
            self.live.ended(self.requests.add(account))

    async def close(self) -> None:
        await self.serving.shadows.close()
        await self.long_requests.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def _error_for_client(request: Request, error: BaseException) -> PenstockError:
    """Why the request failed, in terms a client may see."""
    if isinstance(error, asyncio.CancelledError):
        reason = request.catch_cancellation()
        if reason is None:
            raise error
        return reason
    if isinstance(error, PenstockError):
        return error
    about = {"request_id": request.id, "trace_id": request.trace_id, "path": request.path}
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        log_event(logger, logging.ERROR, "out of file descriptors", about)
        return Unavailable(
            "the server is out of file descriptors; raise its limit (ulimit -n)", code="out_of_file_descriptors"
        )
    log_event(logger, logging.ERROR, "unexpected error", about, error)
    return InternalError(f"internal error; the log has details under request id {request.id}")


def _log_fields(
    request: Request, tenant: Tenant, status: int, why: str | None, seconds: float, account: Account | None
) -> dict[str, object]:
    fields: dict[str, object] = {
        "method": request.method,
        "path": redacted(request.path),
        "status": status,
        "ms": seconds * 1000,
        "tenant": tenant.name or None,
    }
    if account is not None:
        choice = account.choices[0]
        fields |= {
            "model": account.model if account.why else None,
            "adapter": None if account.adapter is None else account.adapter.name,
            "class": account.objective,
            "cache": choice.cache,
            "first_ms": None if account.ttft is None else account.ttft * 1000,
            "queued_ms": choice.parts.queued * 1000,
            "prompt": account.prompt_tokens,
            "cached": account.cached_tokens,
            "output": account.output_tokens,
        }
    fields["request_id"] = redacted(request.id)
    fields["trace_id"] = request.trace_id
    fields["why"] = None if why is None else redacted(why)
    return fields
