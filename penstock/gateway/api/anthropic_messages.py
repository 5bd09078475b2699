"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the chats of this server."""

from __future__ import annotations

import msgspec

from penstock.core.errors import (
    BudgetSpent,
    ContextTooLong,
    Forbidden,
    NotFound,
    Overloaded,
    PenstockError,
    RequestTooLarge,
    Unauthorized,
    Unavailable,
)
from penstock.gateway.api import anthropic_types as types
from penstock.gateway.api.anthropic_reading import NO_THREADS, AnthropicChat, CountReader, MessagesReader
from penstock.gateway.api.blocks import Block, BlockAnswer, Step, call_arguments
from penstock.gateway.api.generation import Answer, Generation
from penstock.gateway.api.serving import Incoming, Serving, encode_json
from penstock.gateway.api.text_generation import TextEndpoint, Wanted
from penstock.gateway.errors import renamed
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.limits import Reservation
from penstock.gateway.tenancy.tenants import Tenant

# What Anthropic calls the fields of a chat, or parts of their paths.
NAMES = {
    ".function.parameters": ".input_schema",
    ".function": "",
    "response_format.json_schema": "output_config.format",
    "continue_final_message": "messages",
    "chat_template_kwargs": "messages",
}


class AnthropicErrors:
    """`{"type": "error", "error": {type, message}, "request_id"}`."""

    _KINDS: tuple[tuple[type[PenstockError], str], ...] = (
        (RequestTooLarge, "request_too_large"),
        (Unauthorized, "authentication_error"),
        (Forbidden, "permission_error"),
        (NotFound, "not_found_error"),
        (BudgetSpent, "billing_error"),
        (Overloaded, "rate_limit_error"),
        (Unavailable, "overloaded_error"),
    )

    def status(self, error: PenstockError) -> int:
        return error.status

    def message(self, error: PenstockError) -> str:
        message, param = renamed(error, NAMES)
        if isinstance(error, ContextTooLong):
            return f"prompt is too long: {error.excess + '. ' if error.excess else ''}{message}"
        return message if param is None or param in message else f"{param}: {message}"

    def body(self, error: PenstockError, request_id: str) -> bytes:
        kind = next((kind for of, kind in self._KINDS if isinstance(error, of)), None)
        if kind is None:
            by_status = {408: "timeout_error", 504: "timeout_error"}
            kind = by_status.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        detail = types.AnthropicErrorDetail(kind, self.message(error))
        if error.code == NO_THREADS:
            detail.details = types.AnthropicErrorCause(NO_THREADS, ["thread"])
        return encode_json(types.AnthropicErrorBody(detail, request_id))

    def event(self, error: PenstockError, request_id: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % self.body(error, request_id)


def _event(data: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(data.__struct_config__.tag).encode(), encode_json(data))


class MessagesAnswer(BlockAnswer[AnthropicChat]):
    __slots__ = ()

    id_prefix = "msg_"

    def __init__(self, body: AnthropicChat, generation: Generation) -> None:
        super().__init__(body, generation, show_reasoning=body.show_thinking)

    async def whole(self) -> types.AnthropicMessage:
        content = [self._content(block) for block in self.blocks.all]
        return types.AnthropicMessage(self.id, self.body.model, content, self._usage(), *self._stop())

    def first_events(self) -> bytes:
        message = types.AnthropicMessage(self.id, self.body.model, [], self._usage())
        return _event(types.MessageStart(message)) + _event(types.Ping())

    async def last_events(self) -> bytes:
        last = types.MessageDelta(types.StopDelta(*self._stop()), self._usage())
        return _event(last) + _event(types.MessageStop())

    def events_of(self, step: Step, block: Block, text: str) -> bytes:
        index = block.index
        if step == "add":
            return self._delta(index, block, text)
        if step == "close":
            signed = b""
            if block.kind == "reasoning":
                signed = _event(types.BlockDelta(index, types.SignatureAdded(self.id)))
            return signed + _event(types.BlockStop(index))
        empty: types.Content = types.TextContent("")
        if block.kind == "reasoning":
            empty = types.ThinkingContent("", "")
        elif block.kind == "call":
            empty = types.ToolUseContent(block.id, block.name, {})
        return _event(types.BlockStart(index, empty))

    def _delta(self, index: int, block: Block, text: str) -> bytes:
        if block.kind == "text":
            return _event(types.BlockDelta(index, types.TextAdded(text)))
        if block.kind == "call":
            return _event(types.BlockDelta(index, types.InputAdded(text)))
        return b"" if self.body.omit_thinking else _event(types.BlockDelta(index, types.ThinkingAdded(text)))

    def _content(self, block: Block) -> types.Content:
        if block.kind == "text":
            return types.TextContent(block.text)
        if block.kind == "call":
            return types.ToolUseContent(block.id, block.name, call_arguments(block.text))
        return types.ThinkingContent("" if self.body.omit_thinking else block.text, self.id)

    def _usage(self) -> types.MessageUsage:
        usage = self.generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return types.MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached, 0, "standard")

    def _stop(self) -> tuple[types.StopReason, str | None]:
        choice = self.choice
        if choice.finish_reason == "length":
            room = self.generation.engine.info.max_model_len - len(choice.prompt.token_ids)
            return ("model_context_window_exceeded" if choice.request.params.max_tokens == room else "max_tokens"), None
        if isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        return ("tool_use" if choice.stream.calls else "end_turn"), None


class Messages(TextEndpoint[AnthropicChat]):
    endpoint = "/v1/messages"
    prompt_param = "messages"
    reader_type = MessagesReader  # type: ignore[assignment]
    answer_type = MessagesAnswer

    async def __call__(
        self, request: Request, response: Response, tenant: Tenant, reservation: Reservation
    ) -> Answer | None:
        response.headers[b"request-id"] = request.id.encode()
        return await super().__call__(request, response, tenant, reservation)

    def wanted(self, body: AnthropicChat) -> Wanted:
        """`max_tokens` must be given and is often more than there is room for, so it is no more than an upper limit."""
        return Wanted("max_tokens", None, None, None, default=body.max_tokens)


class CountTokens:
    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self._reader = CountReader(serving.texts)

    async def __call__(self, request: Request, response: Response, tenant: Tenant) -> None:
        incoming = Incoming(request, tenant, await self.serving.body(request, tenant))
        answer, *_ = await self.serving.parse(incoming, self._reader)
        await response.send(200, answer)
