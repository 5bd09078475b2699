"""A fleet that is resized and replaced while it serves: no request notices."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from tests.conftest import Server, start_server

SETTINGS = """
models:
  small: {{model: smollm2-135m, replicas: 2, aliases: [tiny], engine: {{kv_memory_gib: 0.2}}}}
tenants: {{user: {{}}}}
cache: {{enabled: false}}
state: sqlite:///{state}
"""


@dataclass
class Running:
    server: Server
    admin: str
    user: str

    def fleet(self, *arguments: str) -> list[list[str]]:
        """The rows that `penstock fleet` prints."""
        command = [sys.executable, "-m", "penstock.cli.main", "fleet", *arguments, "--url", self.server.url]
        done = subprocess.run(
            [*command, "--api-key", self.admin],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        return [line.split() for line in done.stdout.splitlines()[1:]]


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
    command = [sys.executable, "-m", "penstock.cli.main", "keys", "create", *who, "--config", str(config)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


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
