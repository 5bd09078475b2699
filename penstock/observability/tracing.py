"""Traces over OTLP: one span per request, and below it the queue, the prefill and the decoding of every choice.

Only the outer span is opened while a request runs, because its ids go out with the response; the others are made from
the request's account when it has ended. Attributes follow OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.core.errors import StartupError
from penstock.core.ledger import Ledger
from penstock.observability.account import Account, ChoiceAccount

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

ENVIRONMENT = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_W3C = (b"traceparent", b"tracestate")

Attributes = Mapping[str, "str | int | float | bool | list[str]"]


def is_wanted(endpoint: str | None) -> bool:
    return endpoint is not None or any(os.environ.get(name) for name in ENVIRONMENT)


def start_tracing(endpoint: str | None) -> Tracing | None:
    """`endpoint` is the root of a collector, such as http://127.0.0.1:4318; None: what OpenTelemetry's own environment
    variables say, or no tracing at all."""
    if not is_wanted(endpoint):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise StartupError(
            f"otlp_endpoint is set, but {error.name} is not installed; pip install 'penstock[otel]', or unset it",
            param="otlp_endpoint",
        ) from error
    service = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "penstock")})
    provider = TracerProvider(resource=service)
    url = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    return Tracing(provider)


class Tracing:
    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("penstock")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, request_headers: list[tuple[bytes, bytes]], response_headers: dict[bytes, bytes]) -> Span:
        """The span of a request, for `end`. It belongs to the trace that the W3C headers of the request name, if any;
        the response names it too."""
        carrier = {k.decode(): v.decode("latin-1") for k, v in request_headers if k in _W3C}
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span("request", context=parent, kind=self._trace.SpanKind.SERVER)
        context = span.get_span_context()
        ids = b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags)
        response_headers[b"traceparent"] = ids
        return span

    def end(
        self, span: Span, method: str, endpoint: str, status: int, error: str | None, account: Account | None
    ) -> None:
        if not span.is_recording():
            return
        now = time.time_ns()
        span.update_name(f"{method} {endpoint}")
        span.set_attributes(
            {"http.request.method": method, "http.route": endpoint, "http.response.status_code": status}
        )
        if error is not None:
            span.set_attribute("error.type", str(status))
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR, error)
        if account is not None:
            span.update_name(f"{OPERATIONS.get(endpoint, endpoint)} {account.model}")
            span.set_attributes(_request_attributes(account))
            start = now - _ns(account.total)
            for choice in account.choices:
                self._choice(self._trace.set_span_in_context(span), choice, start)
        span.end(now)

    def _choice(self, parent: Context, choice: ChoiceAccount, start: int) -> None:
        prepared = start + _ns(choice.parts.prepare)
        submitted = prepared + _ns(choice.parts.cascade)
        self._add(parent, "prepare", start, prepared)
        if submitted > prepared:
            self._add(parent, "cascade", prepared, submitted)
        ledger = choice.engine
        if ledger is None:
            self._add(parent, "answer", submitted, submitted + _ns(choice.parts.answer))
            return
        engine = self._open(parent, "engine", submitted, _engine_attributes(ledger))
        below = self._trace.set_span_in_context(engine)
        placed = submitted + _ns(ledger.held)
        waited = placed + _ns(sum(s for cause, s in ledger.queued.items() if cause != "preempted"))
        first = submitted + _ns(ledger.total if ledger.ttft is None else ledger.ttft)
        last = submitted + _ns(ledger.total)
        if placed > submitted:
            self._add(below, "held", submitted, placed)
        self._add(below, "queue", placed, waited, {f"penstock.queue.{c}_s": s for c, s in ledger.queued.items()})
        self._prefill(below, ledger, waited, first)
        if ledger.decode_steps:
            self._add(
                below,
                "decode",
                first,
                last,
                {"penstock.steps": ledger.decode_steps, "penstock.output_tokens": ledger.output_tokens},
            )
        engine.end(last)

    def _prefill(self, parent: Context, ledger: Ledger, start: int, first_token: int) -> None:
        """Chunks have their true lengths and order; time between them is not kept, so they lie end to end."""
        span = self._open(parent, "prefill", start, {"penstock.chunks": len(ledger.prefill)})
        below = self._trace.set_span_in_context(span)
        at = start
        for chunk in ledger.prefill:
            until = at + _ns(chunk.seconds)
            self._add(below, "prefill chunk", at, until, {"penstock.tokens": chunk.tokens})
            at = until
        span.end(max(at, first_token))

    def _open(self, parent: Context, name: str, start: int, attributes: Attributes) -> Span:
        return self._tracer.start_span(name, context=parent, start_time=start, attributes=attributes)

    def _add(self, parent: Context, name: str, start: int, end: int, attributes: Attributes | None = None) -> None:
        self._open(parent, name, start, attributes or {}).end(end)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def trace_id(span: Span) -> str:
    """As `traceparent` has it."""
    return f"{span.get_span_context().trace_id:032x}"


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _request_attributes(account: Account) -> Attributes:
    values: dict[str, str | int | float | bool | list[str] | None] = {
        "gen_ai.operation.name": OPERATIONS.get(account.endpoint, account.endpoint),
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": account.model,
        "gen_ai.response.model": account.model,
        "gen_ai.response.id": account.id,
        "gen_ai.response.finish_reasons": [choice.finish_reason or "error" for choice in account.choices],
        "gen_ai.usage.input_tokens": account.prompt_tokens,
        "gen_ai.usage.output_tokens": account.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": account.cached_tokens,
        "gen_ai.request.choice.count": len(account.choices) if len(account.choices) > 1 else None,
        "gen_ai.response.time_to_first_chunk": account.ttft,
        "penstock.request_id": account.request_id,
        "penstock.tenant": account.tenant or None,
        "penstock.class": account.objective,
    }
    return {name: value for name, value in values.items() if value is not None}


def _engine_attributes(ledger: Ledger) -> Attributes:
    values: dict[str, str | int | float | bool | list[str] | None] = {
        "penstock.stalled_s": ledger.stalled,
        "penstock.stalled_by": [stall.request_id for stall in ledger.stalls if stall.request_id] or None,
        "penstock.preemptions": ledger.preemptions,
        "penstock.recomputed_tokens": ledger.recomputed_tokens,
        "penstock.cached_tokens": ledger.cached_tokens,
        "penstock.forced_tokens": ledger.forced_tokens or None,
        "penstock.drafted_tokens": ledger.drafted_tokens or None,
        "penstock.accepted_tokens": ledger.accepted_tokens or None,
        "penstock.predicted_ttft_s": ledger.predicted_ttft,
        "penstock.met_ttft": ledger.met_ttft,
        "penstock.met_gap": ledger.met_gap,
        "penstock.replica": ledger.replica or None,
        "penstock.failovers": len(ledger.failovers) or None,
        **{f"penstock.missed_tokens.{cause}": count for cause, count in ledger.missed_tokens.items()},
    }
    return {name: value for name, value in values.items() if value is not None}
