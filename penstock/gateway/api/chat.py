"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.errors import InvalidRequest
from penstock.core.request import RANGES
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.generation import Choice, Generation, build_choices
from penstock.gateway.api.logprobs import chat_logprobs, prompt_logprobs
from penstock.gateway.api.objectives import reported_tier
from penstock.gateway.api.openai_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Message,
    TokenizeRequest,
)
from penstock.gateway.api.reading import INLINE_BYTES, ModelText, Prompt, Terms, blamed_on, checked_options
from penstock.gateway.api.sampling import output_limit, sampling_params, truncated
from penstock.gateway.api.semantic import similar_chat
from penstock.gateway.api.serving import DONE, Serving, check_values, encode_json, event
from penstock.gateway.api.slices import shaped
from penstock.gateway.errors import require
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.limits import Reservation
from penstock.gateway.tenancy.tenants import Tenant
from penstock.text.stream import TextDelta
from penstock.text.template_sandbox import RESERVED_NAMES
from penstock.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")

MAX_SPELLING = 6  # bytes of JSON that one byte of text may take, as \u0041
ROOM_FOR_OPTIONS = 2**20  # bytes of a body beside its text, such as white space

_decoder = msgspec.json.Decoder(ChatRequest)


class ChatReader:
    """From the bytes of a chat to its prompt."""

    name = "chat"

    def __init__(self, texts: Mapping[str, ModelText]) -> None:
        self.texts = texts

    def read(self, body: bytes, terms: Terms) -> tuple[ChatRequest, list[Prompt]]:
        if len(body) > ROOM_FOR_OPTIONS and b"truncate_prompt_tokens" not in body:
            self._check_size(body, terms)
        chat = decode_json(_decoder, body, ignore_unknown=terms.ignore_unknown)
        check_values(chat)
        _check(chat)
        bounds = terms.bounds_of(chat.model)
        if chat.truncate_prompt_tokens is not None:
            bounds = bounds._replace(prompt_tokens=bounds.countable)
        with blamed_on("messages", bounds):
            ids = tokenize_chat(self.texts[chat.model], chat, bounds.prompt_tokens)
            prompt = Prompt(ids, similar=similar_chat(chat) if terms.semantic else None)
        if len(body) > INLINE_BYTES:
            chat = checked_options(chat, messages=[], tools=None, chat_template_kwargs=None)
        return chat, [prompt]

    def _check_size(self, body: bytes, terms: Terms) -> None:
        """Refuse what is too long for every model, without decoding it."""
        room = {name: self.texts[name].tokenizer.max_token_bytes * b.prompt_tokens for name, b in terms.bounds.items()}
        largest = max(room, key=room.__getitem__)
        if len(body) > MAX_SPELLING * room[largest] + ROOM_FOR_OPTIONS:
            raise terms.bounds[largest].too_long("messages")


def tokenize_chat(text: ModelText, body: ChatRequest | TokenizeRequest, at_most: int) -> list[int]:
    """Render the conversation and encode it; special tokens come from the template."""
    return text.tokenizer.encode(_render(text, body), add_special_tokens=False, at_most=at_most)


