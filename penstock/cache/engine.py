"""`CachedEngine`, an engine that answers from stored answers or else passes the request on to the engine behind it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from penstock.cache.answer import Answer, End, answer_of, decode_answer, encode_answer, seal, unseal
from penstock.cache.flight import Flight
from penstock.cache.key import answer_key, bucket_key, is_deterministic
from penstock.cache.memory import MemoryTier
from penstock.cache.metrics import CacheMetrics
from penstock.cache.settings import CacheConfig
from penstock.cache.similar import Place, SimilarPrompts
from penstock.cache.tier import Tier
from penstock.core.engine import ChunkStream, EngineInfo, EngineStats, Health, ServedEngine
from penstock.core.errors import NotCached
from penstock.core.ledger import Ledger
from penstock.core.request import CacheControl, CacheStatus, Chunk, GenerateRequest, Share, Waits
from penstock.text.stream import TextStream
from penstock.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_UNSAID = CacheControl()

CLAIM_SECONDS = 30.0  # for which one gateway computes an answer and others wait for it
POLL_SECONDS = 0.02
CLOSE_SECONDS = 2.0  # for answers on their way to a tier

BYPASS = CacheStatus("bypass")
SHARED = CacheStatus("shared")

FlightName = tuple[bytes, CacheControl, str, int, Waits]


@dataclass(frozen=True, slots=True)
class _Found:
    answer: Answer
    status: CacheStatus


class CachedEngine:
    def __init__(
        self,
        engine: ServedEngine,
        tokenizer: Tokenizer,
        config: CacheConfig,
        *,
        tiers: Sequence[Tier] = (),
        similar: SimilarPrompts | None = None,
        memory: MemoryTier | None = None,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """What is not given, it has for itself."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._memory = MemoryTier(int(config.memory_mib * 2**20)) if memory is None else memory
        self._tiers = tiers  # below memory, nearest first
        self._shared = next((tier for tier in tiers if tier.shared), None)
        self._similar = similar
        self._flights: dict[FlightName, Flight] = {}
        self._writes: set[asyncio.Task[None]] = set()
        self.metrics = metrics or CacheMetrics(lambda: [self._memory.reading(), *(tier.reading() for tier in tiers)])

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    def health(self) -> Health:
        return self._engine.health()

    async def aborted(self, request_id: str) -> Ledger | None:
        return await self._engine.aborted(request_id)

    async def close(self) -> None:
        """Wait up to `CLOSE_SECONDS` for answers that are being written. The engine behind and the tiers stay open."""
        if self._writes:
            await asyncio.wait(self._writes, timeout=CLOSE_SECONDS)

    def submit(self, request: GenerateRequest) -> ChunkStream:
        control = request.cache or _UNSAID
        if control.store and (is_deterministic(request.params) or self._may_share_sample(request)):
            return self._answer(request, control)
        if control.only_cached:
            raise NotCached(
                "answers to such a request are never cached: give a seed or temperature 0, without no-store"
            )
        self.metrics.count(BYPASS)
        return _Bypass(self._engine.submit(_for_engine(request)))

    def _may_share_sample(self, request: GenerateRequest) -> bool:
        return self._config.sampled and request.params.n == 1  # several choices must differ

    async def _answer(self, request: GenerateRequest, control: CacheControl) -> AsyncGenerator[Chunk, None]:
        key = answer_key(request, self.info, self._config.scope)
        if control.read and (found := self._from_memory(key, control)) is not None:
            self.metrics.count(found.status)
            for chunk in found.answer.replay(request.id, len(request.prompt)):
                chunk.cache = found.status
                yield chunk
                await asyncio.sleep(0)  # a long answer must not hold up others
            return
        now = asyncio.get_running_loop().time()
        expires = None if request.deadline is None else now + request.deadline
        name = (key, control, request.objective.name, request.priority, request.waits)
        flight = self._flights.get(name)
        joined = flight is not None and flight.outlasts(expires)
        if flight is None or not joined:
            flight = self._start_flight(name, request, now)
        share = Share()
        status: CacheStatus | None = None
        async with aclosing(flight.listen(share, expires)) as chunks:
            async for chunk in chunks:
                if status is None and chunk.error is None:
                    status = flight.found or CacheStatus("shared" if joined else "miss", share=share)
                    self.metrics.count(status)
                if joined:  # it was computed for another request
                    chunk = replace(chunk, request_id=request.id, ledger=None, cached_tokens=len(request.prompt))
                chunk.cache = status
                yield chunk

    def _start_flight(self, name: FlightName, request: GenerateRequest, now: float) -> Flight:
        """Start the one computation of identical requests (single flight).

        Listeners keep their own deadlines; the engine gets twice the first one, so that others may join until then.
        """

        def ended(flight: Flight) -> None:
            self.metrics.flights -= 1
            if self._flights.get(name) is flight:
                del self._flights[name]

        if request.deadline is not None:
            request = replace(request, deadline=2 * request.deadline)
        flight = self._flights[name] = Flight(request.deadline and now + request.deadline, ended)
        self.metrics.flights += 1
        key, control, *_ = name
        flight.start(self._find_or_compute(flight, request, control, key))
        return flight

    async def _find_or_compute(
        self, flight: Flight, request: GenerateRequest, control: CacheControl, key: bytes
    ) -> AsyncGenerator[Chunk, None]:
        found = await self._from_tiers(key, control)
        place = None
        if found is None:
            place = await self._place(request, control)
            found = await self._from_similar(place, request, control)
        if found is not None:
            flight.found = found.status
            for chunk in found.answer.replay(request.id, len(request.prompt)):
                yield chunk
            return
        if control.only_cached:
            raise NotCached("no stored answer to this request; send it without only-if-cached to have it computed")
        if self._shared is not None and not await self._claim(self._shared, key):
            found = await self._from_other_gateway(self._shared, key, request, control)
            if found is not None:
                flight.found = SHARED
                for chunk in found.answer.replay(request.id, len(request.prompt)):
                    yield chunk
                return
        ends = _TextEnd(self._tokenizer, request)
        chunks: list[Chunk] = []
        stored = False
        try:
            async with aclosing(self._engine.submit(_for_engine(request))) as computed:
                async for chunk in computed:
                    chunks.append(chunk)
                    end = ends.after(chunk)
                    if end is not None:
                        stored = True
                        self._store(key, answer_of(chunks, end, time.time()), place)
                    yield chunk
                    if end == "stop string" and chunk.finish_reason is None:
                        yield Chunk(request.id, finish_reason="stop")
                        return  # what the model would say after its stop string is of no use to anybody
        finally:
            if self._shared is not None and not stored:
                self._in_background(self._shared.release(key))

    async def _from_other_gateway(
        self, tier: Tier, key: bytes, request: GenerateRequest, control: CacheControl
    ) -> _Found | None:
        """Wait for an answer that another gateway computes. None: it is to be computed here, since the other has given
        up or since waiting for the whole answer would take too much of the time that was promised."""
        promised = [seconds for seconds in (request.objective.ttft, request.deadline) if seconds is not None]
        end = time.monotonic() + min([CLAIM_SECONDS, *(seconds / 2 for seconds in promised)])
        while time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
            if (found := await self._from_tiers(key, control)) is not None:
                return found
            if await self._claim(tier, key):
                return None
        return None

    async def _claim(self, tier: Tier, key: bytes) -> bool:
        """Whether this gateway is the one to compute it. Cancelled meanwhile, it lets others do so."""
        asked = asyncio.ensure_future(tier.claim(key, CLAIM_SECONDS))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._in_background(_unclaim(tier, key, asked))
            raise

    def _from_memory(self, key: bytes, control: CacheControl) -> _Found | None:
        payload = self._memory.get(key)
        return None if payload is None else self._if_fresh(decode_answer(payload), control, "memory")

    async def _from_tiers(self, key: bytes, control: CacheControl) -> _Found | None:
        if not control.read:
            return None
        for tier in self._tiers:
            sealed = await tier.get(key)
            if sealed is None:
                continue
            payload = unseal(key, sealed)
            if payload is None:
                log.warning("an answer stored in %s is damaged or of another version; it is ignored", tier.name)
                continue
            found = self._if_fresh(decode_answer(payload), control, tier.name)
            if found is not None:
                self._memory.put(key, payload)
                return found
        return None

    async def _place(self, request: GenerateRequest, control: CacheControl) -> Place | None:
        if self._similar is None or control.similar is None or request.params.prompt_logprobs is not None:
            return None
        return await self._similar.place(bucket_key(request, self.info, control.similar), control.similar.text)

    async def _from_similar(
        self, place: Place | None, request: GenerateRequest, control: CacheControl
    ) -> _Found | None:
        if self._similar is None or place is None or place.nearest is None or not control.read:
            return None
        found = self._from_memory(place.nearest, control) or await self._from_tiers(place.nearest, control)
        if found is None:
            if control.max_age is None:
                self._similar.forget(place)
            return None
        if not found.answer.fits(request.params.max_tokens):
            return None
        return replace(found, status=CacheStatus("similar", age=found.status.age, score=place.score))

    def _if_fresh(self, answer: Answer, control: CacheControl, tier: str) -> _Found | None:
        age = max(0.0, time.time() - answer.created)  # clocks of two gateways may differ
        if age > self._config.ttl_seconds or (control.max_age is not None and age > control.max_age):
            return None
        return _Found(answer, CacheStatus("hit", tier, age))

    def _store(self, key: bytes, answer: Answer, place: Place | None) -> None:
        """Store in memory at once, and in the other tiers by a background task."""
        payload = encode_answer(answer)
        self._memory.put(key, payload)
        self.metrics.stored += 1
        for tier in self._tiers:
            self._in_background(self._put(tier, key, payload))
        if self._similar is not None and place is not None:
            self._similar.remember(place, key)

    async def _put(self, tier: Tier, key: bytes, payload: bytes) -> None:
        await tier.put(key, seal(key, payload), self._config.ttl_seconds)
        if tier is self._shared:
            await tier.release(key)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        write = asyncio.create_task(work)
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)


