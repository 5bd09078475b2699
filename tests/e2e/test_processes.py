"""Several gateway processes over the same workers, and a worker that is started on its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.fleet.gateways import DEAD_AFTER_HEARTBEATS, HEARTBEAT_SECONDS
from tests.conftest import Server, start_server, start_with_admin
from tests.e2e.test_server import MODEL, is_alive
from tests.prometheus_server import openmetrics_families, wait_for

SETTINGS = """
server: {processes: 2, open: true, log_format: json}
engine: {kv_memory_gib: 0.2}
tenant_defaults: {requests_per_minute: 30}
cache: {enabled: false}
"""


def gateway_processes(server: Server) -> list[int]:
    listing = subprocess.run(
        ["pgrep", "-P", str(server.process.pid), "-f", "gateway_process"], capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in listing.stdout.split()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("processes") / "settings.yaml"
    config.write_text(SETTINGS)
    running = start_server("--config", str(config))
    yield running
    running.stop()


def test_metrics_of_all_processes_are_valid_openmetrics(server: Server) -> None:
    answer = httpx.get(f"{server.url}/metrics", headers={"accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert "penstock_requests" in {family.name for family in openmetrics_families(answer.text)}


def test_every_process_logs_json(server: Server) -> None:
    """The gateway processes their requests, the worker its start, the launching process what it watches over."""
    answer = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "logged"})
    assert answer.status_code == 200
    wait_for(lambda: any('"request_id":"logged"' in line for line in server.log) or None, "the line of a request")
    events = [json.loads(line) for line in server.log]
    assert [event["models"] for event in events if event["message"] == "serving"] == [MODEL]
    assert {"penstock.gateway", "penstock.worker.main"} <= {event["logger"] for event in events}
    (request,) = [event for event in events if event.get("request_id") == "logged"]
    assert request["message"] == "request"
    assert (request["level"], request["status"], request["path"]) == ("info", 200, "/v1/models")


async def stream(server: Server, number: int, tokens: int) -> tuple[str, int]:
    """Over a connection of its own, so that it may be either process."""
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", timeout=100, max_retries=0) as client:
        chunks = await client.completions.create(
            model=MODEL,
            prompt=f"Number {number} is",
            max_tokens=tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text, count = "", 0
        async for chunk in chunks:
            text += chunk.choices[0].text if chunk.choices else ""
            count = chunk.usage.completion_tokens if chunk.usage else count
        return text, count


async def test_limits_metrics_and_accounts_are_of_all_processes(server: Server) -> None:
    async def ask(number: int) -> int:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as http:
            body = {"model": MODEL, "prompt": f"{number}", "max_tokens": 1}
            response = await http.post("/completions", json=body, headers={"x-request-id": f"mine-{number}"})
            return response.status_code

    statuses = await asyncio.gather(*(ask(number) for number in range(40)))
    assert (statuses.count(200), statuses.count(429)) == (30, 10)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        text = (await http.get("/metrics")).text
    counted = dict(re.findall(r'^penstock_requests_total{endpoint="/v1/completions",status="(\d+)"} (\d+)', text, re.M))
    assert counted == {"200": "30", "429": "10"}
    answered = [number for number, status in enumerate(statuses) if status == 200]
    for number in answered[:6]:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as http:
            account = (await http.get(f"/requests/mine-{number}")).json()
            assert account["output_tokens"] == 1


def test_background_streams_are_read_at_any_process() -> None:
    server = start_server("--processes", "2", "--kv-memory-gib", "0.2")
    try:
        client: Any = openai.OpenAI(base_url=server.base_url, api_key="none", timeout=60)
        asked = {"model": MODEL, "input": "Count.", "max_output_tokens": 200, "background": True, "stream": True}
        with client.responses.create(**asked, extra_body={"seed": 1}) as stream:
            first = list(itertools.islice(stream, 10))
        id = first[0].response.id

        def rest(_: int) -> list[Any]:  # each on a connection of its own, which the system deals out to either process
            with openai.OpenAI(base_url=server.base_url, api_key="none", timeout=60) as other:
                return list(other.responses.retrieve(id, stream=True, starting_after=9))

        with ThreadPoolExecutor(8) as pool:
            running, ended = list(pool.map(rest, range(8))), list(pool.map(rest, range(8)))
        assert [event.sequence_number for event in running[0]] == list(range(10, 10 + len(running[0])))
        assert running[0][-1].type in ("response.completed", "response.incomplete")
        assert all(found == running[0] for found in running + ended)
        text = "".join(event.delta for event in first + running[0] if event.type == "response.output_text.delta")
        assert text == client.responses.retrieve(id).output_text
    finally:
        server.stop()


async def test_one_gateway_dies_and_the_streams_of_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE__ENABLED", "false")
    monkeypatch.setenv("PENSTOCK_TENANT_DEFAULTS__CONCURRENT", "24")
    server = start_server("--processes", "2", "--kv-memory-gib", "0.2")
    try:
        before = gateway_processes(server)
        assert len(before) == 2
        streams = [asyncio.create_task(stream(server, number, 200)) for number in range(12)]
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            while True:
                text = (await http.get("/metrics")).text
                running = re.search(r"^penstock_running_sequences\S* (\d+)", text, re.M)
                if running is not None and int(running[1]) >= 8:
                    break
        os.kill(before[0], signal.SIGKILL)
        ended = await asyncio.gather(*streams, return_exceptions=True)
        whole = [number for number, one in enumerate(ended) if not isinstance(one, BaseException)]
        assert 0 < len(whole) < 12, "the system deals connections out to both"
        again = await asyncio.gather(*(stream(server, number, 200) for number in whole))
        assert again == [ended[number] for number in whole]
        assert {tokens for _, tokens in again} == {200}
        while len(gateway_processes(server)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            await http.get("/metrics")  # asks every process, so what they have settled is known
        await asyncio.gather(*(stream(server, number, 50) for number in range(24)))  # the dead one holds no places
    finally:
        pids = gateway_processes(server)
        server.stop()
    assert not any(map(is_alive, pids))


def test_a_frozen_gateway_is_replaced_and_a_suspended_machine_is_left_alone(tmp_path: Path) -> None:
    """What gateways have counted outlives them."""
    server, key = start_with_admin(tmp_path, "server: {processes: 2}\nengine: {kv_memory_gib: 0.2}")
    try:
        before = gateway_processes(server)
        suspended = [server.process.pid, *before]
        for pid in suspended:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(DEAD_AFTER_HEARTBEATS * HEARTBEAT_SECONDS + 1)
        for pid in suspended:
            os.kill(pid, signal.SIGCONT)
        for _ in range(30):
            httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=60)
        assert requests_counted(server, key) == 30
        end = os.pidfd_open(before[0])
        os.kill(before[0], signal.SIGSTOP)
        assert select.select([end], [], [], 60)[0], "it was not killed"
        os.close(end)
        wait_for_gateways(server, key, 1)
        assert before[1] in gateway_processes(server)
        assert requests_counted(server, key) == 30
        end = os.pidfd_open(before[1])
        os.kill(before[1], signal.SIGKILL)
        select.select([end], [], [])
        os.close(end)
        wait_for_gateways(server, key, 2)
        assert requests_counted(server, key) == 30
    finally:
        server.stop()
    assert len([line for line in server.log if "was lost: nothing heard from it for 5 s" in line]) == 1


def requests_counted(server: Server, key: str) -> int:
    """Those of the list of models."""
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {key}"}, timeout=60).text
    return int(re.findall(r'^penstock_requests_total{endpoint="/v1/models",status="200"} (\d+)', text, re.M)[0])


def wait_for_gateways(server: Server, key: str, restarts: int) -> None:
    """Until so many have been started again."""
    while True:
        fleet = httpx.get(f"{server.url}/admin/fleet", headers={"Authorization": f"Bearer {key}"}, timeout=60).json()
        states = [each["state"] for each in fleet["gateways"]]
        if states == ["ready", "ready"] and sum(each["restarts"] for each in fleet["gateways"]) == restarts:
            return
        time.sleep(0.05)


def test_what_cannot_start_says_why() -> None:
    """Instead of gateways that wait for ever for their workers."""
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "/no/such/model", "--processes", "2", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "/no/such/model" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def worker_on_its_own(secret: str, port: int = 0) -> Iterator[str]:
    place = ("--listen", f"127.0.0.1:{port}")
    command = [sys.executable, "-m", "penstock.cli.main", "worker", *place, "--kv-memory-gib", "0.2"]
    process = subprocess.Popen(
        command, env={**os.environ, "PENSTOCK_WORKER_SECRET": secret}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    found = re.search(r"tcp://[\d.:]+", process.stdout.readline())
    assert found is not None
    try:
        yield found[0]
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_a_worker_elsewhere_serves_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its address, and found by name."""
    with worker_on_its_own("correct-horse") as address:
        monkeypatch.setenv("PENSTOCK_WORKER_SECRET", "correct-horse")
        config = tmp_path / "settings.yaml"
        name = address.replace("tcp://", "dns://")
        models = {"far": {"model": MODEL, "workers": [address]}, "found": {"model": MODEL, "workers": [name]}}
        config.write_text(json.dumps({"models": models}))
        server = start_server("--config", str(config))
        try:
            with httpx.Client(base_url=server.base_url, timeout=60) as http:
                for model, replica in (("far", "far-0"), ("found", "found-127.0.0.1")):
                    response = http.post("/completions", json={"model": model, "prompt": "Hello", "max_tokens": 3})
                    assert response.json()["usage"]["completion_tokens"] == 3
                    assert response.headers["x-penstock-replica"] == replica
        finally:
            server.stop()
