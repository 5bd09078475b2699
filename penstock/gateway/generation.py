"""Run the choices of one request on an engine, all at once, and hand on each chunk as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from penstock.core.engine import Engine
from penstock.core.errors import EngineFailure, Unavailable
from penstock.core.request import Chunk, FinishReason, GenerateRequest, SamplingParams, TokenLogprob, choice_seed
from penstock.gateway.exchange import Exchange
from penstock.gateway.openai_types import PromptTokensDetails, SamplingFields, Usage
from penstock.observability.metrics import GatewayMetrics
from penstock.text.stream import TextDelta, TextStream
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: Sequence[int]
    text: str | None = None  # as the client sent it; None: token ids were sent


@dataclass(slots=True)
class Choice:
    """One answer in the making."""

    index: int
    prompt: Prompt
    request: GenerateRequest
    stream: TextStream
    first_of_prompt: bool  # several choices share a prompt, whose tokens are billed once
    prompt_only: bool  # only the prompt's log-probabilities are wanted; the step they cost samples a token to drop
    opened: bool = False  # something was sent for it
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


Emit = Callable[[Choice, TextDelta], Awaitable[None]]


def build_choices(
    exchange: Exchange,
    tokenizer: Tokenizer,
    body: SamplingFields,
    prompts: Sequence[tuple[Prompt, SamplingParams]],
    *,
    prompt_only: bool = False,
) -> list[Choice]:
    """`n` choices of each prompt, in the order OpenAI numbers them."""
    choices: list[Choice] = []
    for prompt, params in prompts:
        for number in range(params.n):
            request = GenerateRequest(
                id=f"{exchange.unique}-{len(choices)}",
                prompt=prompt.token_ids,
                params=params,
                seed=choice_seed(params.seed, number),
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
            )
            stream = TextStream(tokenizer, params)
            choices.append(Choice(len(choices), prompt, request, stream, number == 0, prompt_only))
    return choices


class Generation:
    def __init__(self, engine: Engine, metrics: GatewayMetrics, exchange: Exchange, choices: list[Choice]) -> None:
        self.engine = engine
        self.metrics = metrics
        self.exchange = exchange
        self.choices = choices

    async def run(self, emit: Emit) -> None:
        """Returns when every choice has finished. If one fails or the client leaves, all are aborted in the engine."""
        async with self.exchange.cancelled_on_disconnect():
            try:
                if len(self.choices) == 1:
                    await self._run_choice(self.choices[0], emit)
                else:
                    await self._run_all(emit)
            finally:
                self._record()

    async def collect(self) -> None:
        """Run without passing anything on: the choices hold what was generated."""

        async def keep(choice: Choice, delta: TextDelta) -> None:
            choice.logprobs.extend(delta.logprobs or ())

        await self.run(keep)

    async def _run_all(self, emit: Emit) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for choice in self.choices:
                    tasks.create_task(self._run_choice(choice, emit))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run_choice(self, choice: Choice, emit: Emit) -> None:
        chunks = self.engine.submit(choice.request)
        push = choice.stream.push
        last: float | None = None
        try:
            async for chunk in chunks:
                _raise_failure(chunk)
                now = time.monotonic()
                if last is None:
                    self._first_chunk(choice, chunk, now)
                elif count := len(chunk.token_ids):
                    self.metrics.token_gap.observe((now - last) / count, count)
                last = now
                delta = TextDelta("", [], "length") if choice.prompt_only else push(chunk)
                choice.finish_reason = delta.finish_reason
                await emit(choice, delta)
                if delta.finish_reason is not None:
                    return
            raise EngineFailure("the engine ended the stream without a finish reason")
        finally:
            await chunks.aclose()

    def _first_chunk(self, choice: Choice, chunk: Chunk, now: float) -> None:
        self.metrics.first_token.observe(now - self.exchange.arrived)
        self.metrics.queue_time.observe(chunk.queue_seconds)
        choice.cached_tokens = chunk.cached_tokens
        choice.prompt_logprobs = chunk.prompt_logprobs

    def _record(self) -> None:
        usage = self.usage()
        self.exchange.prompt_tokens = usage.prompt_tokens
        self.exchange.output_tokens = usage.completion_tokens
        self.metrics.prompt_tokens += usage.prompt_tokens
        self.metrics.cached_tokens += usage.prompt_tokens_details.cached_tokens
        self.metrics.output_tokens += usage.completion_tokens
        self.metrics.request_time.observe(time.monotonic() - self.exchange.arrived)

    def usage(self) -> Usage:
        prompted = [choice for choice in self.choices if choice.first_of_prompt]
        prompt_tokens = sum(len(choice.prompt.token_ids) for choice in prompted)
        output_tokens = sum(choice.stream.output_tokens for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in prompted)
        return Usage(prompt_tokens, output_tokens, prompt_tokens + output_tokens, PromptTokensDetails(cached))


def _raise_failure(chunk: Chunk) -> None:
    if chunk.finish_reason == "error":
        raise EngineFailure(chunk.error or "the engine could not finish the request")
    if chunk.finish_reason == "abort":
        raise Unavailable("the engine aborted the request", code="aborted")