class _Bypass:
    """The chunks of an engine. The first of them says that the cache has nothing to do with them."""

    __slots__ = ("_chunks", "_next")

    def __init__(self, chunks: ChunkStream) -> None:
        self._chunks = chunks
        self._next: Callable[[], Awaitable[Chunk]] = self._first

    def __aiter__(self) -> _Bypass:
        return self

    def __anext__(self) -> Awaitable[Chunk]:
        return self._next()

    async def _first(self) -> Chunk:
        self._next = self._chunks.__anext__
        chunk = await self._next()
        chunk.cache = BYPASS
        return chunk

    def aclose(self) -> Awaitable[None]:
        return self._chunks.aclose()


class _TextEnd:
    """Where an answer ends. Stop strings are looked for outside the engine, by whoever reads the answer; so the one
    who stores it must look for them too."""

    def __init__(self, tokenizer: Tokenizer, request: GenerateRequest) -> None:
        self._text = TextStream(tokenizer, request.params) if request.params.stop else None

    def after(self, chunk: Chunk) -> End | None:
        """How the answer ended with this chunk; None if it goes on or must not be stored."""
        if chunk.error is not None:
            return None
        if self._text is not None and isinstance(self._text.push(chunk).stop_matched, str):
            return "stop string"
        reason = chunk.finish_reason
        return reason if reason == "stop" or reason == "length" else None


async def _unclaim(tier: Tier, key: bytes, asked: Awaitable[bool]) -> None:
    if await asked:
        await tier.release(key)


def _for_engine(request: GenerateRequest) -> GenerateRequest:
    return request if request.cache is None else replace(request, cache=None)
