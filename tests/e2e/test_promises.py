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
    """One that has run for a while and knows its own speed."""
    folder = tmp_path_factory.mktemp("promising")
    config = folder / "settings.yaml"
    state = folder / "state.sqlite"
    config.write_text(SETTINGS.format(state=state))
    keys = {tenant: _create_key(config, tenant) for tenant in ("loud", "modest")}
    server = start_server("--config", str(config), "--state", f"sqlite:///{state}")
    with openai.OpenAI(base_url=server.base_url, api_key=keys["loud"], max_retries=0, timeout=250) as client:
        for number in range(20):  # a step each, of prompts of different lengths
            client.completions.create(model=MODEL, prompt=f"{number} " + "word " * 10 * number, max_tokens=1)
    yield Promising(server, keys)
    server.stop()


def _create_key(config: Path, tenant: str) -> str:
    command = [sys.executable, "-m", "penstock.cli.main", "keys", "create", tenant, "--config", str(config)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class Answered:
    """When, by the engine's clock: how long the news took to come here is nobody's promise."""

    arrived: float
    first_token: float


async def ask(client: openai.AsyncOpenAI, prompt: str, tokens: int) -> Answered:
    answer = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
        extra_headers={"x-penstock-ledger": "true"},
    )
    assert answer.usage is not None
    assert answer.usage.model_extra is not None
    ledger = answer.usage.model_extra["ledger"]["choices"][0]["engine"]
    assert ledger["output_tokens"] == tokens
    return Answered(ledger["arrived"], ledger["arrived"] + ledger["ttft"])


async def test_a_flood_of_one_tenant_does_not_delay_another(promising: Promising) -> None:
    """Thirty requests at a time want four rows when the other tenant's arrives: it is among the next to be answered."""
    others: list[Answered] = []
    any_answered, answered = asyncio.Event(), asyncio.Event()

    async def keep_asking(number: int) -> None:
        while not answered.is_set():
            others.append(await ask(loud, f"Story {number}, {len(others)}. Once", 48))
            any_answered.set()

    async with promising.client("loud") as loud, promising.client("modest") as modest, asyncio.TaskGroup() as flood:
        for number in range(30):
            flood.create_task(keep_asking(number))
        await any_answered.wait()
        asked = await ask(modest, "A question: why", 8)
        answered.set()
    overtaking = [other for other in others if asked.arrived < other.first_token < asked.first_token]
    assert len(overtaking) <= 8


async def test_what_cannot_be_kept_is_refused_and_what_can_is_kept(promising: Promising) -> None:
    """Half a millisecond to a first token is beyond it."""
    async with promising.client("modest") as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(
                model=MODEL, prompt="word " * 300, max_tokens=4, extra_body={"service_tier": "hopeless"}
            )
        answer = await client.completions.create(
            model=MODEL, prompt="word " * 300, max_tokens=4, extra_body={"service_tier": "patient"}
        )
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert "first token is forecast after" in str(refused.value)
    assert answer.model_extra is not None
    assert answer.model_extra["service_tier"] == "patient"


async def test_past_its_deadline_a_request_ends(promising: Promising) -> None:
    """Of 1.5 s: less than 4,000 tokens take on any CPU, and more than an idle engine expects the first one to take."""
    async with promising.client("modest") as client:
        with pytest.raises(openai.APIStatusError) as ended:
            await client.completions.create(
                model=MODEL,
                prompt="Tell me everything",
                max_tokens=4000,
                extra_body={"deadline_ms": 1500, "ignore_eos": True},
            )
    assert ended.value.status_code == 504
    assert ended.value.code == "deadline_exceeded"
