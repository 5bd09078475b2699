"""Clients that leave, servers that stop, health and metrics."""

from __future__ import annotations

import gc
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock import __version__
from penstock.core.errors import StartupError
from penstock.core.machine import open_files
from penstock.gateway.api.context import Context
from penstock.gateway.api.generation import Generation
from penstock.gateway.api.models import ServedModel
from penstock.gateway.app import create_app
from penstock.gateway.http import server as http_server
from penstock.gateway.http.listener import bind
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.http.server import serve
from penstock.gateway.tenancy.limits import Reservation
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MAX_MODEL_LEN, MODEL, hang
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving
from tests.gateway.wire import CHAT as RAW_CHAT
from tests.gateway.wire import GET_HEALTH, Wire, chat

HI: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_ends_its_requests_in_the_engine(gateway: Gateway, stream: bool, n: int) -> None:
    started = threading.Semaphore(0)

    async def tell() -> None:
        started.release()

    gateway.runs(lambda request: [[100], tell, hang])
    content = json.dumps({"model": MODEL, "messages": HI, "stream": stream, "n": n}).encode()
    with socket.create_connection((gateway.host, gateway.port), timeout=20) as connection:
        connection.sendall(RAW_CHAT + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        for _ in range(n):
            assert started.acquire(timeout=20)
        assert not any(ended.is_set() for ended in gateway.engine.ended.values())
    assert len(gateway.engine.ended) == n
    assert all(ended.wait(20) for ended in gateway.engine.ended.values())


def test_closing_an_openai_stream_ends_it_in_the_engine(gateway: Gateway) -> None:
    gateway.runs(lambda request: [[100], hang])
    stream = gateway.client().chat.completions.create(model=MODEL, messages=HI, stream=True)
    next(iter(stream))
    stream.close()
    (ended,) = gateway.engine.ended.values()
    assert ended.wait(20)


def test_finished_requests_leave_nothing_for_the_garbage_collector(gateway: Gateway) -> None:
    """Its pauses would hold up every stream. The last request may not have ended yet when its answer arrives."""
    gateway.answers("fine")
    gc.collect()
    gc.disable()
    try:
        with gateway.http() as http:
            for stream in (False, True) * 5:
                http.post(CHAT, json={"model": MODEL, "messages": HI, "stream": stream}).raise_for_status()
                assert http.post(CHAT, json={"model": "unknown", "messages": HI, "stream": stream}).status_code == 404
            http.get("/health")
        left = Counter(type(thing) for thing in gc.get_objects())
        for kind in (Request, Response, Reservation, Generation, Context):
            assert left[kind] <= 1, kind
    finally:
        gc.enable()


def test_ready_is_when_a_request_would_be_taken(gateway: Gateway) -> None:
    with gateway.http() as http:
        assert http.get("/ready").json() == {"status": "ok", "detail": "idle"}
        gateway.engine.stats = replace(gateway.engine.stats, waiting=4096)
        full = http.get("/ready")
        assert (full.status_code, full.json()["status"], http.get("/health").status_code) == (503, "overloaded", 200)
        gateway.engine.healthy = False
        assert (http.get("/ready").status_code, http.get("/ready").json()["status"]) == (503, "unhealthy")
        assert http.get("/version").json() == {"version": __version__}


def test_health(gateway: Gateway) -> None:
    with gateway.http() as http:
        assert http.get("/health").json() == {"status": "ok", "detail": "idle"}
        gateway.engine.healthy = False
        response = http.get("/health")
    assert (response.status_code, response.json()["detail"]) == (503, "no step for 60 s")


def test_models(gateway: Gateway) -> None:
    client = gateway.client()
    assert [model.id for model in client.models.list()] == [MODEL, "org/alias"]
    assert client.models.retrieve("org/alias").id == "org/alias"
    answer = client.chat.completions.create(model="org/alias", messages=HI)
    assert answer.model == "org/alias"


def test_tokenize_and_detokenize_are_inverse(gateway: Gateway) -> None:
    with gateway.http() as http:
        tokens = http.post("/tokenize", json={"messages": HI}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert http.post("/tokenize", json={"prompt": text}).json()["tokens"] == tokens
    gateway.client().chat.completions.create(model=MODEL, messages=HI)
    assert list(gateway.engine.requests[0].prompt) == tokens


def test_metrics(gateway: Gateway) -> None:
    client = gateway.client()
    usage = client.chat.completions.create(model=MODEL, messages=HI, n=2).usage
    assert usage is not None
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[])
    with gateway.http() as http:
        http.get("/no/such/path")
        response = http.get("/metrics")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert samples["penstock_requests_total", CHAT, "200"] == samples["penstock_requests_total", CHAT, "400"] == 1
    assert samples["penstock_requests_total", "other", "404"] == 1
    assert samples["penstock_prompt_tokens_total", MODEL] == usage.prompt_tokens
    assert samples["penstock_output_tokens_total", MODEL] == usage.completion_tokens
    assert samples["penstock_cached_tokens_total", MODEL] == 2
    assert samples["penstock_time_to_first_token_seconds_count", MODEL] == 2
    assert samples["penstock_inter_token_seconds_count", MODEL] == usage.completion_tokens - 2
    assert samples["penstock_request_seconds_count", MODEL] == 1
    assert samples["penstock_queue_seconds_bucket", "0.0025", MODEL] == 0
    assert [samples["penstock_queue_seconds_bucket", le, MODEL] for le in ("0.005", "+Inf")] == [2, 2]
    assert samples["penstock_queue_seconds_sum", MODEL] == pytest.approx(0.008)
    assert samples["penstock_running_sequences", MODEL] == 3
    assert samples["penstock_kv_utilisation", MODEL] == 0.25
    assert samples["penstock_engine_preemptions_total", MODEL] == 1
    assert samples["penstock_requests_in_flight",] == 1, "the scrape itself"


def test_few_file_descriptors_are_warned_of_but_not_at_every_look(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = threading.Semaphore(0)

    def limit() -> int:
        looks.release()
        return open_files() + 1

    monkeypatch.setattr(http_server, "SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(http_server, "file_limit", limit)
    with caplog.at_level(logging.WARNING, "penstock.gateway"), serving(tokenizer):
        for _ in range(3):
            assert looks.acquire(timeout=20)
    assert sum("few file descriptors are left" in record.getMessage() for record in caplog.records) == 1


def test_the_log_says_what_the_client_is_told(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    long = "x " * 2 * MAX_MODEL_LEN
    with caplog.at_level(logging.INFO, "penstock.gateway"), gateway.http() as http:
        told = http.post("/v1/responses", json={"model": MODEL, "input": long}).json()["error"]["message"]
        asked = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": long}]}
        also = http.post("/v1/messages", json=asked).json()["error"]["message"]
    assert " tokens in input, " in told
    assert also.startswith("prompt is too long: ")
    first, second = [record.getMessage() for record in caplog.records if "status=400" in record.getMessage()]
    assert told in first
    assert also in second


def test_access_log_is_one_line_whatever_the_path(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.gateway"), gateway.http() as http:
        http.get("/a%0Ab%20status=200", headers={"x-request-id": "me"})
        http.get("/")
        http.get("/health")
    lines = [record.getMessage() for record in caplog.records if record.name == "penstock.gateway"]
    assert len(lines) == 2
    assert lines[0].startswith(r"request method=GET path='/a\nb status=200' status=404 ms=")
    assert lines[0].endswith(r" request_id=me why='unknown path: GET /a\nb status=200'")


@contextmanager
def server_process(drain_seconds: float, *before: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [*before, sys.executable, "-m", "tests.gateway.scripted_server", str(drain_seconds)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def wait_until_draining(url: str) -> None:
    with httpx.Client(base_url=url, timeout=20) as http:
        while http.get("/health").json()["status"] != "draining":
            pass
        assert http.get("/ready").status_code == 503


STREAM = {"model": MODEL, "messages": HI, "stream": True, "max_tokens": 3}


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]])
def test_signals_let_streams_finish_and_refuse_new_requests(signals: list[signal.Signals]) -> None:
    with (
        server_process(drain_seconds=60) as (process, url),
        httpx.stream("POST", url + CHAT, json=STREAM, timeout=20) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        for sig in signals:
            process.send_signal(sig)
            wait_until_draining(url)
        refused = httpx.post(url + CHAT, json=STREAM, timeout=20)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert process.stdin is not None
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert "data: [DONE]" in list(lines)
        assert process.wait(20) == 0


def test_while_a_server_drains_its_answers_end_their_connections() -> None:
    """Clients that keep their connections would send it every request until it ends, and no other server any."""
    with server_process(drain_seconds=60) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with (
            socket.create_connection((host, int(port)), timeout=20) as idle,
            socket.create_connection((host, int(port)), timeout=20) as busy,
        ):
            kept, in_flight = Wire(idle), Wire(busy)
            kept.send(GET_HEALTH)
            assert "connection" not in kept.response()[1]
            in_flight.send(chat())
            while "penstock_requests_in_flight 2.0" not in httpx.get(f"{url}/metrics").text:  # and this one
                pass
            process.send_signal(signal.SIGTERM)
            wait_until_draining(url)
            kept.send(chat())
            status, headers, _ = kept.response()
            assert (status, headers["connection"]) == (503, "close")
            assert kept.is_closed()
            assert process.stdin is not None
            process.stdin.write("go on\n")
            process.stdin.flush()
            status, headers, _ = in_flight.response()
            assert (status, headers["connection"]) == (200, "close")
            assert in_flight.is_closed()
            assert process.wait(20) == 0


def test_nohup_keeps_a_server_from_draining_with_its_terminal() -> None:
    with server_process(60, "nohup") as (process, url):
        process.send_signal(signal.SIGHUP)
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_streams_that_outlast_the_drain_end_with_an_error() -> None:
    with (
        server_process(drain_seconds=0) as (process, url),
        httpx.stream("POST", url + CHAT, json=STREAM, timeout=20) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutdown"
        assert process.wait(20) == 0


def test_second_signal_exits_at_once() -> None:
    with (
        server_process(drain_seconds=60) as (process, url),
        httpx.stream("POST", url + CHAT, json=STREAM, timeout=20) as response,
    ):
        lines = response.iter_lines()  # held: dropping it would close the connection
        next(lines)
        process.send_signal(signal.SIGINT)
        wait_until_draining(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


def test_port_in_use_is_a_clear_error(gateway: Gateway) -> None:
    with pytest.raises(StartupError, match=f"cannot listen on {gateway.host}:{gateway.port}: Address already in use"):
        bind(gateway.host, gateway.port)


async def test_two_that_take_an_address_at_once_do_not_share_it(gateway: Gateway) -> None:
    """An address may be bound twice before anybody listens."""
    app = create_app([ServedModel([MODEL], gateway.tokenizer, gateway.engine)], Settings())
    first = bind(gateway.host, 0)
    second = bind(*first.getsockname())
    with first:
        first.listen()
        with pytest.raises(StartupError, match="cannot listen on"):
            await serve(app, second, lambda host, port: None, 0.0)