def _render(text: ModelText, body: ChatRequest | TokenizeRequest) -> str:
    messages = body.messages or []
    for position, message in enumerate(messages):
        if message.role not in ROLES:
            param = f"messages[{position}].role"
            raise InvalidRequest(f"{param} must be one of {', '.join(ROLES)}", param=param)
    variables = dict(body.chat_template_kwargs or {})
    if reserved := variables and sorted(RESERVED_NAMES & variables.keys()):
        raise InvalidRequest(f"chat_template_kwargs must not set {reserved[0]}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    continued = bool(body.continue_final_message)
    require(
        not (continued and body.add_generation_prompt),
        "add_generation_prompt",
        "must be false with continue_final_message: the last message is itself the beginning of the answer",
    )
    add_prompt = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    tools = None if isinstance(body, ChatRequest) and body.tool_choice == "none" else body.tools
    tokenizer = text.tokenizer
    rendered = text.template.render(
        msgspec.to_builtins(messages),
        tools=tools,
        add_generation_prompt=add_prompt,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        **variables,
    )
    return _cut_after_last_message(rendered, messages[-1]) if continued else rendered


class ChatCompletions:
    endpoint = "/v1/chat/completions"

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.reader = ChatReader(serving.texts)

    async def __call__(
        self, request: Request, response: Response, tenant: Tenant, reservation: Reservation
    ) -> ChatAnswer:
        serving = self.serving
        context, body, (prompt,) = await serving.accept(request, tenant, reservation, self.endpoint, self.reader)
        info = context.model.engine.info
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        asked = getattr(body, param)
        if (keep := body.truncate_prompt_tokens) is not None:
            prompt = replace(prompt, token_ids=truncated(prompt.token_ids, keep, asked, info, tenant))
        length = len(prompt.token_ids)
        limit = output_limit(asked, None, length, info, tenant, prompt_param="messages", param=param)
        params = sampling_params(
            body, info, max_tokens=limit, logprobs=_logprobs(body), prompt_logprobs=body.prompt_logprobs
        )
        choices = await build_choices(request, context, body, [(prompt, params)])
        generation = Generation(serving.metrics, reservation, response, context, choices)
        return ChatAnswer(context.model.text.tokenizer, body, generation, response)


class ChatAnswer:
    """Sends what is generated for a chat, whole or as a stream of chunks."""

    __slots__ = ("body", "generation", "response", "tokenizer")

    def __init__(self, tokenizer: Tokenizer, body: ChatRequest, generation: Generation, response: Response) -> None:
        self.tokenizer = tokenizer
        self.body = body
        self.generation = generation
        self.response = response

    def respond(self) -> Awaitable[None]:
        return self._stream() if self.body.stream else self._send()

    async def _send(self) -> None:
        body, generation = self.body, self.generation
        await generation.collect()
        answer = ChatCompletion(
            id=f"chatcmpl-{generation.context.id}",
            created=int(time.time()),
            model=body.model,
            choices=[await self._choice(choice) for choice in generation.choices],
            usage=generation.reported_usage(),
            service_tier=reported_tier(body.service_tier),
        )
        if body.prompt_logprobs is not None:
            entries, top = generation.choices[0].prompt_logprobs or [], body.prompt_logprobs
            answer.prompt_logprobs = await shaped(entries, lambda some: prompt_logprobs(self.tokenizer, some, top))
        if body.return_token_ids:
            answer.prompt_token_ids = generation.choices[0].prompt.token_ids
        await self.response.send(200, encode_json(answer))

    async def _choice(self, choice: Choice) -> ChatChoice:
        assert choice.finish_reason is not None
        body, tokenizer = self.body, self.tokenizer
        by_id = bool(body.return_tokens_as_token_ids)
        logprobs = None
        if body.logprobs:
            content = await shaped(choice.logprobs, lambda some: chat_logprobs(tokenizer, some, by_id).content)
            logprobs = ChatLogprobs(content)
        message = ChatMessage("assistant", choice.stream.text)
        token_ids = choice.token_ids if body.return_token_ids else UNSET
        return ChatChoice(choice.index, message, logprobs, choice.finish_reason, choice.stop_reason, token_ids)

    async def _stream(self) -> None:
        body, generation, response = self.body, self.generation, self.response
        completion_id, created, model = f"chatcmpl-{generation.context.id}", int(time.time()), body.model
        usage_so_far = generation.usage_in_chunks(body)
        tier = reported_tier(body.service_tier)
        tokenizer, by_id = self.tokenizer, bool(body.return_tokens_as_token_ids)
        with_ids = bool(body.return_token_ids)

        def one(choice: ChatChunkChoice, prompt: Sequence[int] | UnsetType = UNSET) -> bytes:
            return event(ChatChunk(completion_id, created, model, [choice], usage_so_far(), tier, prompt))

        async def emit(choice: Choice, delta: TextDelta) -> None:
            index = choice.index
            events = b""
            if not choice.opened:
                choice.opened = True
                prompt = choice.prompt.token_ids if with_ids else UNSET
                events = one(ChatChunkChoice(index, ChatDelta("assistant", "")), prompt)
            token_ids = delta.token_ids if with_ids else UNSET
            if delta.text or delta.logprobs or token_ids:
                logprobs = chat_logprobs(tokenizer, delta.logprobs, by_id) if delta.logprobs else None
                events += one(ChatChunkChoice(index, ChatDelta(content=delta.text), logprobs, token_ids=token_ids))
            if delta.finish_reason is not None:
                events += one(ChatChunkChoice(index, ChatDelta(), None, delta.finish_reason, delta.stop_matched))
            if events:
                await response.send_events(events)

        await generation.run(emit)
        reported = generation.reported_usage()
        with_last = usage_so_far() is not UNSET or reported.ledger is not UNSET
        last = event(ChatChunk(completion_id, created, model, [], reported, tier)) if with_last else b""
        await response.end_events(last + DONE)


def _check(body: ChatRequest) -> None:
    if body.response_format is not None:
        kind = body.response_format.type
        require(kind == "text", "response_format", f'of type {kind[:40]!r} is not supported; only "text" is')
    top = body.top_logprobs
    require(not top or bool(body.logprobs), "top_logprobs", "needs logprobs to be true")
    RANGES["logprobs"].check("top_logprobs", top)
    require(not (body.stream and body.prompt_logprobs is not None), "prompt_logprobs", "cannot be streamed")


def _logprobs(body: ChatRequest) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


def _cut_after_last_message(rendered: str, last: Message) -> str:
    """Without what the template puts after a finished message, so that the model goes on writing it."""
    text = last.content if isinstance(last.content, str) else ""
    require(
        last.role == "assistant" and bool(text.strip()),
        "continue_final_message",
        "needs a last message of the assistant with text",
    )
    for wording in (text, text.strip()):  # templates often strip
        start = rendered.rfind(wording)
        if start >= 0:
            return rendered[: start + len(wording)]
    raise InvalidRequest(
        "continue_final_message cannot find the last message in what the chat template made of it",
        param="continue_final_message",
    )
