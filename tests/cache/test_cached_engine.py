"""Answers without the engine: what is stored, what is not, and who may share a computation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from penstock.cache.answer import decode_answer, encode_answer
from penstock.cache.build import open_cache
from penstock.cache.engine import CachedEngine
from penstock.cache.settings import CacheConfig
from penstock.core.engine import ChunkStream
from penstock.core.errors import DeadlineExceeded, EngineFailure, NotCached, Overloaded
from penstock.core.request import CacheControl, Chunk, GenerateRequest, Objective, SamplingParams, Share, choice_seed
from penstock.settings import Settings
from penstock.simulation.scripted_engine import ScriptedEngine, says
from penstock.text.tokenizer import Tokenizer
from tests.cache.conftest import GREEDY, answer, request, state, text_of
from tests.redis_server import RedisServer

ANSWER = "The answer is forty-two, friend."


class Gate:
    """A step of a script: the engine waits there until it is opened."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.open.wait()


def gated(engine: ScriptedEngine, tokens_before: int = 3) -> Gate:
    """The engine says the beginning of its answer, then waits."""
    gate, script = Gate(), engine.script
    engine.script = lambda asked: [*script(asked)[:tokens_before], gate, *script(asked)[tokens_before:]]
    return gate


async def first_chunk(stream: ChunkStream) -> Chunk:
    return await anext(stream)


# ---------------------------------------------------------------- hits


