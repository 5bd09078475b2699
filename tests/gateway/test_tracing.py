"""Spans as a real OTLP collector receives them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.core.errors import EngineFailure, StartupError
from penstock.observability.settings import ObservabilityConfig
from penstock.observability.tracing import start_tracing
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MODEL
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving
from tests.otlp_collector import Collector

HI = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.stop()


@pytest.fixture
def traced(tokenizer: Tokenizer, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with serving(tokenizer, Settings(observability=ObservabilityConfig(collector.url))) as gateway:
        yield gateway


def attributes(span: Any) -> dict[str, Any]:
    values = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values


def test_a_request_joins_its_callers_trace_and_shows_the_engine(traced: Gateway, collector: Collector) -> None:
    trace_id, caller = bytes(range(16)), bytes(range(8))
    parent = f"00-{trace_id.hex()}-{caller.hex()}-01"
    with traced.http() as http:
        response = http.post(CHAT, json=HI, headers={"traceparent": parent})
        account = http.get(f"/v1/requests/{response.json()['id']}").json()
    spans = collector.trace(trace_id)
    (outer,) = spans[f"chat {MODEL}"]
    assert outer.parent_span_id == caller
    assert response.headers["traceparent"] == f"00-{trace_id.hex()}-{outer.span_id.hex()}-01"
    said = attributes(outer)
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == MODEL
    assert said["gen_ai.usage.input_tokens"] == account["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == account["output_tokens"]
    assert said["gen_ai.response.finish_reasons"] == ["stop"]
    assert said["gen_ai.response.id"] == response.json()["id"]
    assert (said["server.address"], said["server.port"]) == (traced.host, traced.port)
    assert said["http.response.status_code"] == 200
    assert "gen_ai.request.stream" not in said
    assert "error.type" not in said
    (engine,) = spans["engine"]
    assert engine.parent_span_id == outer.span_id
    for name in ("queue", "prefill", "decode"):
        (span,) = spans[name]
        assert span.parent_span_id == engine.span_id
        assert engine.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= engine.end_time_unix_nano + 1000
    chunks = spans["prefill chunk"]
    assert [attributes(chunk)["penstock.tokens"] for chunk in chunks] == [2, 1]
    ledger = account["choices"][0]["engine"]
    took = engine.end_time_unix_nano - engine.start_time_unix_nano
    assert took == pytest.approx(ledger["total"] * 1e9, abs=1000)
    assert outer.start_time_unix_nano <= engine.start_time_unix_nano
    assert engine.end_time_unix_nano <= outer.end_time_unix_nano


def test_a_stream_tells_its_settings_and_its_first_chunk(traced: Gateway, collector: Collector) -> None:
    trace_id = bytes([3] * 16)
    settings = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["never"], "max_tokens": 3, "stream": True}
    with traced.http() as http:
        response = http.post(CHAT, json=HI | settings, headers={"traceparent": f"00-{trace_id.hex()}-{'01' * 8}-01"})
        account = http.get(f"/v1/requests/{response.headers['x-request-id']}").json()
    (outer,) = collector.trace(trace_id)[f"chat {MODEL}"]
    said = {name.removeprefix("gen_ai."): value for name, value in attributes(outer).items()}
    asked = {name.removeprefix("request."): value for name, value in said.items() if name.startswith("request.")}
    assert asked == {
        "model": MODEL,
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop_sequences": ["never"],
        "max_tokens": 3,
    }
    assert said["response.time_to_first_chunk"] == pytest.approx(account["ttft"])


def test_failures_are_marked_and_unsampled_traces_stay_out(
    traced: Gateway, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.gateway")
    traced.runs(lambda request: [EngineFailure("out of luck")])
    silent, loud = bytes([1] * 16), bytes([2] * 16)
    with traced.http() as http:
        http.post(CHAT, json=HI, headers={"traceparent": f"00-{silent.hex()}-{'01' * 8}-00"})
        http.post(CHAT, json=HI, headers={"traceparent": f"00-{loud.hex()}-{'01' * 8}-01"})
        http.post(CHAT, json=HI, headers={"traceparent": "junk"})
    spans = collector.trace(loud)
    (outer,) = spans[f"chat {MODEL}"]
    assert (outer.status.code, outer.status.message) == (2, "out of luck")
    assert attributes(outer)["error.type"] == "server_error"
    assert "engine" not in spans
    assert not any(span.trace_id == silent for span in collector.spans)
    assert f" trace_id={loud.hex()}" in caplog.text
    assert silent.hex() not in caplog.text


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartupError, match=r"penstock\[otel\]"):
        start_tracing("http://127.0.0.1:4318")


def test_standard_environment_turns_tracing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert start_tracing(None) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    tracing = start_tracing(None)
    assert tracing is not None
    tracing.close()
