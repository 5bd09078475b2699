"""Traces over OTLP: one span per request, and below it the queue, the prefill and the decoding of every choice.

Only the outer span is opened while a request runs, because its ids go out with the response; the others are made from
the request's account when it has ended. Attributes follow OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.errors import PenstockError, StartupError
from penstock.core.ledger import Ledger
from penstock.core.request import SamplingParams
from penstock.observability.account import Account, ChoiceAccount

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

ENVIRONMENT = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# `gen_ai.operation.name` by endpoint. The conventions have no name for the last two.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/completion": "text_completion",
    "/infill": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/embedding": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
}
_W3C = (b"traceparent", b"tracestate")
_HOST = re.compile(r"(.*?)(?::([0-9]{1,5}))?", re.DOTALL)

Attributes = Mapping[str, "str | int | float | bool | list[str]"]
_Maybe = dict[str, "str | int | float | bool | list[str] | None"]


class Exchange(NamedTuple):
    """A request and its answer, as HTTP sees them."""

    method: str
    route: str
    host: bytes  # of the header; empty: none
    status: int
    error: PenstockError | None
    why: str | None  # what the client is told of the error


class Inference(NamedTuple):
    """What was asked of a model and answered, where an account does not tell it."""

    response_id: str  # as the client sees it
    params: SamplingParams | None  # None: nothing is sampled, as of embeddings
    max_tokens: int | None  # None: the client did not say
    streamed: bool
    reasoning_tokens: int | None  # None: the model does not reason


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

    def end(self, span: Span, exchange: Exchange, account: Account | None, inference: Inference | None) -> None:
        if not span.is_recording():
            return
        now = time.time_ns()
        span.update_name(f"{exchange.method} {exchange.route}")
        span.set_attributes(_exchange_attributes(exchange))
        if exchange.status >= 500:
            span.set_status(self._trace.StatusCode.ERROR, exchange.why)
        if account is not None:
            span.update_name(f"{_operation(account)} {account.asked}")
            span.set_attributes(_request_attributes(account))
            if inference is not None:
                span.set_attributes(_inference_attributes(account, inference))
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


def trace_id(span: Span) -> str | None:
    """As `traceparent` has it. None: the trace is not sampled, so nobody could find it."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.trace_flags.sampled else None


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _operation(account: Account) -> str:
    return OPERATIONS.get(account.endpoint, account.endpoint)


def _given(values: _Maybe) -> Attributes:
    return {name: value for name, value in values.items() if value is not None}


def _exchange_attributes(exchange: Exchange) -> Attributes:
    """`error.type` is what the error's body calls `code`, or else `type`."""
    address, port = _HOST.fullmatch(exchange.host.decode("latin-1")).groups()  # type: ignore[union-attr]  # any text
    error = exchange.error
    values: _Maybe = {
        "http.request.method": exchange.method,
        "http.route": exchange.route,
        "http.response.status_code": exchange.status,
        "server.address": address or None,
        "server.port": int(port) if port else None,
        "error.type": None if error is None else error.code or error.kind,
    }
    return _given(values)


def _request_attributes(account: Account) -> Attributes:
    values: _Maybe = {
        "gen_ai.operation.name": _operation(account),
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": account.asked,
        "gen_ai.response.model": account.model if account.adapter is None else account.adapter.name,
        "gen_ai.request.choice.count": len(account.choices) if len(account.choices) > 1 else None,
        "gen_ai.usage.input_tokens": account.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": account.cached_tokens,
        "penstock.request_id": account.request_id,
        "penstock.tenant": account.tenant or None,
        "penstock.class": account.objective,
        "penstock.ttft_s": account.ttft,
    }
    return _given(values)


def _inference_attributes(account: Account, inference: Inference) -> Attributes:
    """Settings that change nothing are left out."""
    values: _Maybe = {"gen_ai.response.id": inference.response_id}
    params = inference.params
    if params is not None:
        is_json = params.grammar is not None and params.grammar.kind == "json_schema"
        values |= {
            "gen_ai.request.stream": inference.streamed or None,
            "gen_ai.request.max_tokens": inference.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": float(params.top_k) if params.top_k else None,
            "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            "gen_ai.request.presence_penalty": params.presence_penalty or None,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.stop_sequences": list(params.stop) or None,
            "gen_ai.output.type": "json" if is_json else None,
            "gen_ai.response.finish_reasons": [choice.finish_reason or "error" for choice in account.choices],
            "gen_ai.response.time_to_first_chunk": account.ttft if inference.streamed else None,
            "gen_ai.usage.output_tokens": account.output_tokens,
            "gen_ai.usage.reasoning.output_tokens": inference.reasoning_tokens,
        }
    return _given(values)


def _engine_attributes(ledger: Ledger) -> Attributes:
    values: _Maybe = {
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
    return _given(values)