async def test_a_second_request_is_answered_as_the_first_without_the_engine(
    cached: CachedEngine, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    asked = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    first = await answer(cached, request(params=asked))
    again = request(params=asked)
    second = await answer(cached, again)
    assert (state(first), state(second), len(engine.requests)) == ("miss", "hit", 1)
    assert [i for chunk in first for i in chunk.token_ids] == [i for chunk in second for i in chunk.token_ids]
    assert [e for chunk in first for e in chunk.logprobs or ()] == [e for chunk in second for e in chunk.logprobs or ()]
    assert first[0].prompt_logprobs == second[0].prompt_logprobs
    assert first[-1].finish_reason == second[-1].finish_reason == "stop"
    assert {chunk.request_id for chunk in second} == {again.id}
    assert second[0].cached_tokens == len(again.prompt)
    assert text_of(tokenizer, again, second) == ANSWER
    assert second[0].cache is not None
    assert second[0].cache.tier == "memory"


async def test_sampled_answers_are_computed_each_time_unless_they_have_a_seed(
    cached: CachedEngine, engine: ScriptedEngine
) -> None:
    sampled = SamplingParams(max_tokens=8)
    for _ in range(2):
        assert state(await answer(cached, request(params=sampled, seed=choice_seed(None, 0)))) == "bypass"
    seeded = replace(sampled, seed=7)
    states = [
        state(await answer(cached, request(params=seeded, seed=choice_seed(7, choice)))) for choice in (0, 1, 0, 1)
    ]
    assert states == ["miss", "miss", "hit", "hit"]
    assert len(engine.requests) == 4


async def test_sampled_answers_are_kept_where_the_settings_say_so(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    cached = CachedEngine(engine, tokenizer, CacheConfig(sampled=True))
    one, several = SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, n=2)
    states = [
        state(await answer(cached, request(params=params, seed=i))) for i, params in enumerate([one, one, several])
    ]
    assert states == ["miss", "hit", "bypass"]


async def test_an_answer_ends_at_its_stop_string_and_is_stored_so(
    cached: CachedEngine, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    """The reader leaves at the stop string; the engine must stop there too, and what it said is complete."""
    asked = request(params=replace(GREEDY, stop=("forty",)))
    first = await answer(cached, asked)
    second = await answer(cached, replace(asked, id="again"))
    assert (state(first), state(second)) == ("miss", "hit")
    assert text_of(tokenizer, asked, first) == text_of(tokenizer, asked, second) == "The answer is "
    assert first[-1].finish_reason == second[-1].finish_reason == "stop"
    whole = says(tokenizer, ANSWER)[0]
    assert 0 < sum(len(chunk.token_ids) for chunk in first) < len(whole)
    assert engine.ended[asked.id].is_set()


@pytest.mark.parametrize("ending", [EngineFailure("a step failed"), Overloaded("full", retry_after=1)])
async def test_errors_reach_everyone_and_are_never_stored(
    cached: CachedEngine, engine: ScriptedEngine, ending: Exception
) -> None:
    good = engine.script
    engine.script = lambda asked: [*good(asked)[:2], ending]
    results = await asyncio.gather(*(answer(cached, request()) for _ in range(3)), return_exceptions=True)
    assert results == [ending] * 3
    assert len(engine.requests) == 1
    engine.script = good
    assert state(await answer(cached, request())) == "miss"


@pytest.mark.parametrize("reason", ["abort", "error", "deadline"])
async def test_an_answer_the_engine_gave_up_is_not_stored(tokenizer: Tokenizer, reason: str) -> None:
    class GivesUp(ScriptedEngine):
        async def submit(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
            yield Chunk(request.id, [5])
            yield Chunk(request.id, finish_reason=reason)  # type: ignore[arg-type]

    cached = CachedEngine(GivesUp(tokenizer, lambda asked: []), tokenizer, CacheConfig())
    for _ in range(2):
        assert state(await answer(cached, request())) == "miss"


def age(cached: CachedEngine, seconds: float) -> None:
    """As if the stored answers were so much older."""
    for key, payload in list(cached._memory._values.items()):
        stored = decode_answer(payload)
        cached._memory.put(key, encode_answer(msgspec.structs.replace(stored, created=stored.created - seconds)))


async def test_an_answer_is_forgotten_after_its_time(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    cached = CachedEngine(engine, tokenizer, CacheConfig(ttl_seconds=60))
    await answer(cached, request())
    age(cached, 50)
    assert state(await answer(cached, request())) == "hit"
    age(cached, 20)
    assert state(await answer(cached, request())) == "miss"


# ---------------------------------------------------------------- Cache-Control


async def test_no_cache_computes_and_replaces_what_is_stored(
    cached: CachedEngine, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    await answer(cached, request())
    (script,) = says(tokenizer, "Something newer")
    engine.script = lambda asked: [script]
    assert state(await answer(cached, request(cache=CacheControl(read=False)))) == "miss"
    again = request()
    chunks = await answer(cached, again)
    assert (state(chunks), text_of(tokenizer, again, chunks)) == ("hit", "Something newer")


async def test_no_store_neither_reads_nor_writes_nor_shares(cached: CachedEngine, engine: ScriptedEngine) -> None:
    await answer(cached, request())
    private = CacheControl(store=False)
    chunks = await asyncio.gather(*(answer(cached, request(prompt=[9], cache=private)) for _ in range(2)))
    assert [state(found) for found in chunks] == ["bypass", "bypass"]
    assert state(await answer(cached, request(cache=private))) == "bypass"
    assert state(await answer(cached, request(prompt=[9]))) == "miss"
    assert all(asked.cache is None for asked in engine.requests), "engines never see what was meant for the cache"


async def test_max_age_refuses_what_is_older(cached: CachedEngine) -> None:
    await answer(cached, request())
    age(cached, 30)
    assert state(await answer(cached, request(cache=CacheControl(max_age=60)))) == "hit"
    assert state(await answer(cached, request(cache=CacheControl(max_age=20)))) == "miss"
    assert state(await answer(cached, request(cache=CacheControl(max_age=20)))) == "hit", "by now it is a newer one"


async def test_only_if_cached_never_computes(cached: CachedEngine, engine: ScriptedEngine) -> None:
    only = CacheControl(only_cached=True)
    with pytest.raises(NotCached):
        await answer(cached, request(cache=only))
    with pytest.raises(NotCached):
        await answer(cached, request(params=SamplingParams(), cache=only))
    assert not engine.requests
    await answer(cached, request())
    assert state(await answer(cached, request(cache=only))) == "hit"


# ---------------------------------------------------------------- single flight


async def test_a_hundred_identical_streams_compute_once(
    cached: CachedEngine, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    gate = gated(engine)
    asked = [request(prompt=[1, 2, 3] if i % 2 else (1, 2, 3)) for i in range(100)]
    tasks = [asyncio.create_task(answer(cached, one)) for one in asked]
    await gate.reached.wait()
    gate.open.set()
    answers = await asyncio.gather(*tasks)
    assert len(engine.requests) == 1
    assert sorted(state(found) for found in answers) == ["miss", *["shared"] * 99]
    assert {text_of(tokenizer, one, found) for one, found in zip(asked, answers, strict=True)} == {ANSWER}
    for one, found in zip(asked, answers, strict=True):
        assert {chunk.request_id for chunk in found} == {one.id}
    assert sum(found[-1].ledger is not None for found in answers) == 1, "the account is that of the one who computed"


async def test_a_late_joiner_gets_what_was_said_and_then_follows(cached: CachedEngine, engine: ScriptedEngine) -> None:
    gate = gated(engine, tokens_before=3)
    leader = asyncio.create_task(answer(cached, request()))
    await gate.reached.wait()
    late = cached.submit(request())
    said = [await anext(late) for _ in range(3)]
    waiting = asyncio.create_task(first_chunk(late))
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.open.set()
    rest = [await waiting, *[chunk async for chunk in late]]
    chunks = await leader
    assert [c.token_ids for c in [*said, *rest]] == [c.token_ids for c in chunks]
    assert len(engine.requests) == 1


async def test_the_computation_survives_the_first_client_and_ends_with_the_last(
    cached: CachedEngine, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    gate = gated(engine)
    asked = [request() for _ in range(3)]
    leader, *others = [asyncio.create_task(answer(cached, one)) for one in asked]
    await gate.reached.wait()
    leader.cancel()
    others[0].cancel()
    await asyncio.wait([leader, others[0]])
    assert not engine.ended[asked[0].id].is_set()
    gate.open.set()
    assert text_of(tokenizer, asked[2], await others[1]) == ANSWER
    assert len(engine.requests) == 1

    gate = gated(engine)
    leader, other = (asyncio.create_task(answer(cached, request(prompt=[4]))) for _ in range(2))
    await gate.reached.wait()
    leader.cancel()
    other.cancel()
    await asyncio.wait([leader, other])
    assert await asyncio.to_thread(engine.ended[engine.requests[-1].id].wait, 20)
    gate.open.set()
    assert state(await answer(cached, request(prompt=[4]))) == "miss", "what nobody waited for is not stored"


class Reader:
    """Reads an answer chunk by chunk; then `charged` says what it pays for: whether the prompt, and output tokens."""

    def __init__(self, cached: CachedEngine) -> None:
        self.chunks = cached.submit(request())
        self.share = Share()
        self.tokens = 0

    async def read(self, chunks: int | None = None) -> None:
        while chunks is None or chunks > 0:
            chunk = await anext(self.chunks, None)
            if chunk is None:
                return
            if chunks is not None:
                chunks -= 1
            assert chunk.cache is not None
            assert chunk.cache.share is not None
            self.share = chunk.cache.share
            self.tokens += len(chunk.token_ids)

    async def leave(self) -> None:
        await self.chunks.aclose()

    @property
    def charged(self) -> tuple[bool, int]:
        share = self.share
        return (share.paid is None, share.charged(self.tokens)) if share.owner else (False, 0)


async def test_who_started_a_computation_pays_for_it_while_it_stays(
    cached: CachedEngine, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    gate = gated(engine)
    readers = [Reader(cached) for _ in range(3)]
    reading = [asyncio.create_task(reader.read()) for reader in readers]
    await gate.reached.wait()
    gate.open.set()
    await asyncio.gather(*reading)
    whole = len(says(tokenizer, ANSWER)[0])
    assert [reader.charged for reader in readers] == [(True, whole), (False, 0), (False, 0)]


async def test_who_stays_pays_for_what_the_one_that_left_did_not_get(
    cached: CachedEngine, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    gate = gated(engine, tokens_before=4)
    first, second, third = (Reader(cached) for _ in range(3))
    await first.read(1)
    await second.read(3)
    await third.read(1)
    await first.leave()
    await second.leave()
    gate.open.set()
    await third.read()
    whole = len(says(tokenizer, ANSWER)[0])
    assert [reader.charged for reader in (first, second, third)] == [(True, 1), (False, 2), (False, whole - 3)]
    assert len(engine.requests) == 1


async def test_who_stays_pays_for_the_prompt_when_the_first_got_nothing(
    cached: CachedEngine, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    gate = gated(engine, tokens_before=0)
    first, second = Reader(cached), Reader(cached)
    reading = [asyncio.create_task(reader.read()) for reader in (first, second)]
    await gate.reached.wait()
    reading[0].cancel()
    await asyncio.wait(reading[:1])
    gate.open.set()
    await reading[1]
    assert second.charged == (True, len(says(tokenizer, ANSWER)[0]))
    assert second.share.cached_tokens == 2, "as the engine found it"


async def test_who_stays_pays_for_all_when_nothing_is_charged_to_the_first(
    cached: CachedEngine, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    """It was the trial of a cascade, whose answer is not used."""
    gate = gated(engine)
    first, second = Reader(cached), Reader(cached)
    await first.read(2)
    await second.read(1)
    first.share.waived = True
    await first.leave()
    gate.open.set()
    await second.read()
    assert second.charged == (True, len(says(tokenizer, ANSWER)[0]))


@pytest.mark.parametrize("complete", [True, False])
async def test_who_pays_and_reads_slowly_pays_for_what_others_got(
    cached: CachedEngine, engine: ScriptedEngine, tokenizer: Tokenizer, complete: bool
) -> None:
    gate = gated(engine)
    slow, fast = Reader(cached), Reader(cached)
    await slow.read(1)
    await fast.read(3)
    if complete:
        gate.open.set()
        await fast.read()
    await fast.leave()
    await slow.leave()
    whole = len(says(tokenizer, ANSWER)[0])
    assert (slow.charged, fast.charged) == ((True, whole if complete else 3), (False, 0))


async def test_who_leaves_before_it_has_read_an_answer_that_is_stored_pays_for_it(
    cached: CachedEngine, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    slow = Reader(cached)
    await slow.read(1)
    assert await asyncio.to_thread(engine.ended[engine.requests[0].id].wait, 20)
    await slow.leave()
    assert slow.charged == (True, len(says(tokenizer, ANSWER)[0]))
    assert state(await answer(cached, request())) == "hit"


async def test_nobody_joins_a_computation_of_another_class_or_one_that_may_be_given_up_too_soon(
    cached: CachedEngine, engine: ScriptedEngine
) -> None:
    gate = gated(engine)
    asked = [
        request(deadline=30.0),
        request(deadline=31.0),  # within twice the first one's time
        request(deadline=90.0),
        request(),  # without any: that computation is for all
        request(deadline=500.0),
        request(objective=Objective(itl=0.2)),  # of the same class, whose promise follows the engine's measured speed
        request(objective=Objective("batch", rank=1)),
        request(priority=5),
    ]
    tasks = []
    for one in asked:
        tasks.append(asyncio.create_task(answer(cached, one)))
        await asyncio.sleep(0)
    await gate.reached.wait()
    gate.open.set()
    states = [state(found) for found in await asyncio.gather(*tasks)]
    assert states == ["miss", "shared", "miss", "miss", "shared", "shared", "miss", "miss"]


async def test_each_listener_keeps_its_own_deadline(
    cached: CachedEngine, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    gate = gated(engine)
    patient = request()
    leader = asyncio.create_task(answer(cached, patient))
    await gate.reached.wait()
    with pytest.raises(DeadlineExceeded):
        await answer(cached, request(deadline=0.01))
    gate.open.set()
    assert text_of(tokenizer, patient, await leader) == ANSWER


# ---------------------------------------------------------------- tiers below memory


async def test_answers_come_back_from_redis_and_from_disk(
    engine: ScriptedEngine, tokenizer: Tokenizer, redis_process: RedisServer, tmp_path: Path
) -> None:
    asked = {"prompt": [1, 4, 9]}

    async def ask(settings: Settings, times: int = 1) -> list[str]:
        async with open_cache(settings.cache, settings.state) as cache:
            cached = cache.before(engine, tokenizer)
            assert isinstance(cached, CachedEngine)
            answers = [await answer(cached, request(**asked)) for _ in range(times)]
            return [f"{a[0].cache.state} {a[0].cache.tier}".strip() for a in answers if a[0].cache]

    disk = CacheConfig(disk_mib=4, disk_path=str(tmp_path / "answers.sqlite"))
    assert await ask(Settings(cache=disk, state=redis_process.url)) == ["miss"]
    # Each time another gateway, or this one after a restart.
    assert await ask(Settings(state=redis_process.url), 2) == ["hit redis", "hit memory"]
    assert await ask(Settings(cache=disk), 2) == ["hit disk", "hit memory"]
    assert await ask(Settings(cache=disk, state="redis://127.0.0.1:1")) == ["hit disk"], "a dead Redis is passed by"
    assert await ask(Settings()) == ["miss"]
    assert len(engine.requests) == 2


async def test_a_damaged_answer_is_computed_again(
    engine: ScriptedEngine, tokenizer: Tokenizer, redis_process: RedisServer
) -> None:
    async with open_cache(CacheConfig(), redis_process.url) as cache:
        cached = cache.before(engine, tokenizer)
        assert isinstance(cached, CachedEngine)
        await answer(cached, request(prompt=[7, 7]))
        await asyncio.gather(*cached._writes)
        client = cached._tiers[0]._redis  # type: ignore[attr-defined]
        (key,) = cached._memory._values
        stored = await client.get(b"penstock:answer:" + key)
        for damaged in (stored[:-1], b"", b"\x80\x04\x95", stored[:20] + b"\x00" + stored[21:]):
            await client.set(b"penstock:answer:" + key, damaged)
            cached._memory.discard(key)
            assert state(await answer(cached, request(prompt=[7, 7]))) == "miss"
            await asyncio.gather(*cached._writes)
