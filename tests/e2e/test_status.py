"""`penstock status` of a real server: what runs where, how loaded it is, and which objectives were met."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.conftest import Server, start_server

SETTINGS = """
models:
  small: {{model: smollm2-135m, replicas: 2, engine: {{kv_memory_gib: 0.2}}}}
classes:
  patient: {{ttft_ms: 100000, itl_ms: 100000}}
  hasty: {{ttft_ms: 0.001}}
default_class: patient
tenants: {{user: {{}}}}
cache: {{enabled: false}}
state: sqlite:///{state}
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", *arguments]


@dataclass
class Running:
    server: Server
    admin: str
    user: str

    def status(self, *arguments: str) -> str:
        asked = command("status", "--url", self.server.url, "--api-key", self.admin, *arguments)
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout

    def generate(self, tokens: int) -> None:
        body = {"model": "small", "prompt": "Rain falls", "max_tokens": tokens, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self.user}"}
        httpx.post(f"{self.server.base_url}/completions", json=body, headers=headers, timeout=100).raise_for_status()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("status")
    config = folder / "settings.yaml"
    config.write_text(SETTINGS.format(state=folder / "state.sqlite"))
    keys = [
        subprocess.run(
            command("keys", "create", *who, "--config", str(config)), check=True, capture_output=True, text=True
        ).stdout.strip()
        for who in (["--admin"], ["user"])
    ]
    server = start_server("--config", str(config), "--state", f"sqlite:///{folder / 'state.sqlite'}")
    yield Running(server, *keys)
    server.stop()


def test_the_fleet_and_its_objectives(running: Running) -> None:
    running.generate(3)
    shown = running.status()
    assert "\x1b" not in shown, "no colour in a pipe"
    headline, columns, *rows = shown.splitlines()
    assert headline.startswith("small: ")
    assert "of 2 ready, 0 running, 0 waiting, 0 tok/s" in headline
    assert columns.split() == "replica model where state for streams running waiting KV tok/s restarts".split()
    assert [row.split()[0] for row in rows[:2]] == ["small-0", "small-1"]
    assert "local process" in rows[0]
    assert "objectives met since the server started" in shown
    classes = {row.split()[0]: row.split()[1:] for row in rows[4:]}
    assert classes["patient"] == ["100000", "ms", "100.0%", "1", "100000", "ms", "100.0%", "1"]
    assert classes["hasty"] == ["0", "ms", "–", "0", "–", "–", "0"]


def test_for_programs(running: Running) -> None:
    """Tokens per second are those of the second for which it looks."""
    stopped = threading.Event()

    def load() -> None:
        while not stopped.is_set():
            running.generate(64)

    asking = threading.Thread(target=load)
    asking.start()
    try:
        (model,) = json.loads(running.status("--json"))["models"]
    finally:
        stopped.set()
        asking.join()
    assert model["model"] == "small"
    assert model["tokens_per_second"] > 0
    assert sum(replica["tokens_per_second"] or 0 for replica in model["replicas"]) == model["tokens_per_second"]
    assert model["classes"]["patient"]["ttft"]["met"] >= 1


def watch(running: Running, *arguments: str, output: int) -> subprocess.Popen[bytes]:
    asked = command("status", "--watch", "--interval", "0.1", "--url", running.server.url, *arguments)
    return subprocess.Popen([*asked, "--api-key", running.admin], stdout=output)


def test_watching_in_a_pipe(running: Running) -> None:
    process = watch(running, "--json", output=subprocess.PIPE)
    assert process.stdout is not None
    seen: list[Any] = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.wait(60) == 0
    assert all(each["models"][0]["model"] == "small" for each in seen)
    assert seen[0]["models"][0]["tokens_per_second"] is None, "one reading gives no rate"
    assert seen[1]["models"][0]["tokens_per_second"] is not None


def test_watching_in_a_terminal(running: Running) -> None:
    """It is shown again in the same place."""
    ours, theirs = pty.openpty()
    process = watch(running, output=theirs)
    os.close(theirs)
    seen = b""
    while seen.count(b"objectives met") < 3:
        seen += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    os.close(ours)
    assert b"\x1b[1A" in seen, "the cursor goes up before it is shown again"


def refusal(*arguments: str) -> str:
    done = subprocess.run(command("status", *arguments), capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_what_is_wrong_is_said(running: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert f"cannot connect to {nobody}" in refusal("--url", nobody)
    assert "Is a server running there?" in refusal("--url", nobody, "--watch")
    assert "penstock keys create --admin" in refusal("--url", running.server.url)
    assert "penstock keys create --admin" in refusal("--url", running.server.url, "--api-key", "psk-1-2")
    assert "use an admin key" in refusal("--url", running.server.url, "--api-key", running.user)
