"""A fleet as its administrator sees it, resized and replaced while it serves: no request notices."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Server, start_server
from tests.prometheus_server import wait_for

SETTINGS = """
models:
  small: {{model: smollm2-135m, replicas: 2, aliases: [tiny], engine: {{kv_memory_gib: 0.2}}}}
classes:
  patient: {{ttft_ms: 100000, itl_ms: 100000}}
  hasty: {{ttft_ms: 0.001}}
default_class: patient
tenants: {{user: {{}}}}
cache: {{enabled: false}}
machine_per_hour: 2.5
state: sqlite:///{state}
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", *arguments]


@dataclass
class Running:
    server: Server
    admin: str
    user: str

    def fleet(self, *arguments: str) -> list[list[str]]:
        """The rows that `penstock fleet` prints."""
        asked = command("fleet", *arguments, "--url", self.server.url, "--api-key", self.admin)
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
        return [line.split() for line in done.stdout.splitlines()[1:]]

    def status(self, *arguments: str) -> str:
        asked = command("status", *arguments, "--url", self.server.url, "--api-key", self.admin)
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout

    def generate(self, tokens: int) -> None:
        body = {"model": "small", "prompt": "Rain falls", "max_tokens": tokens, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self.user}"}
        httpx.post(f"{self.server.base_url}/completions", json=body, headers=headers, timeout=100).raise_for_status()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("fleet")
    config = folder / "settings.yaml"
    config.write_text(SETTINGS.format(state=folder / "state.sqlite"))
    admin, user = (_key(config, *who) for who in (["--admin"], ["user"]))
    server = start_server("--config", str(config), "--state", f"sqlite:///{folder / 'state.sqlite'}")
    yield Running(server, admin, user)
    server.stop()


def _key(config: Path, *who: str) -> str:
    asked = command("keys", "create", *who, "--config", str(config))
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def test_the_fleet_and_its_objectives(running: Running) -> None:
    running.generate(3)
    shown = running.status()
    assert "\x1b" not in shown, "no colour in a pipe"
    headline, columns, *rows = shown.splitlines()
    assert headline.startswith("small: ")
    assert "of 2 ready, 0 running, 0 waiting, 0 tok/s" in headline
    assert columns.split()[-5:] == ["running", "waiting", "KV", "tok/s", "restarts"]
    assert "local process" in rows[0]
    assert "objectives met since the server started" in shown
    assert rows[-1] == "the machine costs 2.50 per hour"
    classes = {row.split()[0]: row.split()[1:] for row in rows[4:] if row}
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
    # Under a shell that runs the tests in the background SIGINT is ignored, and children inherit that.
    reset = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([*asked, "--api-key", running.admin], stdout=output, preexec_fn=reset)


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


def test_a_request_that_both_replicas_refuse_is_one_refusal(running: Running) -> None:
    """For clients, and for the alert on them; the counter of the engines has both."""

    def counted() -> dict[str, float]:
        text = httpx.get(f"{running.server.url}/metrics", headers={"Authorization": f"Bearer {running.admin}"}).text
        found: defaultdict[str, float] = defaultdict(float)
        for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
            found[sample.name] += sample.value if sample.labels.get("model") == "small" else 0.0
        return found

    wait_for(lambda: counted()["penstock_replica_up"] == 2 or None, "both replicas serve")
    names = ("penstock_refused_total", "penstock_engine_refused_total", "penstock_request_seconds_count")
    before = counted()
    headers = {"Authorization": f"Bearer {running.user}", "X-Penstock-Class": "hasty"}
    body = {"model": "small", "prompt": "Rain falls", "max_tokens": 3}
    refused = httpx.post(f"{running.server.base_url}/completions", json=body, headers=headers, timeout=100)
    assert refused.status_code == httpx.codes.TOO_MANY_REQUESTS
    expected = [before[name] + gain for name, gain in zip(names, (1, 2, 0), strict=True)]
    wait_for(lambda: [counted()[name] for name in names] == expected or None, f"{names} are {expected}")


async def test_a_model_is_replaced_under_load(running: Running) -> None:
    """Streams run all the time, each begun as soon as another one ends, while every replica gives way to a new one."""
    replaced = asyncio.Event()
    answers: dict[int, set[str]] = {}

    async def keep_asking(client: openai.AsyncOpenAI, number: int) -> None:
        while not replaced.is_set():
            answer = await client.completions.create(
                model="tiny", prompt=f"Number {number} is", max_tokens=40, seed=number, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 40
            answers.setdefault(number, set()).add(answer.choices[0].text)

    async def replace() -> None:
        try:
            before = {row[0] for row in await asyncio.to_thread(running.fleet, "list")}
            after = {row[0] for row in await asyncio.to_thread(running.fleet, "replace", "small", "smollm2-135m")}
            assert len(before) == len(after) == 2
            assert not before & after
        finally:
            replaced.set()

    async with (
        openai.AsyncOpenAI(
            base_url=running.server.base_url, api_key=running.user, max_retries=0, timeout=100
        ) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(8):
            tasks.create_task(keep_asking(client, number))
        tasks.create_task(replace())
    assert set(answers) == set(range(8))
    assert all(len(texts) == 1 for texts in answers.values()), "the same weights give the same text on every replica"


def test_replicas_are_added_and_drained(running: Running) -> None:
    (added,) = running.fleet("add", "small")
    assert added[1] == "small"
    name = added[0]
    while not any(row[0] == name and "ready" in row for row in running.fleet("list")):
        assert running.server.process.poll() is None
    running.fleet("drain", name)
    while any(row[0] == name for row in running.fleet("list")):
        assert running.server.process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("drain", "nobody"), "no replica 'nobody'"),
        (("add", "nothing"), "no model 'nothing'"),
        (("replace", "small", "/no/such/folder"), "does not start"),
    ],
)
def test_what_cannot_be_done_is_said(running: Running, arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        running.fleet(*arguments)
    assert reason in failed.value.stderr
