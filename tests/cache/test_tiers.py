"""Where answers are kept: bounds, restarts, damage, and a Redis that dies."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import redis_tier
from penstock.cache.answer import Answer, decode_answer, encode_answer, seal, unseal
from penstock.cache.disk_tier import DiskTier
from penstock.cache.memory import ENTRY_BYTES, LARGEST_SHARE, MemoryTier
from penstock.cache.redis_tier import PREFIX, RedisTier, connect
from penstock.core.errors import StartupError
from penstock.core.request import TokenLogprob
from tests.redis_server import RedisServer

MIB = 2**20


def key(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=32).digest()


# ---------------------------------------------------------------- what is stored


@given(st.binary(max_size=64), st.data())
def test_a_value_opens_only_whole_and_under_its_own_key(payload: bytes, data: st.DataObject) -> None:
    sealed = seal(key(0), payload)
    assert unseal(key(0), sealed) == payload
    assert unseal(key(1), sealed) is None
    cut = data.draw(st.integers(0, len(sealed) - 1))
    assert unseal(key(0), sealed[:cut]) is None
    position, flip = data.draw(st.integers(0, len(sealed) - 1)), data.draw(st.integers(1, 255))
    assert unseal(key(0), sealed[:position] + bytes([sealed[position] ^ flip]) + sealed[position + 1 :]) is None


@given(st.integers(1, 80), st.sampled_from(["stop", "length", "stop string"]), st.booleans())
def test_a_replay_is_the_whole_answer(count: int, end: str, with_logprobs: bool) -> None:
    entries = [TokenLogprob(i, -i / 8, ((i, -i / 8),)) for i in range(count)]
    prompt = [None, TokenLogprob(1, -0.5)]
    stored = encode_answer(Answer(1.5, end, list(range(count)), entries if with_logprobs else None, prompt))  # type: ignore[arg-type]
    chunks = list(decode_answer(stored).replay("me", 7))
    assert [i for chunk in chunks for i in chunk.token_ids] == list(range(count))
    assert [e for chunk in chunks for e in chunk.logprobs or ()] == (entries if with_logprobs else [])
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == ("length" if end == "length" else "stop")
    assert (chunks[0].prompt_logprobs, chunks[0].cached_tokens) == (prompt, 7)


# ---------------------------------------------------------------- memory


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 400)), max_size=60))
def test_memory_keeps_the_most_recently_used_that_fit(steps: list[tuple[int, bool, int]]) -> None:
    limit = 4000
    tier = MemoryTier(limit)
    model: dict[bytes, bytes] = {}  # in order of use
    for number, reads, size in steps:
        if reads:
            assert tier.get(key(number)) == model.get(key(number))
            if key(number) in model:
                model[key(number)] = model.pop(key(number))
            continue
        tier.put(key(number), bytes(size))
        model.pop(key(number), None)
        if size + ENTRY_BYTES <= limit / LARGEST_SHARE:
            model[key(number)] = bytes(size)
        while sum(len(value) + ENTRY_BYTES for value in model.values()) > limit:
            del model[next(iter(model))]
        assert tier.bytes == sum(len(value) + ENTRY_BYTES for value in model.values())
    assert len(tier) == len(model)


# ---------------------------------------------------------------- disk


async def test_disk_answers_survive_a_restart(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "deep" / "answers.sqlite", MIB)
    await tier.put(key(1), b"one", ttl=60)
    await tier.put(key(2), b"two", ttl=-1)
    await tier.close()
    tier = DiskTier(tmp_path / "deep" / "answers.sqlite", MIB)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "deep").iterdir()} == {0o600}
    assert await tier.get(key(1)) == b"one"
    assert await tier.get(key(2)) is None  # it had expired
    await tier.close()


async def test_the_disk_file_is_bounded_and_keeps_the_latest(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    tier = DiskTier(path, MIB)
    for number in range(300):
        await tier.put(key(number), number.to_bytes(2, "little") * 5000, ttl=60)
    assert tier.bytes <= MIB
    assert tier.evictions > 0
    assert await tier.get(key(299)) == (299).to_bytes(2, "little") * 5000
    assert await tier.get(key(0)) is None
    await tier.close()
    assert path.stat().st_size < 1.2 * MIB


async def test_a_smaller_limit_applies_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    tier = DiskTier(path, 4 * MIB)
    for number in range(100):
        await tier.put(key(number), bytes(20_000), ttl=60)
    await tier.close()
    tier = DiskTier(path, MIB)
    assert tier.bytes <= MIB
    await tier.close()


async def test_a_corrupt_file_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "answers.sqlite"
    path.write_bytes(b"this is no database" * 1000)
    tier = DiskTier(path, MIB)
    await tier.put(key(1), b"one", ttl=60)
    assert await tier.get(key(1)) == b"one"
    await tier.close()
    assert "cannot be read" in caplog.text


async def test_a_file_that_is_damaged_while_in_use_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    tier = DiskTier(path, 4 * MIB)
    for number in range(50):
        await tier.put(key(number), bytes(20_000), ttl=60)
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    other.close()
    with path.open("r+b") as file:
        file.seek(100)
        file.write(bytes(range(256)) * 2000)
    await tier.put(key(1), bytes(20_000), ttl=60)  # finds out
    assert tier.errors == 1
    await tier.put(key(1), b"again", ttl=60)
    assert await tier.get(key(1)) == b"again"
    await tier.close()


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot keep answers in") as caught:
        DiskTier(tmp_path / "file" / "answers.sqlite", MIB)
    assert caught.value.param == "cache.disk_path"


# ---------------------------------------------------------------- Redis


@pytest.fixture
async def tier(redis_process: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RedisTier]:
    monkeypatch.setattr(redis_tier, "RETRY_SECONDS", 0.02)
    tier = RedisTier(connect(redis_process.url))
    yield tier
    await tier.close()


async def test_redis_keeps_answers_for_their_time(tier: RedisTier, redis_process: RedisServer) -> None:
    await tier.put(key(1), b"one", ttl=60)
    assert await tier.get(key(1)) == b"one"
    assert await tier.get(key(2)) is None
    client = connect(redis_process.url)
    assert 0 < await client.ttl(PREFIX + key(1)) <= 60
    await client.aclose()


async def test_a_redis_that_dies_is_a_miss_and_comes_back_by_itself(
    tier: RedisTier, redis_process: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    await tier.put(key(1), b"one", ttl=60)
    redis_process.stop()
    caplog.set_level(logging.INFO)
    assert [await tier.get(key(1)) for _ in range(20)] == [None] * 20
    await tier.put(key(1), b"lost", ttl=60)
    assert not tier.up
    assert tier.errors == 1, "while it is known to be down nobody waits for it"
    redis_process.start()
    assert tier._reviving is not None
    await tier._reviving
    await tier.put(key(1), b"again", ttl=60)
    assert await tier.get(key(1)) == b"again"
    assert [record.message.split(":")[0] for record in caplog.records if "answer cache" in record.message] == [
        "the answer cache goes on without Redis",
        "the answer cache uses Redis again",
    ]


async def test_without_a_connection_left_a_request_passes_by_alone(
    tier: RedisTier, redis_process: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def block() -> Awaitable[Any]:
        return tier._redis.blpop(["let go"], timeout=0)

    client = connect(redis_process.url)
    holding = [asyncio.create_task(tier._call(block)) for _ in range(redis_tier.CONNECTIONS)]
    while (await client.info("clients"))["blocked_clients"] < len(holding):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(redis_tier, "TIMEOUT_SECONDS", 0.01)
        assert await tier.get(key(1)) is None
        assert await tier.claim(key(1), 60), "nobody waits for an answer that nobody computes"
    assert tier.up
    await client.rpush("let go", *range(len(holding)))
    assert None not in await asyncio.gather(*holding)
    assert await tier.claim(key(1), 60)
    assert not await tier.claim(key(1), 60)
    await client.aclose()


async def test_a_redis_that_accepts_and_never_answers_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_tier, "TIMEOUT_SECONDS", 0.1)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(accept, "127.0.0.1", 0)
    tier = RedisTier(connect(f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}"))
    assert await asyncio.gather(*(tier.get(key(i)) for i in range(100))) == [None] * 100
    assert not tier.up
    await tier.close()
    silent.close()
