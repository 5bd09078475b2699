"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.request import MAX_CHOICES, MAX_LOGPROBS, SamplingParams, TokenLogprob
from penstock.gateway.errors import require
from penstock.gateway.exchange import Exchange
from penstock.gateway.generation import Choice, Generation, Prompt, build_choices
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
from penstock.gateway.sampling import output_limit, sampling_params, truncated
from penstock.gateway.semantic import similar_completion
from penstock.gateway.serving import DONE, Serving, encode_json, event, off_loop_if_long
from penstock.text.offsets import TextOffsets
from penstock.text.stream import TextDelta

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_SEQUENCES = 1024  # prompts times n of one request

_decoder = msgspec.json.Decoder(CompletionRequest)


class Completions:
    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    async def __call__(self, exchange: Exchange) -> None:
        body = await self.serving.accept(exchange, _decoder)
        _check(body)
        prompts = [(prompt, self._params(exchange, body, prompt)) for prompt in await self._tokenize(exchange, body)]
        prompt_only = body.max_tokens == 0
        choices = build_choices(exchange, self.serving.tokenizer, body, prompts, prompt_only=prompt_only)
        generation = Generation(self.serving.engine, self.serving.metrics, self.serving.metering, exchange, choices)
        shape = _Shape(self.serving, body, exchange)
        if body.stream:
            await _stream(exchange, generation, shape)
        else:
            await _answer(exchange, generation, shape)

    async def _tokenize(self, exchange: Exchange, body: CompletionRequest) -> list[Prompt]:
        prompts = _split_prompts(body.prompt)
        require(
            len(prompts) * min(body.n or 1, MAX_CHOICES) <= MAX_SEQUENCES,
            "prompt",
            f"times n must be at most {MAX_SEQUENCES} sequences; send several requests",
        )
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encode = self.serving.tokenizer.encode
        encoded = await off_loop_if_long(
            sum(map(len, texts)), lambda: [encode(p) if isinstance(p, str) else p for p in prompts], "prompt"
        )
        for position, token_ids in enumerate(encoded):
            param = "prompt" if len(prompts) == 1 else f"prompt[{position}]"
            require(len(token_ids) > 0, param, "must not be empty")
            self.serving.check_token_ids(token_ids, param)
        semantic = "/v1/completions" in self.serving.semantic_routes
        keep, info = body.truncate_prompt_tokens, self.serving.engine.info
        output = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        made = []
        for prompt, ids in zip(prompts, encoded, strict=True):
            text = prompt if isinstance(prompt, str) else None
            kept = ids if keep is None else truncated(ids, keep, output, info, exchange.tenant)
            similar = similar_completion(body, text) if semantic else None
            made.append(Prompt(kept, text if len(kept) == len(ids) else None, similar))
        return made

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
        self.offsets: dict[int, TextOffsets] = {}  # by choice

    def completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self.id, self.created, self.body.model, choices, usage, service_tier=self.tier)

    def choice(
        self, choice: Choice, text: str, token_ids: list[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionChoice:
        """The next piece of a choice; its first one begins with the prompt when echo was asked for."""
        first, body = not choice.opened, self.body
        choice.opened = True
        echoed = first and bool(body.echo)
        shaped = None if body.logprobs is None else self._logprobs(choice, logprobs, body.logprobs, echoed)
        piece = CompletionChoice(choice.index, text, shaped, choice.finish_reason)
        if echoed:
            piece.text = self._prompt_text(choice.prompt) + text
        if choice.finish_reason is not None:
            piece.stop_reason = choice.stop_reason
        if body.return_token_ids:
            piece.token_ids = token_ids
            piece.prompt_token_ids = choice.prompt.token_ids if first else UNSET
        return piece

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob], top: int, echoed: bool) -> CompletionLogprobs:
        tokenizer, prompt = self.tokenizer, choice.prompt
        offsets = self.offsets.setdefault(choice.index, TextOffsets(tokenizer))
        entries: list[TokenLogprob | None] = []
        begins: list[int] = []
        if echoed:
            entries += choice.prompt_logprobs or ()
            begins += offsets.of_prompt(prompt.token_ids, prompt.text)
        entries += logprobs
        begins += offsets.of_output(entry.token_id for entry in logprobs)
        by_id = bool(self.body.return_tokens_as_token_ids)
        return completion_logprobs(tokenizer, entries, prompt.token_ids, top, begins, by_id)

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


async def _answer(exchange: Exchange, generation: Generation, shape: _Shape) -> None:
    await generation.collect()
    choices = []
    for choice in generation.choices:
        choices.append(shape.choice(choice, choice.stream.text, choice.token_ids, choice.logprobs))
        if shape.body.prompt_logprobs is not None:
            entries = choice.prompt_logprobs or []
            choices[-1].prompt_logprobs = prompt_logprobs(shape.tokenizer, entries, shape.body.prompt_logprobs)
    await exchange.send(200, encode_json(shape.completion(choices, generation.reported_usage())))


async def _stream(exchange: Exchange, generation: Generation, shape: _Shape) -> None:
    usage_so_far = generation.usage_in_chunks(shape.body)
    with_ids = bool(shape.body.return_token_ids)

    async def emit(choice: Choice, delta: TextDelta) -> None:
        opens = bool(shape.body.echo) and not choice.opened
        if delta.text or delta.logprobs or delta.finish_reason is not None or opens or with_ids:
            piece = shape.choice(choice, delta.text, delta.token_ids, delta.logprobs or ())
            await exchange.send_events(event(shape.completion([piece], usage_so_far())))

    await generation.run(emit)
    reported = generation.reported_usage()
    with_last = usage_so_far() is not UNSET or reported.ledger is not UNSET
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
    require(body.best_of is None or body.best_of == (body.n or 1), "best_of", "is only supported equal to n")
    require(body.max_tokens != 0 or bool(body.echo), "max_tokens", "must be at least 1, or 0 with echo")
    top = body.logprobs
    require(top is None or 0 <= top <= MAX_LOGPROBS, "logprobs", f"must be between 0 and {MAX_LOGPROBS}")
    require(not (body.stream and body.prompt_logprobs is not None), "prompt_logprobs", "cannot be streamed")
