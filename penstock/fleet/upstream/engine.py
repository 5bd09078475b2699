"""An upstream server as an `Engine`: requests become HTTP, server-sent events become chunks.

A request that has `output` is sent as its prompt followed by that output, with so many tokens less to go. Greedy
decoding goes on as if nothing had happened. Where it is sampled, or penalties count the output, the text goes on
without a gap or a repetition but need not be what the undisturbed run would have given.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from penstock.client.http import HttpClient, openai_base
from penstock.core.engine import EngineInfo, EngineStats, Health
from penstock.core.errors import ContextTooLong, DeadlineExceeded, PenstockError, Unavailable
from penstock.core.ledger import Ledger
from penstock.core.request import Chunk, GenerateRequest, SamplingParams, failed
from penstock.fleet.upstream.answer import Answer
from penstock.fleet.upstream.capabilities import Capabilities
from penstock.fleet.upstream.health import HealthMonitor
from penstock.fleet.upstream.openai import OpenAIProtocol
from penstock.fleet.upstream.protocol import FAILED, Found, Piece, UpstreamProtocol, collect, response_error
from penstock.fleet.upstream.retokenizer import Vocabulary
from penstock.fleet.upstream.settings import UpstreamConfig
from penstock.fleet.upstream.triton import TritonProtocol
from penstock.text.tokenizer import Tokenizer

KEPT_LEDGERS = 1024  # of aborted requests, for readers who are slow to ask
END_SECONDS = 1.0  # how long the end of a body is waited for, once the answer is complete


class Upstream:
    """A server that others run. It is watched for as long as it is open."""

    def __init__(
        self, config: UpstreamConfig, http: HttpClient, protocol: UpstreamProtocol, vocabulary: Vocabulary, found: Found
    ) -> None:
        self.found = found
        self.info = EngineInfo(
            found.model,
            found.max_model_len,
            vocabulary.tokenizer.vocab_size,
            continues=found.capabilities.continuation,
        )
        self._timeouts, self._http, self._protocol, self._vocabulary = config.timeouts, http, protocol, vocabulary
        self._totals = EngineStats()
        self._running = 0
        self._aborted: OrderedDict[str, Ledger] = OrderedDict()
        self._monitor = HealthMonitor(http.url, self._answers, self._generates, config.timeouts)

    @classmethod
    async def connect(cls, config: UpstreamConfig, tokenizer: Tokenizer) -> Upstream:
        """Probe the server, and watch it from then on. Raises Unavailable if it cannot be reached, StartupError if the
        settings must be changed first."""
        waits = config.timeouts
        http = HttpClient(
            openai_base(config.url),
            api_key=config.api_key(),
            headers=config.headers,
            connect_timeout=waits.connect,
            timeout=max(waits.first_token, waits.next_token),
        )
        vocabulary = Vocabulary(tokenizer)
        protocol = (OpenAIProtocol if config.kind == "openai" else TritonProtocol)(config, vocabulary)
        try:
            return cls(config, http, protocol, vocabulary, await protocol.probe(http))
        except BaseException:
            await http.close()
            raise

    async def close(self) -> None:
        """Streams that are still read go on."""
        await self._monitor.close()
        await self._http.close()

    @property
    def capabilities(self) -> Capabilities:
        return self.found.capabilities

    @property
    def stats(self) -> EngineStats:
        return replace(self._totals, running=self._running)

    def health(self) -> Health:
        return self._monitor.health()

    async def unhealthy(self) -> str:
        """Wait until it cannot be asked, and say why."""
        return await self._monitor.unhealthy()

    async def check(self) -> Health:
        """Check it now, without waiting for the next check at intervals."""
        await self._monitor.check()
        return self._monitor.health()

    async def aborted(self, request_id: str) -> Ledger | None:
        return self._aborted.pop(request_id, None)

    def refusal(self, request: GenerateRequest) -> PenstockError | None:
        """What `submit` would raise for this request without asking the server."""
        tokens, limit = len(request.prompt), self.info.max_model_len
        if tokens >= limit:
            however = f"there are {tokens} tokens in the prompt, and at least one must be left for the output"
            excess = f"{tokens} tokens > {limit - 1} maximum"
            return ContextTooLong.beyond(limit, f"{however}; shorten the prompt", param="messages", excess=excess)
        return self.capabilities.refusal(request)

    async def submit(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if (refusal := self.refusal(request)) is not None:
            raise refusal
        answer = Answer(request, self._vocabulary)
        if (tokens := self._tokens_left(request)) <= 0:
            yield Chunk(request.id, finish_reason="length", ledger=answer.ledger())
            return
        path, body = self._protocol.request(self.found, request, tokens)
        deadline = None if request.deadline is None else asyncio.get_running_loop().time() + request.deadline
        last: Chunk | None = None
        self._running += 1
        try:
            async with aclosing(self._pieces(path, body, deadline)) as pieces:
                async for piece in pieces:
                    if (chunk := answer.chunk(piece)) is None or last is not None:
                        continue
                    if chunk.finish_reason is not None:
                        last = chunk  # usage may yet come
                        if piece.finish_reason is None:
                            break  # a stop token that the server does not know
                    else:
                        yield chunk
            if last is None and not self._protocol.says_finish:
                last = answer.end(tokens)
            if last is None:
                raise Unavailable("the upstream ended the stream in mid-answer", code="closed")
        except DeadlineExceeded as error:
            last = failed(request.id, "deadline", error, None)
        finally:
            self._running -= 1
            self._settle(answer, aborted=last is None)
        last.ledger = answer.ledger()
        yield last

    def _tokens_left(self, request: GenerateRequest) -> int:
        room = self.info.max_model_len - len(request.prompt)
        limit = room if request.params.max_tokens is None else min(request.params.max_tokens, room)
        return limit - len(request.output)

    async def _pieces(self, path: str, body: dict[str, object], deadline: float | None) -> AsyncGenerator[Piece, None]:
        """Until the body ends, so that the connection can be used again. Closing it early closes the connection, which
        servers take as an abort."""
        wait, complete = self._timeouts.first_token, False
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout_at(self._until(wait, deadline)):
                    response = await stack.enter_async_context(self._http.stream("POST", path, body))
                    if response.status != 200:
                        raise await response_error(response)
                events = await stack.enter_async_context(aclosing(response.events()))
                while True:
                    async with asyncio.timeout_at(self._until(wait, deadline)):
                        event = await anext(events, None)
                    if event is None:
                        break
                    if (piece := self._protocol.parse(event)) is None:
                        continue
                    complete = complete or piece.finish_reason is not None
                    if complete:
                        wait = END_SECONDS
                    elif piece.text or piece.token_ids:
                        wait = self._timeouts.next_token
                    yield piece
            except (TimeoutError, Unavailable) as error:
                if not complete:
                    raise await self._lost(error, wait, deadline) from None

    @staticmethod
    def _until(wait: float, deadline: float | None) -> float:
        end = asyncio.get_running_loop().time() + wait
        return end if deadline is None else min(end, deadline)

    async def _lost(self, error: TimeoutError | Unavailable, wait: float, deadline: float | None) -> PenstockError:
        """What a request fails with. Unless its own deadline ended it, or a check shows that the server answers others,
        they would fail here, too."""
        if isinstance(error, TimeoutError):
            if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                return DeadlineExceeded("the deadline passed before the upstream had answered")
            error = Unavailable(f"nothing came from the upstream for {wait:g} s", code="timeout")
        if error.code == FAILED:
            await self._monitor.doubt()
        else:
            self._monitor.lost(error.message, stalled=error.code == "timeout")
        return error

    def _settle(self, answer: Answer, *, aborted: bool) -> None:
        totals, ledger = self._totals, answer.ledger()
        self._totals = replace(
            totals,
            prompt_tokens=totals.prompt_tokens + ledger.prompt_tokens,
            cached_tokens=totals.cached_tokens + ledger.cached_tokens,
            output_tokens=totals.output_tokens + ledger.output_tokens - len(answer.request.output),
        )
        if aborted:
            self._aborted[answer.request.id] = ledger
            if len(self._aborted) > KEPT_LEDGERS:
                self._aborted.popitem(last=False)

    # ------------------------------------------------------------ health

    async def _answers(self) -> None:
        response = await self._http.get(self.found.health_path)
        if response.status != 200:
            raise Unavailable(f"{self.found.health_path} answers {response.status}")

    async def _generates(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        request = GenerateRequest("health", self._vocabulary.tokenizer.encode("a"), params)
        path, body = self._protocol.request(self.found, request, 1)
        await collect(self._http, self._protocol, path, body)
