"""POST /v1/completions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.engine import EngineInfo
from penstock.core.request import MAX_CHOICES, RANGES, SamplingParams, TokenLogprob
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.generation import Choice, Generation, build_choices
from penstock.gateway.api.logprobs import completion_logprobs, prompt_logprobs
from penstock.gateway.api.objectives import reported_tier
from penstock.gateway.api.openai_types import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    TokenIds,
    Usage,
)
from penstock.gateway.api.reading import INLINE_BYTES, Bounds, ModelText, Prompt, Terms, blamed_on, checked_options
from penstock.gateway.api.sampling import output_limit, sampling_params, truncated
from penstock.gateway.api.semantic import similar_completion
from penstock.gateway.api.serving import DONE, Serving, check_token_ids, check_values, encode_json, event
from penstock.gateway.api.slices import joined, shaped, slices
from penstock.gateway.errors import require
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.limits import Reservation
from penstock.gateway.tenancy.tenants import Tenant
from penstock.text.offsets import TextOffsets
from penstock.text.stream import TextDelta
from penstock.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_SEQUENCES = 1024  # prompts times n of one request

_decoder = msgspec.json.Decoder(CompletionRequest)


class CompletionReader:
    """From the bytes of a completion request to its prompts."""

    name = "completion"

    def __init__(self, texts: Mapping[str, ModelText]) -> None:
        self.texts = texts

    def read(self, body: bytes, terms: Terms) -> tuple[CompletionRequest, list[Prompt]]:
        asked = decode_json(_decoder, body, ignore_unknown=terms.ignore_unknown)
        check_values(asked)
        _check(asked)
        bounds = terms.bounds_of(asked.model)
        if asked.truncate_prompt_tokens is not None:
            bounds = bounds._replace(prompt_tokens=bounds.countable)
        prompts = self._tokenize(asked, bounds, terms.semantic)
        return checked_options(asked, prompt="") if len(body) > INLINE_BYTES else asked, prompts

    def _tokenize(self, body: CompletionRequest, bounds: Bounds, semantic: bool) -> list[Prompt]:
        prompts = _split_prompts(body.prompt)
        require(
            len(prompts) * min(body.n or 1, MAX_CHOICES) <= MAX_SEQUENCES,
            "prompt",
            f"times n must be at most {MAX_SEQUENCES} sequences; send several requests",
        )
        return [
            self._prompt(body, prompt, "prompt" if len(prompts) == 1 else f"prompt[{position}]", bounds, semantic)
            for position, prompt in enumerate(prompts)
        ]

    def _prompt(
        self, body: CompletionRequest, prompt: str | TokenIds, param: str, bounds: Bounds, semantic: bool
    ) -> Prompt:
        require(len(prompt) > 0, param, "must not be empty")
        if not isinstance(prompt, str):
            if len(prompt) > bounds.prompt_tokens:
                raise bounds.too_long(param, str(len(prompt)))
            check_token_ids(prompt, param, bounds)
            return Prompt(prompt)
        with blamed_on(param, bounds):
            ids = self.texts[body.model].tokenizer.encode(prompt, at_most=bounds.prompt_tokens)
        require(len(ids) > 0, param, "must not be empty")
        similar = similar_completion(body, prompt) if semantic else None
        return Prompt(ids, prompt if body.echo else None, similar)


class Completions:
    endpoint = "/v1/completions"

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.reader = CompletionReader(serving.texts)

    async def __call__(
        self, request: Request, response: Response, tenant: Tenant, reservation: Reservation
    ) -> CompletionAnswer:
        serving = self.serving
        context, body, found = await serving.accept(request, tenant, reservation, self.endpoint, self.reader)
        info, prompts = context.model.engine.info, []
        async for some in slices([self._cut(info, tenant, body, prompt) for prompt in found]):
            prompts += [(prompt, self._params(info, tenant, body, prompt)) for prompt in some]
        choices = await build_choices(request, context, body, prompts, prompt_only=body.max_tokens == 0)
        generation = Generation(serving.metrics, reservation, response, context, choices)
        return CompletionAnswer(context.model.text.tokenizer, body, generation, response)

    def _cut(self, info: EngineInfo, tenant: Tenant, body: CompletionRequest, prompt: Prompt) -> Prompt:
        """To what `truncate_prompt_tokens` leaves of it."""
        if (keep := body.truncate_prompt_tokens) is None:
            return prompt
        output = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        kept = truncated(prompt.token_ids, keep, output, info, tenant)
        return prompt if len(kept) == len(prompt.token_ids) else replace(prompt, token_ids=kept, text=None)

    def _params(self, info: EngineInfo, tenant: Tenant, body: CompletionRequest, prompt: Prompt) -> SamplingParams:
        requested = 1 if body.max_tokens == 0 else body.max_tokens  # scoring a prompt still takes a step
        limit = output_limit(
            requested,
            DEFAULT_MAX_TOKENS,
            len(prompt.token_ids),
            info,
            tenant,
            prompt_param="prompt",
            param="max_tokens",
        )
        wanted = [count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None]
        return sampling_params(
            body, info, max_tokens=limit, logprobs=body.logprobs, prompt_logprobs=max(wanted, default=None)
        )


class CompletionAnswer:
    """Sends what is generated for a completion request, whole or as a stream of pieces."""

    __slots__ = ("body", "created", "generation", "id", "offsets", "response", "tier", "tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionRequest, generation: Generation, response: Response
    ) -> None:
        self.tokenizer = tokenizer
        self.body = body
        self.generation = generation
        self.response = response
        self.id = f"cmpl-{generation.context.id}"
        self.tier = reported_tier(body.service_tier)
        self.created = int(time.time())
        self.offsets: dict[int, TextOffsets] = {}  # by choice

    def respond(self) -> Awaitable[None]:
        return self._stream() if self.body.stream else self._send()

    async def _send(self) -> None:
        await self.generation.collect()
        choices, top = [], self.body.prompt_logprobs
        for choice in self.generation.choices:
            choices.append(await self._choice(choice, choice.stream.text, choice.token_ids, choice.logprobs))
            if top is not None:
                entries = choice.prompt_logprobs or []
                choices[-1].prompt_logprobs = await shaped(
                    entries, lambda some: prompt_logprobs(self.tokenizer, some, top)
                )
        await self.response.send(200, encode_json(self._completion(choices, self.generation.reported_usage())))

    async def _stream(self) -> None:
        body, generation, response = self.body, self.generation, self.response
        usage_so_far = generation.usage_in_chunks(body)
        with_ids = bool(body.return_token_ids)

        async def emit(choice: Choice, delta: TextDelta) -> None:
            opens = bool(body.echo) and not choice.opened
            if delta.text or delta.logprobs or delta.finish_reason is not None or opens or with_ids:
                piece = await self._choice(choice, delta.text, delta.token_ids, delta.logprobs or ())
                await response.send_events(event(self._completion([piece], usage_so_far())))

        await generation.run(emit)
        reported = generation.reported_usage()
        with_last = usage_so_far() is not UNSET or reported.ledger is not UNSET
        last = event(self._completion([], reported)) if with_last else b""
        await response.end_events(last + DONE)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self.id, self.created, self.body.model, choices, usage, service_tier=self.tier)

    async def _choice(
        self, choice: Choice, text: str, token_ids: list[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionChoice:
        """The next piece of a choice; its first one begins with the prompt when echo was asked for."""
        first, body = not choice.opened, self.body
        choice.opened = True
        echoed = first and bool(body.echo)
        shaped = None if body.logprobs is None else await self._logprobs(choice, logprobs, body.logprobs, echoed)
        piece = CompletionChoice(choice.index, text, shaped, choice.finish_reason)
        if echoed:
            piece.text = self._prompt_text(choice.prompt) + text
        if choice.finish_reason is not None:
            piece.stop_reason = choice.stop_reason
        if body.return_token_ids:
            piece.token_ids = token_ids
            piece.prompt_token_ids = choice.prompt.token_ids if first else UNSET
        return piece

    async def _logprobs(
        self, choice: Choice, logprobs: Sequence[TokenLogprob], top: int, echoed: bool
    ) -> CompletionLogprobs:
        prompt, by_id = choice.prompt, bool(self.body.return_tokens_as_token_ids)
        offsets = self.offsets.setdefault(choice.index, TextOffsets(self.tokenizer))
        entries: list[TokenLogprob | None] = [*((choice.prompt_logprobs if echoed else None) or ()), *logprobs]
        of_prompt = offsets.of_prompt(prompt.token_ids, prompt.text) if echoed else ()
        begins = chain(of_prompt, offsets.of_output(entry.token_id for entry in logprobs))
        parts = [
            completion_logprobs(self.tokenizer, some, prompt.token_ids, top, list(islice(begins, len(some))), by_id)
            async for some in slices(entries)
        ]
        deque(begins, maxlen=0)  # runs to its end, even where nothing is left of it
        if len(parts) == 1:
            return parts[0]
        whole = CompletionLogprobs([], [], [], [])
        for part in parts:
            whole.text_offset += part.text_offset
            whole.token_logprobs += part.token_logprobs
            whole.tokens += part.tokens
        whole.top_logprobs = joined([encode_json(part.top_logprobs) async for some in slices(parts) for part in some])
        return whole

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


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
    require(body.best_of is None or body.best_of == (body.n or 1), "best_of", "is only supported equal to n")
    require(body.max_tokens != 0 or bool(body.echo), "max_tokens", "must be at least 1, or 0 with echo")
    RANGES["logprobs"].check("logprobs", body.logprobs)
    require(not (body.stream and body.prompt_logprobs is not None), "prompt_logprobs", "cannot be streamed")
