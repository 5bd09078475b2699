"""Objectives, deadlines and fairness through HTTP, worker and the real model. Order and outcomes, not times."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from tests.conftest import Server, start_server

MODEL = "smollm2-135m"
SETTINGS = """
state: sqlite:///{state}
engine: {{max_seqs: 4, kv_memory_gib: 0.3}}
classes:
  hopeless: {{ttft_ms: 0.5}}
  patient: {{ttft_ms: 60000, itl_ms: 2000}}
  standard: {{}}
tenants:
  loud: {{}}
  modest: {{}}
cache: {{enabled: false}}
"""


@dataclass
class Promising:
    server: Server
    keys: dict[str, str]

    def client(self, tenant: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.server.base_url, api_key=self.keys[tenant], max_retries=0, timeout=250)


@pytest.fixture(scope="module")
def promising(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Promising]:
    folder = tmp_path_factory.mktemp("promising")
    config = folder / "settings.yaml"
    state = folder / "state.sqlite"
    config.write_text(SETTINGS.format(state=state))
    keys = {tenant: _create_key(config, tenant) for tenant in ("loud", "modest")}
    server = start_server("--config", str(config), "--state", f"sqlite:///{state}")
    yield Promising(server, keys)
    server.process.terminate()
    assert server.process.wait(60) == 0, "".join(server.log)


def _create_key(config: Path, tenant: str) -> str:
    command = [sys.executable, "-m", "penstock.cli.main", "keys", "create", tenant, "--config", str(config)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class FirstTokens(list[str]):
    """Whose first tokens came, in order."""

    def __init__(self) -> None:
        self.any = asyncio.Event()

    def came(self, name: str) -> None:
        self.append(name)
        self.any.set()


async def stream(client: openai.AsyncOpenAI, prompt: str, tokens: int, first: FirstTokens, name: str) -> None:
    chunks = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, stream=True, temperature=0, extra_body={"ignore_eos": True}
    )
    seen = False
    async for _ in chunks:
        if not seen:
            first.came(name)
            seen = True


async def test_a_flood_of_one_tenant_does_not_delay_another(promising: Promising) -> None:
    """Thirty requests wait for four rows when the other tenant's arrives: it is among the next to be answered."""
    first = FirstTokens()
    async with promising.client("loud") as loud, promising.client("modest") as modest, asyncio.TaskGroup() as flood:
        for number in range(30):
            flood.create_task(stream(loud, f"Story {number}. Once", 48, first, "loud"))
        await first.any.wait()
        await stream(modest, "A question: why", 8, first, "modest")
        answered_before = first.index("modest")
    assert len(first) == 31
    assert answered_before <= 12


async def test_what_cannot_be_kept_is_refused_and_what_can_is_kept(promising: Promising) -> None:
    """After the flood above the engine knows its own speed: half a millisecond to a first token is beyond it."""
    async with promising.client("modest") as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(
                model=MODEL, prompt="word " * 300, max_tokens=4, extra_body={"service_tier": "hopeless"}
            )
        answer = await client.completions.create(
            model=MODEL, prompt="word " * 300, max_tokens=4, extra_body={"service_tier": "patient"}
        )
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert "first token would come after" in str(refused.value)
    assert answer.model_extra is not None
    assert answer.model_extra["service_tier"] == "patient"


async def test_past_its_deadline_a_request_ends(promising: Promising) -> None:
    async with promising.client("modest") as client:
        with pytest.raises(openai.APIStatusError) as ended:
            await client.completions.create(
                model=MODEL,
                prompt="Tell me everything",
                max_tokens=4000,
                extra_body={"deadline_ms": 400, "ignore_eos": True},
            )
    assert ended.value.status_code == 504
    assert ended.value.code == "deadline_exceeded"
