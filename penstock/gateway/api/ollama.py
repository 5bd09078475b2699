"""Ollama's API, for clients that were written for it."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, ClassVar

import msgspec

from penstock.core.errors import PenstockError
from penstock.gateway.api import ollama_types as types
from penstock.gateway.api.blocks import Block, BlockAnswer, Step, call_arguments
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.generation import Answer, Generation
from penstock.gateway.api.ollama_reading import OllamaChat, OllamaChatReader, OllamaGenerateReader
from penstock.gateway.api.reading import INLINE_BYTES
from penstock.gateway.api.serving import Incoming, Serving, encode_json
from penstock.gateway.api.text_generation import TextEndpoint, Wanted
from penstock.gateway.errors import renamed
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.limits import Reservation
from penstock.gateway.tenancy.tenants import Tenant

VERSION = "0.12.6"  # of Ollama, whose API this is: clients ask for it to see what they may use
LINES = b"application/x-ndjson"


class OllamaErrors:
    _NAMES: ClassVar = {
        "max_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
        "response_format.json_schema.schema": "format",
        "response_format": "format",
        "stop": "options.stop",
    }

    def status(self, error: PenstockError) -> int:
        return error.status

    def message(self, error: PenstockError) -> str:
        return renamed(error, self._NAMES)[0]

    def body(self, error: PenstockError, request_id: str) -> bytes:
        return encode_json(types.OllamaError(self.message(error)))

    def event(self, error: PenstockError, request_id: str) -> bytes:
        return self.body(error, request_id) + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer(BlockAnswer[OllamaChat]):
    """Lines of JSON. A tool call comes in one piece."""

    __slots__ = ()

    id_prefix = "chatcmpl-"

    def __init__(self, body: OllamaChat, generation: Generation) -> None:
        super().__init__(body, generation, show_reasoning=body.show_thinking)
        self.response.stream_type = LINES

    def first_events(self) -> bytes:
        return b""

    def events_of(self, step: Step, block: Block, text: str) -> bytes:
        if block.kind == "call":
            return self._line("", "", [block]) if step == "close" else b""
        if step != "add":
            return b""
        return self._line(text, "") if block.kind == "text" else self._line("", text)

    async def last_events(self) -> bytes:
        return encode_json(self._finished(self._chunk("", "", (), done=True))) + b"\n"

    async def whole(self) -> types.OllamaChunk:
        text, thinking = (
            "".join(block.text for block in self.blocks.all if block.kind == kind) for kind in ("text", "reasoning")
        )
        calls = [block for block in self.blocks.all if block.kind == "call"]
        return self._finished(self._chunk(text, thinking, calls, done=True))

    def _line(self, text: str, thinking: str, calls: list[Block] | tuple[()] = ()) -> bytes:
        return encode_json(self._chunk(text, thinking, calls, done=False)) + b"\n"

    def _chunk(self, text: str, thinking: str, calls: list[Block] | tuple[()], *, done: bool) -> types.OllamaChunk:
        chunk = types.OllamaChunk(model=self.body.model, created_at=_now(), done=done)
        if self.body.generates:
            chunk.response = text
            if thinking:
                chunk.thinking = thinking
            return chunk
        chunk.message = types.OllamaAnswerMessage(text)
        if thinking:
            chunk.message.thinking = thinking
        if calls:
            made = [types.OllamaFunction(call.name, call_arguments(call.text)) for call in calls]
            chunk.message.tool_calls = [types.OllamaCallMade(call) for call in made]
        return chunk

    def _finished(self, chunk: types.OllamaChunk) -> types.OllamaChunk:
        choice, usage, now = self.choice, self.generation.usage(), time.monotonic()
        submitted = now if choice.submitted is None else choice.submitted
        first = now if choice.first is None else choice.first
        chunk.done_reason = "length" if choice.finish_reason == "length" else "stop"
        chunk.total_duration = nanoseconds(now - self.generation.context.arrived)
        chunk.load_duration = 0
        chunk.prompt_eval_count, chunk.eval_count = usage.prompt_tokens, usage.completion_tokens
        chunk.prompt_eval_duration, chunk.eval_duration = nanoseconds(first - submitted), nanoseconds(now - first)
        return chunk


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def of_no_page(request: Request) -> bool:
    """Clients of Ollama send JSON as any type, or none. That is safe unless a web page does so, which browsers say."""
    return b"origin" not in request.headers


class OllamaEndpoint(TextEndpoint[OllamaChat]):
    answer_type = OllamaAnswer
    requests: ClassVar[msgspec.json.Decoder[Any]]

    def receive(self, request: Request, tenant: Tenant, reservation: Reservation) -> Awaitable[Incoming]:
        return self.serving.receive(request, tenant, reservation, any_type=of_no_page(request))

    async def __call__(
        self, request: Request, response: Response, tenant: Tenant, reservation: Reservation
    ) -> Answer | None:
        incoming = await self.receive(request, tenant, reservation)
        loaded = await self._loaded(incoming, tenant)
        if loaded is None:
            return await self.answer(incoming, response, reservation)
        await response.send(200, encode_json(loaded))
        return None

    async def _loaded(self, incoming: Incoming, tenant: Tenant) -> types.OllamaChunk | None:
        """The answer to a request without a prompt, which clients send so that the model is loaded."""
        if incoming.request.body_size > INLINE_BYTES:
            return None
        asked = decode_json(self.requests, b"".join(incoming.body))
        chunk = types.OllamaChunk(model=asked.model, created_at=_now(), done=True)
        if isinstance(asked, types.OllamaChatRequest):
            chunk.message, given = types.OllamaAnswerMessage(""), bool(asked.messages)
        else:
            chunk.response, given = "", bool(asked.prompt or asked.suffix)
        if given:
            return None
        await self.serving.find(asked.model, tenant)
        chunk.done_reason = "unload" if asked.keep_alive == 0 else "load"
        return chunk

    def wanted(self, body: OllamaChat) -> Wanted:
        """`num_predict` is an upper limit: what does not fit is cut."""
        return Wanted("max_tokens", None, None, None, default=body.most_tokens)


class OllamaChats(OllamaEndpoint):
    endpoint = "/api/chat"
    prompt_param = "messages"
    reader_type = OllamaChatReader  # type: ignore[assignment]
    requests = OllamaChatReader.requests


class OllamaGenerate(OllamaEndpoint):
    endpoint = "/api/generate"
    prompt_param = "prompt"
    reader_type = OllamaGenerateReader  # type: ignore[assignment]
    requests = OllamaGenerateReader.requests


class OllamaStatus:
    """What models there are."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self._shown = msgspec.json.Decoder(types.OllamaShowRequest)
        self._since = datetime.fromtimestamp(serving.created, UTC).isoformat().replace("+00:00", "Z")

    async def tags(self, request: Request, response: Response, tenant: Tenant) -> None:
        await self.serving.adapters.refresh()
        found = [types.OllamaModel(*self._named(name)) for name in self.serving.names(tenant)]
        await response.send(200, encode_json(types.OllamaModels(found)))

    async def running(self, request: Request, response: Response, tenant: Tenant) -> None:
        await self.serving.adapters.refresh()
        found = [
            types.OllamaRunning(
                *self._named(name),
                expires_at="9999-12-31T00:00:00Z",
                context_length=self.serving.model_of(name).engine.info.max_model_len,
            )
            for name in self.serving.names(tenant)
        ]
        await response.send(200, encode_json(types.OllamaRunningModels(found)))

    def _named(self, name: str) -> tuple[str, str, str, str]:
        return name, name, self._since, sha256(name.encode()).hexdigest()

    async def show(self, request: Request, response: Response, tenant: Tenant) -> None:
        asked = await self.serving.read(request, self._shown, any_type=of_no_page(request))
        model, _ = await self.serving.find(asked.model or asked.name, tenant)
        text = model.text
        generates = model.engine.info.task == "generate"
        can = {"tools": text.tools is not None, "thinking": text.reasoning is not None, "insert": text.infill}
        shown = types.OllamaShown(
            modified_at=self._since,
            template=text.tokenizer.chat_template or "",
            model_info={
                "general.architecture": "penstock",
                "penstock.context_length": model.engine.info.max_model_len,
                "penstock.vocab_size": model.engine.info.vocab_size,
            },
            capabilities=["completion", *filter(can.get, can)] if generates else ["embedding"],
        )
        await response.send(200, encode_json(shown))

    async def version(self, request: Request, response: Response, tenant: Tenant) -> None:
        await response.send(200, encode_json(types.OllamaVersion(VERSION)))
