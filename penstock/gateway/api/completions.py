"""POST /v1/completions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.errors import InvalidRequest
from penstock.core.request import MAX_CHOICES, RANGES, TokenLogprob
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.choices import Choice
from penstock.gateway.api.generation import Emit, Generation
from penstock.gateway.api.logprobs import completion_logprobs, prompt_logprobs
from penstock.gateway.api.openai_types import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    TokenIds,
    Usage,
)
from penstock.gateway.api.reading import BlamedOn, ModelText, Prompt
from penstock.gateway.api.semantic import similar_completion
from penstock.gateway.api.serving import check_token_ids, encode_json, event
from penstock.gateway.api.slices import joined, shaped, slices
from penstock.gateway.api.text_generation import ChunkedAnswer, TextEndpoint, TextReader, Wanted
from penstock.gateway.errors import require
from penstock.text.offsets import TextOffsets
from penstock.text.stream import TextDelta

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_SEQUENCES = 1024  # prompts times n of one request


class CompletionReader(TextReader[CompletionRequest]):
    name = "completion"
    decoder = msgspec.json.Decoder(CompletionRequest)
    without_prompt: ClassVar = {"prompt": "", "suffix": None}

    def check(self, asked: CompletionRequest) -> None:
        require(asked.best_of is None or asked.best_of == (asked.n or 1), "best_of", "is only supported equal to n")
        require(asked.max_tokens != 0 or bool(asked.echo), "max_tokens", "must be at least 1, or 0 with echo")
        RANGES["logprobs"].check("logprobs", asked.logprobs)
        for name in ("echo", "truncate_prompt_tokens") if asked.suffix else ():
            require(not getattr(asked, name), name, "cannot be combined with suffix")

    def prompts(self, asked: CompletionRequest, text: ModelText, bounds: Bounds, semantic: bool) -> list[Prompt]:
        prompts = split_inputs(asked.prompt, "prompt")
        require(
            len(prompts) * min(asked.n or 1, MAX_CHOICES) <= MAX_SEQUENCES,
            "prompt",
            f"times n must be at most {MAX_SEQUENCES} sequences; send several requests",
        )
        params = ["prompt"] if len(prompts) == 1 else [f"prompt[{position}]" for position in range(len(prompts))]
        return [
            self._prompt(asked, prompt, param, text, bounds, semantic)
            for prompt, param in zip(prompts, params, strict=True)
        ]

    def _prompt(
        self,
        asked: CompletionRequest,
        prompt: str | TokenIds,
        param: str,
        text: ModelText,
        bounds: Bounds,
        semantic: bool,
    ) -> Prompt:
        require(len(prompt) > 0 or bool(asked.suffix), param, "must not be empty")
        if asked.suffix:
            return infilling(prompt, asked.suffix, param, text, bounds)
        if not isinstance(prompt, str):
            if len(prompt) > bounds.prompt_tokens:
                raise bounds.too_long(param, str(len(prompt)))
            check_token_ids(prompt, param, bounds)
            return Prompt(prompt)
        with BlamedOn(param, bounds):
            ids = text.tokenizer.encode(prompt, at_most=bounds.prompt_tokens)
        require(len(ids) > 0, param, "must not be empty")
        similar = similar_completion(asked, prompt) if semantic else None
        return Prompt(ids, prompt if asked.echo else None, similar)


def infilling(
    prompt: str | TokenIds,
    suffix: str,
    param: str,
    text: ModelText,
    bounds: Bounds,
    others: Sequence[tuple[str, str]] = (),
    keep_free: int = 0,
) -> Prompt:
    """`others`: names and pieces of other files, as far as they fit."""
    if text.infill is None:
        message = "suffix is not supported by this model: its tokenizer has no tokens for filling in the middle"
        raise InvalidRequest(message, param="suffix")
    if not isinstance(prompt, str):
        raise InvalidRequest(f"{param} must be text beside a suffix, not token ids", param=param)
    with BlamedOn(param, bounds):
        return Prompt(text.infill.prompt(text.tokenizer, prompt, suffix, bounds.prompt_tokens, others, keep_free))


def split_inputs(given: str | list[str | int | TokenIds], param: str) -> list[str | TokenIds]:
    """OpenAI's four forms: a text, token ids, texts, lists of token ids."""
    if isinstance(given, str):
        return [given]
    require(len(given) > 0, param, "must not be empty")
    token_ids = [item for item in given if isinstance(item, int)]
    if not token_ids:
        return [item for item in given if not isinstance(item, int)]
    require(len(token_ids) == len(given), param, "must not mix token ids with texts or lists")
    return [token_ids]


class CompletionAnswer(ChunkedAnswer[CompletionRequest]):
    __slots__ = ("offsets",)

    id_prefix = "cmpl-"

    def __init__(self, body: CompletionRequest, generation: Generation) -> None:
        super().__init__(body, generation)
        self.offsets: dict[int, TextOffsets] = {}  # by choice

    async def whole(self) -> Completion:
        choices, top = [], self.body.prompt_logprobs
        for choice in self.generation.choices:
            choices.append(await self._choice(choice, choice.stream.text, choice.token_ids, choice.logprobs))
            if top is not None:
                entries = choice.prompt_logprobs or []
                choices[-1].prompt_logprobs = await shaped(
                    entries, lambda some: prompt_logprobs(self.tokenizer, some, top)
                )
        return self._completion(choices, self.generation.reported_usage())

    def emitter(self, usage_so_far: Callable[[], Usage | UnsetType | None]) -> Emit:
        body, response = self.body, self.response
        with_ids = bool(body.return_token_ids)

        async def emit(choice: Choice, delta: TextDelta) -> None:
            opens = bool(body.echo) and not choice.opened
            if delta.text or delta.logprobs or delta.finish_reason is not None or opens or with_ids:
                piece = await self._choice(choice, delta.text, delta.token_ids, delta.logprobs or ())
                await response.send_events(event(self._completion([piece], usage_so_far())))

        return emit

    def last_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

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


class Completions(TextEndpoint[CompletionRequest]):
    endpoint = "/v1/completions"
    prompt_param = "prompt"
    reader_type = CompletionReader
    answer_type = CompletionAnswer

    def wanted(self, body: CompletionRequest) -> Wanted:
        prompt_only = body.max_tokens == 0
        tokens = 1 if prompt_only else body.max_tokens  # scoring a prompt still takes a step
        of_prompt = [n for n in (body.prompt_logprobs, body.logprobs if body.echo else None) if n is not None]
        return Wanted(
            "max_tokens", tokens, body.logprobs, max(of_prompt, default=None), prompt_only, DEFAULT_MAX_TOKENS
        )
