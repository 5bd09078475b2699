"""Upstreams over real HTTP: what a server says, refuses, delays and leaves unsaid."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from penstock.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, StartupError, Unavailable
from penstock.core.request import Adapter, Chunk, GenerateRequest, Grammar, SamplingParams
from penstock.fleet.upstream.engine import Upstream
from penstock.fleet.upstream.health import HealthMonitor
from penstock.fleet.upstream.probing import TRIAL_PROMPT
from penstock.fleet.upstream.settings import UpstreamConfig, UpstreamTimeouts
from penstock.text.tokenizer import Tokenizer
from tests.fleet.upstream.scripted_server import STORY, StoryServer, completion

ANSWER = STORY.removeprefix(TRIAL_PROMPT)
GREEDY = SamplingParams(temperature=0.0)
PATIENT = UpstreamTimeouts(check_interval=1000)
HASTY = UpstreamTimeouts(first_token=0.2, next_token=0.2, check=0.2, check_interval=1000)


@asynccontextmanager
async def connected(
    story: StoryServer, tokenizer: Tokenizer, timeouts: UpstreamTimeouts = PATIENT
) -> AsyncIterator[Upstream]:
    with story.running() as url:
        upstream = await Upstream.connect(UpstreamConfig(url, timeouts=timeouts), tokenizer)
        try:
            yield upstream
        finally:
            await upstream.close()


def story_request(tokenizer: Tokenizer, params: SamplingParams = GREEDY) -> GenerateRequest:
    return GenerateRequest("r", tokenizer.encode(TRIAL_PROMPT), params)


async def collect(upstream: Upstream, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in upstream.submit(request)]


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


@pytest.mark.parametrize("characters", [1, 3, 1000])
async def test_text_alone_becomes_tokens_of_the_same_bytes(tokenizer: Tokenizer, characters: int) -> None:
    async with connected(StoryServer(characters=characters), tokenizer) as upstream:
        found = upstream.capabilities
        assert (found.token_ids_in, found.token_ids_out, found.logprobs, found.continuation) == (False,) * 3 + (True,)
        chunks = await collect(upstream, story_request(tokenizer))
        assert tokenizer.join_bytes(ids_of(chunks)).decode() == ANSWER
        last = chunks[-1]
        assert last.finish_reason == "stop"
        assert last.ledger is not None
        assert last.ledger.accounted == pytest.approx(last.ledger.total)
        assert last.ledger.output_tokens == len(ids_of(chunks))


async def test_continues_without_gap_or_repetition(tokenizer: Tokenizer) -> None:
    async with connected(StoryServer(), tokenizer) as upstream:
        whole = ids_of(await collect(upstream, story_request(tokenizer)))
        for done in range(1, len(whole)):
            request = replace(story_request(tokenizer), output=whole[:done])
            if _in_mid_character(tokenizer, whole[:done]):
                with pytest.raises(Unavailable, match="mid-character"):
                    await collect(upstream, request)
            else:
                rest = ids_of(await collect(upstream, request))
                assert tokenizer.join_bytes([*whole[:done], *rest]).decode() == ANSWER


def _in_mid_character(tokenizer: Tokenizer, token_ids: list[int]) -> bool:
    return tokenizer.decode(token_ids).endswith("\ufffd")


async def test_a_server_with_a_template_cannot_continue(tokenizer: Tokenizer) -> None:
    async with connected(StoryServer(template="User: {}"), tokenizer) as upstream:
        request = replace(story_request(tokenizer), output=[10])
        assert not upstream.capabilities.continuation
        assert isinstance(upstream.refusal(request), Unavailable)
        with pytest.raises(Unavailable, match="cannot continue"):
            await collect(upstream, request)
        assert upstream.health().ok


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=5),
        SamplingParams(logprobs=1),
        SamplingParams(stop_token_ids=(7,)),
        SamplingParams(min_tokens=2),
    ],
)
async def test_refuses_what_the_server_would_ignore(tokenizer: Tokenizer, params: SamplingParams) -> None:
    async with connected(StoryServer(), tokenizer) as upstream:
        asked = [name for name in ("top_k", "logprobs", "stop_token_ids", "min_tokens") if getattr(params, name)]
        with pytest.raises(InvalidRequest, match="upstream") as refused:
            await collect(upstream, story_request(tokenizer, params))
        assert [refused.value.param] == asked


@pytest.mark.parametrize(
    ("status", "error"),
    [
        *((429, Overloaded), (400, InvalidRequest), (422, InvalidRequest), (401, Unavailable), (500, Unavailable)),
        (200, Unavailable),  # and an error for a body
    ],
)
async def test_a_status_says_whose_fault_it_is(tokenizer: Tokenizer, status: int, error: type[Exception]) -> None:
    story = StoryServer()
    async with connected(story, tokenizer) as upstream:
        story.refusal = (status, {"retry-after": "7"})
        with pytest.raises(error, match="so it is") as refused:
            await collect(upstream, story_request(tokenizer))
        assert getattr(refused.value, "retry_after", 7.0) == 7.0


@pytest.mark.parametrize(
    "events",
    [
        [completion(" lived"), json.dumps({"error": {"message": "out of memory", "code": 500}})],
        [completion(" lived"), completion("", "abort")],
        [completion(" lived")],
        [completion(" lived"), "<html>"],
    ],
)
async def test_an_answer_that_breaks_off_is_unavailable(tokenizer: Tokenizer, events: list[str]) -> None:
    story = StoryServer()
    async with connected(story, tokenizer) as upstream:
        story.events = events
        stream = upstream.submit(story_request(tokenizer))
        assert tokenizer.decode((await anext(stream)).token_ids) == " lived"
        with pytest.raises(Unavailable):
            await anext(stream)


async def test_an_answer_goes_on_after_an_empty_finish_reason(tokenizer: Tokenizer) -> None:
    story = StoryServer()
    async with connected(story, tokenizer) as upstream:
        story.events = [completion(" lived", ""), completion(" in", ""), completion("", "length")]
        chunks = await collect(upstream, story_request(tokenizer))
        assert tokenizer.decode(ids_of(chunks)) == " lived in"
        assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]


async def test_half_characters_of_two_events_are_joined(tokenizer: Tokenizer) -> None:
    story = StoryServer()
    async with connected(story, tokenizer) as upstream:
        story.events = [
            '{"choices": [{"text": "a\\ud83e"}]}',
            '{"choices": [{"text": "\\udd8a", "finish_reason": "stop"}]}',
        ]
        assert tokenizer.decode(ids_of(await collect(upstream, story_request(tokenizer)))) == "a🦊"


async def test_closing_the_stream_hangs_up(tokenizer: Tokenizer) -> None:
    story = StoryServer()
    async with connected(story, tokenizer) as upstream:
        story.hangs_after = 2
        stream = upstream.submit(story_request(tokenizer))
        await anext(stream)
        assert upstream.stats.running == 1
        await stream.aclose()
        assert await asyncio.to_thread(story.left.wait, 30)
        ledger = await upstream.aborted("r")
        assert ledger is not None
        assert ledger.output_tokens >= 1
        assert upstream.stats.running == 0


@pytest.mark.parametrize("hangs_after", [0, 2])
async def test_a_hung_server_is_found_out_although_it_answers_checks(tokenizer: Tokenizer, hangs_after: int) -> None:
    """Comments keep the connection alive and /health is fine; only a token shows that it works again."""
    story = StoryServer()
    async with connected(story, tokenizer, HASTY) as upstream:
        story.hangs_after = hangs_after
        with pytest.raises(Unavailable) as hung:
            await collect(upstream, story_request(tokenizer))
        assert hung.value.code == "timeout"
        assert not (await upstream.check()).ok
        story.hangs_after = None
        assert (await upstream.check()).ok


@pytest.mark.parametrize(("chokes_on", "well"), [(TRIAL_PROMPT, True), ("", False)])
async def test_a_request_that_a_server_fails_is_not_taken_for_the_server(
    tokenizer: Tokenizer, chokes_on: str, well: bool
) -> None:
    """Else one client could take it from all others. The empty text is in every prompt."""
    story = StoryServer()
    async with connected(story, tokenizer) as upstream:
        story.chokes_on = chokes_on
        with pytest.raises(Unavailable, match="it choked"):
            await collect(upstream, story_request(tokenizer))
        assert upstream.health().ok is well


async def test_checks_find_a_server_that_is_not_well(tokenizer: Tokenizer) -> None:
    story = StoryServer()
    async with connected(story, tokenizer) as upstream:
        for healthy in (False, True):
            story.healthy = healthy
            assert (await upstream.check()).ok is healthy
    with pytest.raises(Unavailable):
        await collect(upstream, story_request(tokenizer))
    assert not upstream.health().ok


async def test_checks_are_repeated_and_follow_a_failure_at_once() -> None:
    checked = asyncio.Semaphore(0)

    async def alive() -> None:
        checked.release()
        raise Unavailable("down")

    monitor = HealthMonitor("it", alive, alive, UpstreamTimeouts(check_interval=0.01))
    await checked.acquire()
    await checked.acquire()
    await monitor.close()
    assert monitor.health().detail == "down"
    patient = HealthMonitor("it", alive, alive, PATIENT)
    patient.lost("gone")
    await checked.acquire()
    await patient.close()


async def test_a_deadline_ends_the_work_with_a_ledger(tokenizer: Tokenizer) -> None:
    story = StoryServer()
    async with connected(story, tokenizer) as upstream:
        story.hangs_after = 2
        *_, last = await collect(upstream, replace(story_request(tokenizer), deadline=0.1))
        assert last.finish_reason == "deadline"
        assert last.ledger is not None
        with pytest.raises(DeadlineExceeded):
            last.raise_failure()
        assert upstream.health().ok


async def test_keys_are_sent_and_not_shown(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORY_KEY", "sesame")
    story = StoryServer()
    with story.running() as url:
        config = UpstreamConfig(url, api_key_env="STORY_KEY", headers={"x-token": "hidden"})
        upstream = await Upstream.connect(config, tokenizer)
        await upstream.close()
    assert story.authorization == "Bearer sesame"
    assert "hidden" not in repr(config)
    monkeypatch.delenv("STORY_KEY")
    with pytest.raises(StartupError, match="STORY_KEY"):
        await Upstream.connect(config, tokenizer)


async def test_adapters_are_never_asked_of_a_server_by_name(tokenizer: Tokenizer) -> None:
    """Nobody could tell whether the server's adapter of that name is the one that was meant."""
    async with connected(StoryServer(), tokenizer) as upstream:
        request = replace(story_request(tokenizer), adapter=Adapter("digest", "/folder"))
        with pytest.raises(InvalidRequest, match="LoRA adapters are served by workers") as refused:
            await collect(upstream, request)
        assert refused.value.param == "model"


async def test_a_server_with_another_tokenizer_is_refused(tokenizer: Tokenizer) -> None:
    story = StoryServer(events=[completion(" lived", "stop", token_ids=[1000])])
    with story.running() as url, pytest.raises(StartupError, match="another tokenizer"):
        await Upstream.connect(UpstreamConfig(url), tokenizer)


@pytest.mark.parametrize("owner", ["vllm", "somebody"])
async def test_a_server_that_does_not_enforce_grammars_is_not_asked(tokenizer: Tokenizer, owner: str) -> None:
    """By its name it would, but a trial shows that it ignores them, as versions before did."""
    params = SamplingParams(grammar=Grammar("json_schema", '{"type": "null"}', param="response_format"))
    async with connected(StoryServer(owner=owner), tokenizer) as upstream:
        assert not upstream.capabilities.grammars
        with pytest.raises(InvalidRequest, match="not enforced") as refused:
            await collect(upstream, story_request(tokenizer, params))
        assert refused.value.param == "response_format"
