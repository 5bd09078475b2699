"""Models whose upstreams and workers on other machines are down, beside one that works."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.core.engine import EngineInfo
from penstock.core.errors import StartupError
from penstock.fleet.fleet import Fleet
from penstock.fleet.upstream.launcher import UpstreamLauncher
from penstock.fleet.upstream.settings import UpstreamConfig, UpstreamTimeouts
from penstock.text.tokenizer import Tokenizer
from tests.conftest import Server, start_server
from tests.e2e.test_processes import worker_on_its_own
from tests.fleet.upstream.conftest import tokenizer as tokenizer
from tests.fleet.upstream.scripted_server import StoryServer


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Nobody listens there, and nobody else gets it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def cloud(port: int) -> dict[str, Any]:
    return {"model": "smollm2-135m", "upstreams": [{"url": f"http://127.0.0.1:{port}", "model": "m"}]}


def serve(folder: Path, models: dict[str, Any], processes: int = 1, **settings: Any) -> Server:
    file = folder / "penstock.yaml"
    engine = {"kv_memory_gib": 0.1, "max_model_len": 1024}
    file.write_text(json.dumps({"models": models, "engine": engine, "server": {"processes": processes}, **settings}))
    return start_server("--config", str(file))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_others_are_served(tmp_path: Path, closed_port: int, processes: int) -> None:
    cascade = {"small": "cloud", "large": "good", "min_logprob": None}
    models = {"good": {"model": "smollm2-135m"}, "cloud": cloud(closed_port), "edge": {"cascade": cascade}}
    server = serve(tmp_path, models, processes, failover={"wait_seconds": 3600})
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for path in ("/health", "/ready"):
                answer = http.get(path)
                assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
                assert "cloud: no replica is running" in answer.json()["detail"]
            assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["good", "cloud", "edge"]
            asked = {"prompt": "Once", "max_tokens": 2}
            assert http.post("/v1/completions", json={"model": "good", **asked}).status_code == 200
            stood_in = http.post("/v1/completions", json={"model": "edge", **asked})
            assert (stood_in.status_code, stood_in.headers["x-penstock-model"]) == (200, "good")
            late = http.post("/v1/completions", json={"model": "cloud", "deadline_ms": 300, **asked})
            assert (late.status_code, "no replica was running" in late.text) == (504, True)
    finally:
        server.stop()
    assert f"serving without cloud: http://127.0.0.1:{closed_port}: " in "".join(server.log)


def far(port: int) -> dict[str, Any]:
    return {"model": "smollm2-135m", "workers": [f"tcp://127.0.0.1:{port}"]}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_worker_elsewhere_is_joined_when_it_comes(
    tmp_path: Path, closed_port: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_WORKER_SECRET", "correct-horse")
    models = {"good": {"model": "smollm2-135m"}, "far": far(closed_port)}
    server = serve(tmp_path, models, processes, failover={"wait_seconds": 3600})
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            answer = http.get("/health")
            assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
            assert "far: no replica is running" in answer.json()["detail"]
            asked = {"prompt": "Once", "max_tokens": 2}
            assert http.post("/v1/completions", json={"model": "good", **asked}).status_code == 200
            with worker_on_its_own("correct-horse", closed_port):
                answer = http.post("/v1/completions", json={"model": "far", **asked})
                assert (answer.status_code, answer.headers["x-penstock-replica"]) == (200, "far-0")
    finally:
        server.stop()
    assert f"serving without far: no worker answers at tcp://127.0.0.1:{closed_port}: " in "".join(server.log)


@pytest.mark.parametrize("processes", [1, 2])
def test_no_model_can_start(tmp_path: Path, closed_port: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_WORKER_SECRET", "correct-horse")
    with pytest.raises(AssertionError, match="exit code 1") as caught:
        serve(tmp_path, {"cloud": cloud(closed_port), "far": far(closed_port)}, processes)
    said = str(caught.value)
    assert f"no model can start: cloud: http://127.0.0.1:{closed_port}: " in said
    assert f"; far: no worker answers at tcp://127.0.0.1:{closed_port}: " in said
    assert "Traceback" not in said


@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "accepts and says nothing"])
async def test_an_upstream_is_joined_when_it_comes(tokenizer: Tokenizer, closed_port: int, silent: bool) -> None:
    expected = EngineInfo("m", 2048, tokenizer.vocab_size)
    fleet = Fleet("cloud")
    config = UpstreamConfig(f"http://127.0.0.1:{closed_port}", timeouts=UpstreamTimeouts(check=1))
    launcher = UpstreamLauncher(config, tokenizer)
    try:
        with socket.create_server(("127.0.0.1", closed_port)) if silent else nullcontext():
            async with asyncio.timeout(30):
                said = await fleet.start([launcher], expected=expected)
        assert said.startswith("cloud: http://")
        assert ("/v1/models was not answered within 1 s" in said) == silent
        assert (fleet.info, fleet.health().ok) == (expected, False)
        with StoryServer().running(closed_port):
            await fleet.until_ready()
            assert (fleet.info.max_model_len, fleet.health().ok) == (512, True)
    finally:
        await fleet.stop()
    with pytest.raises(StartupError, match="cloud: "):
        await Fleet("cloud").start([launcher])
