"""`penstock serve` with the built-in sentence encoder: what clients get, and what they do not notice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from penstock.cache.encoder import SentenceEncoder, encoder_folder
from penstock.checkpoint.source import BUILT_IN_ENCODER
from penstock.core.machine import usable_cpus
from penstock.kernels.native import bindings
from tests.conftest import Server, start_server
from tests.models.tiny_encoders import cosines

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))

BOOK = Path(__file__).parents[1] / "data" / "moby-dick.txt"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Sentences and parts of sentences, from a few tokens to two hundred."""
    words = BOOK.read_text().split()
    starts = range(0, 2400, 150)
    return [" ".join(words[start : start + 3 + start // 20]) for start in starts]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start_server(BUILT_IN_ENCODER)
    yield running
    running.stop()


def worker_of(server: Server) -> int:
    tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    (worker,) = [pid for pid in children if b"penstock.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return worker


def test_int8_is_near_float32_and_outlives_its_worker(server: Server, texts: list[str]) -> None:
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=120)

    async def all_at_once() -> list[list[float]]:
        parts = [texts[start : start + 2] for start in range(0, len(texts), 2)]
        asked = [asyncio.create_task(client.embeddings.create(model=BUILT_IN_ENCODER, input=part)) for part in parts]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        os.kill(worker_of(server), signal.SIGKILL)
        return [item.embedding for answer in await asyncio.gather(*asked) for item in answer.data]

    found = np.array(asyncio.run(all_at_once()), np.float32)
    exact = SentenceEncoder(encoder_folder(None))
    expected = np.stack([vector for text in texts if (vector := exact.encode(text)) is not None])
    assert cosines(found, expected).min() > 0.995


def test_a_profile_says_what_computes_it(server: Server) -> None:
    taken = httpx.post(f"{server.url}/admin/profile", params={"seconds": 0.1}, timeout=60).json()
    (replica,) = taken["summary"]["replicas"]
    assert replica["device"] == f"CPU, {usable_cpus()} threads, {bindings.isa()}, int8 weights"
