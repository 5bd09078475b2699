"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.request import MAX_CHOICES, MAX_LOGPROBS, SamplingParams, TokenLogprob
from penstock.gateway.errors import decode_json, require
from penstock.gateway.exchange import Exchange
from penstock.gateway.generation import Choice, Generation, build_choices
from penstock.gateway.logprobs import completion_logprobs, prompt_logprobs
from penstock.gateway.objectives import reported_tier
from penstock.gateway.openai_types import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    TokenIds,
    Usage,
)
from penstock.gateway.reading import INLINE_BYTES, Bounds, Prompt, blamed_on, checked_options
from penstock.gateway.sampling import output_limit, sampling_params
from penstock.gateway.semantic import similar_completion
from penstock.gateway.serving import DONE, Serving, check_token_ids, encode_json, event
from penstock.gateway.slices import SLICE, joined, shaped, slices
from penstock.text.stream import TextDelta
from penstock.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_SEQUENCES = 1024  # prompts times n of one request

_decoder = msgspec.json.Decoder(CompletionRequest)


class CompletionReader:
    """From the bytes of a completion request to its prompts."""

    name = "completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def read(self, body: bytes, bounds: Bounds) -> tuple[CompletionRequest, list[Prompt]]:
        asked = decode_json(_decoder, body)
        _check(asked)
        prompts = self._tokenize(asked, bounds)
        return checked_options(asked, prompt="") if len(body) > INLINE_BYTES else asked, prompts

    def _tokenize(self, body: CompletionRequest, bounds: Bounds) -> list[Prompt]:
        prompts = _split_prompts(body.prompt)
        require(
            len(prompts) * min(body.n or 1, MAX_CHOICES) <= MAX_SEQUENCES,
            "prompt",
            f"times n must be at most {MAX_SEQUENCES} sequences; send several requests",
        )
        return [
            self._prompt(body, prompt, "prompt" if len(prompts) == 1 else f"prompt[{position}]", bounds)
            for position, prompt in enumerate(prompts)
        ]

    def _prompt(self, body: CompletionRequest, prompt: str | TokenIds, param: str, bounds: Bounds) -> Prompt:
        require(len(prompt) > 0, param, "must not be empty")
        if not isinstance(prompt, str):
            if len(prompt) > bounds.prompt_tokens:
                raise bounds.too_long(param, str(len(prompt)))
            check_token_ids(prompt, param, bounds)
            return Prompt(prompt)
        with blamed_on(param, bounds):
            ids = self.tokenizer.encode(prompt, at_most=bounds.prompt_tokens)
        require(len(ids) > 0, param, "must not be empty")
        similar = similar_completion(body, prompt) if bounds.semantic else None
        return Prompt(ids, prompt if body.echo else None, similar)


class Completions:
    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.reader = CompletionReader(serving.tokenizer)

    async def __call__(self, exchange: Exchange) -> None:
        body, found = await self.serving.accept(exchange, self.reader)
        prompts = [(prompt, self._params(exchange, body, prompt)) async for some in slices(found) for prompt in some]
        prompt_only = body.max_tokens == 0
        choices = await build_choices(
            exchange, self.serving.tokenizer, body, prompts, self.serving.prefixes, prompt_only=prompt_only
        )
        generation = Generation(self.serving.engine, self.serving.metrics, self.serving.metering, exchange, choices)
        shape = _Shape(self.serving, body, exchange)
        if body.stream:
            await _stream(exchange, generation, shape)
        else:
            await _answer(exchange, generation, shape)

    def _params(self, exchange: Exchange, body: CompletionRequest, prompt: Prompt) -> SamplingParams:
        info = self.serving.engine.info
        requested = 1 if body.max_tokens == 0 else body.max_tokens  # scoring a prompt still takes a step
        limit = output_limit(
            requested,
            DEFAULT_MAX_TOKENS,
            len(prompt.token_ids),
            info,
            exchange.tenant,
            prompt_param="prompt",
            param="max_tokens",
        )
        wanted = [count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None]
        return sampling_params(
            body, info, max_tokens=limit, logprobs=body.logprobs, prompt_logprobs=max(wanted, default=None)
        )


