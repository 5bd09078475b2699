"""From requests of Ollama's API to the chats, or the plain prompts, that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.gateway.api import ollama_types as types
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.chat import ChatReader
from penstock.gateway.api.completions import infilling
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.messages import FunctionCall, Message, ToolCall
from penstock.gateway.api.openai_types import ChatRequest, JsonSchemaFormat, ResponseFormat
from penstock.gateway.api.reading import BlamedOn, ModelText, Prompt, Terms
from penstock.gateway.errors import require


class OllamaChat(ChatRequest, kw_only=True):
    """A chat, and what the answer to it must know of the request that it was made of."""

    most_tokens: int | None = None
    generates: bool = False  # the answer is that of /api/generate
    show_thinking: bool = True
    raw: str | None = None  # the prompt, where it is no chat
    suffix: str | None = None


class OllamaChatReader(ChatReader):
    name = "ollama_chat"
    requests = msgspec.json.Decoder(types.OllamaChatRequest)

    def decode(self, body: bytes, terms: Terms) -> OllamaChat:
        asked = decode_json(self.requests, body)
        return OllamaChat(**_fields(asked), messages=_conversation(asked.messages or ()), tools=asked.tools or None)


class OllamaGenerateReader(ChatReader):
    name = "ollama_generate"
    requests = msgspec.json.Decoder(types.OllamaGenerateRequest)
    without_prompt: ClassVar = {**ChatReader.without_prompt, "raw": None, "suffix": None}

    def decode(self, body: bytes, terms: Terms) -> OllamaChat:
        asked = decode_json(self.requests, body)
        prompt = asked.prompt or ""
        chat = OllamaChat(**_fields(asked), messages=[Message(role="user", content=prompt)], generates=True)
        if asked.raw or asked.suffix:
            chat.raw, chat.suffix, chat.messages = prompt, asked.suffix, []
        elif asked.system:
            chat.messages.insert(0, Message(role="system", content=asked.system))
        return chat

    def prompts(self, asked: ChatRequest, text: ModelText, bounds: Bounds, semantic: bool) -> list[Prompt]:
        assert isinstance(asked, OllamaChat)
        if asked.raw is None:
            return super().prompts(asked, text, bounds, semantic)
        if asked.suffix:
            return [infilling(asked.raw, asked.suffix, "prompt", text, bounds)]
        with BlamedOn("prompt", bounds):
            return [Prompt(text.tokenizer.encode(asked.raw, at_most=bounds.prompt_tokens))]


def _fields(asked: types.OllamaRequest) -> dict[str, Any]:
    for name, (values, otherwise) in types.SUPPORTED_VALUES.items():
        value = getattr(asked, name)
        require(value is None or value in values, name, otherwise)
    options = asked.options or types.OllamaOptions()
    most = options.num_predict if options.num_predict is not None and options.num_predict >= 0 else None
    think = asked.think
    return {
        "model": asked.model,
        "stream": asked.stream is not False,
        "most_tokens": most,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": options.seed,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "stop": options.stop or None,
        "response_format": _format(asked.format),
        "reasoning_effort": think if isinstance(think, str) else None,
        "chat_template_kwargs": None if think is None else {"enable_thinking": bool(think)},
        "show_thinking": think is not False,
    }


def _format(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if isinstance(given, dict):
        return ResponseFormat("json_schema", JsonSchemaFormat(given))
    if not given:
        return None
    require(given == "json", "format", 'must be "json" or a JSON schema')
    return ResponseFormat("json_object")


def _conversation(given: Sequence[types.OllamaMessage]) -> list[Message]:
    """Calls have no ids here: results belong to the calls before them, in their order."""
    messages: list[Message] = []
    waiting: list[str] = []  # ids of calls without a result
    for index, message in enumerate(given):
        if message.images:
            raise InvalidRequest(
                f"messages[{index}].images is not supported: this model reads text only",
                param=f"messages[{index}].images",
            )
        turn = Message(role=message.role, content=message.content or "", reasoning_content=message.thinking)
        if message.tool_calls:
            made = [(f"call_{index}_{number}", call.function) for number, call in enumerate(message.tool_calls)]
            turn.tool_calls = [ToolCall(FunctionCall(call.name, call.arguments), id) for id, call in made]
            waiting = [id for id, _ in made]
        if message.role == "tool":
            turn.name, turn.tool_call_id = message.tool_name, waiting.pop(0) if waiting else None
        messages.append(turn)
    return messages