class _Shape:
    """Turns what was generated into the JSON of choices, whole or piece by piece."""

    def __init__(self, serving: Serving, body: CompletionRequest, exchange: Exchange) -> None:
        self.tokenizer = serving.tokenizer
        self.body = body
        self.id = f"cmpl-{exchange.unique}"
        self.tier = reported_tier(body.service_tier)
        self.created = int(time.time())
        self.offsets: dict[int, int] = {}  # by choice: where its next token begins in its text

    def completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self.id, self.created, self.body.model, choices, usage, service_tier=self.tier)

    async def choice(self, choice: Choice, text: str, logprobs: Sequence[TokenLogprob]) -> CompletionChoice:
        """The next piece of a choice; its first one begins with the prompt when echo was asked for."""
        echoed = bool(self.body.echo) and not choice.opened
        choice.opened = True
        shaped = None
        if self.body.logprobs is not None:
            entries = [*(choice.prompt_logprobs or ()), *logprobs] if echoed else logprobs
            offset = self.offsets.get(choice.index, 0)
            shaped = await self._logprobs(entries, choice.prompt.token_ids, self.body.logprobs, offset)
            self.offsets[choice.index] = offset + sum(map(len, shaped.tokens))
        text = self._prompt_text(choice.prompt) + text if echoed else text
        return CompletionChoice(choice.index, text, shaped, choice.finish_reason)

    async def _logprobs(
        self, entries: Sequence[TokenLogprob | None], prompt_ids: Sequence[int], top: int, offset: int
    ) -> CompletionLogprobs:
        if len(entries) <= SLICE:
            return completion_logprobs(self.tokenizer, entries, prompt_ids, top, offset)
        whole, alternatives = CompletionLogprobs([], [], [], []), []
        async for some in slices(entries):
            part = completion_logprobs(self.tokenizer, some, prompt_ids, top, offset)
            offset += sum(map(len, part.tokens))
            whole.text_offset += part.text_offset
            whole.token_logprobs += part.token_logprobs
            whole.tokens += part.tokens
            alternatives.append(encode_json(part.top_logprobs))
        whole.top_logprobs = joined(alternatives)
        return whole

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


async def _answer(exchange: Exchange, generation: Generation, shape: _Shape) -> None:
    await generation.collect()
    choices = []
    for choice in generation.choices:
        choices.append(await shape.choice(choice, choice.stream.text, choice.logprobs))
        if shape.body.prompt_logprobs is not None:
            entries, top = choice.prompt_logprobs or [], shape.body.prompt_logprobs
            choices[-1].prompt_logprobs = await shaped(
                entries,
                lambda some, top=top: prompt_logprobs(shape.tokenizer, some, top),  # type: ignore[misc]
            )
    await exchange.send(200, encode_json(shape.completion(choices, generation.reported_usage())))


async def _stream(exchange: Exchange, generation: Generation, shape: _Shape) -> None:
    include_usage = bool(shape.body.stream_options and shape.body.stream_options.include_usage)
    usage = None if include_usage else UNSET

    async def emit(choice: Choice, delta: TextDelta) -> None:
        opens = bool(shape.body.echo) and not choice.opened
        if delta.text or delta.logprobs or delta.finish_reason is not None or opens:
            piece = await shape.choice(choice, delta.text, delta.logprobs or ())
            await exchange.send_events(event(shape.completion([piece], usage)))

    await generation.run(emit)
    reported = generation.reported_usage()
    with_last = include_usage or reported.ledger is not UNSET
    last = event(shape.completion([], reported)) if with_last else b""
    await exchange.end_events(last + DONE)


def _split_prompts(prompt: str | list[str | int | TokenIds]) -> list[str | TokenIds]:
    """OpenAI's four forms: a text, token ids, texts, lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    require(len(prompt) > 0, "prompt", "must not be empty")
    token_ids = [item for item in prompt if isinstance(item, int)]
    if not token_ids:
        return [item for item in prompt if not isinstance(item, int)]
    require(len(token_ids) == len(prompt), "prompt", "must not mix token ids with texts or lists")
    return [token_ids]


def _check(body: CompletionRequest) -> None:
    require(body.suffix is None, "suffix", "is not supported")
    require(body.best_of is None or body.best_of == (body.n or 1), "best_of", "is only supported equal to n")
    require(body.max_tokens != 0 or bool(body.echo), "max_tokens", "must be at least 1, or 0 with echo")
    top = body.logprobs
    require(top is None or 0 <= top <= MAX_LOGPROBS, "logprobs", f"must be between 0 and {MAX_LOGPROBS}")
    require(not (body.stream and body.prompt_logprobs is not None), "prompt_logprobs", "cannot be streamed")
