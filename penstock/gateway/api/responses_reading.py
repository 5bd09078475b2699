"""From a request of OpenAI's Responses API to the chat that it means.

What earlier responses hold of the conversation is put before the body by the endpoint (`with_history`), so that readers
in another process have all they need.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from penstock.core.errors import ContextTooLong, InvalidRequest
from penstock.gateway.api import responses_types as types
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.chat import ROLES, ChatReader, count_chat
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.messages import FunctionCall, Message, ToolCall
from penstock.gateway.api.openai_types import ChatRequest, JsonSchemaFormat, ResponseFormat
from penstock.gateway.api.reading import LENGTH, ModelText, Prompt, Terms
from penstock.gateway.api.serving import encode_json
from penstock.gateway.errors import require

INCLUDABLE = (types.ENCRYPTED_REASONING,)

_requests = msgspec.json.Decoder(types.ResponsesRequest)
_counts = msgspec.json.Decoder(types.InputTokensRequest)


class ResponsesChat(ChatRequest, kw_only=True):
    """A chat, and what the answer to it must know of the request that it was made of."""

    echo: bytes  # of `Echo`, as JSON
    items: bytes  # the conversation up to the answer, as JSON; empty if the response is not stored
    background: bool = False
    encrypted_reasoning: bool = False
    truncates: bool = False  # the oldest messages go if all of them are too long


class Head(msgspec.Struct):
    """What a request needs of earlier responses."""

    previous: str | None
    references: list[str]  # ids of items


class History(msgspec.Struct):
    items: list[types.InputItem]  # of the previous response
    referenced: dict[str, types.InputItem]


_histories = msgspec.json.Decoder(History)


def with_history(history: bytes, body: list[bytes]) -> list[bytes]:
    """The body of a request behind the JSON of a `History`, or behind nothing."""
    return [LENGTH.pack(len(history)), history, *body]


def _without_history(given: bytes) -> tuple[bytes, History]:
    (length,) = LENGTH.unpack_from(given)
    start = LENGTH.size + length
    return given[start:], _histories.decode(given[LENGTH.size : start]) if length else History([], {})


class HeadReader:
    name = "responses_head"

    def __init__(self, texts: Mapping[str, ModelText]) -> None:
        pass

    def read(self, body: bytes, terms: Terms) -> tuple[Head, list[Prompt]]:
        asked = decode_json(_counts, body, ignore_unknown=terms.ignore_unknown)  # which have all that others have
        items = asked.input if isinstance(asked.input, list) else []
        references = [item.id for item in items if item.type == "item_reference" and item.id is not None]
        return Head(asked.previous_response_id, references), []


class ResponsesReader(ChatReader):
    name = "responses"

    def decode(self, body: bytes, terms: Terms) -> ResponsesChat:
        body, history = _without_history(body)
        return _chat(decode_json(_requests, body, ignore_unknown=terms.ignore_unknown), history)

    def prompts(self, asked: ChatRequest, text: ModelText, bounds: Bounds, semantic: bool) -> list[Prompt]:
        assert isinstance(asked, ResponsesChat)
        if not asked.truncates:
            return self._of_messages(asked, asked.messages, text, bounds, semantic)
        output = max(asked.max_completion_tokens or 1, 1)
        room = bounds.max_model_len - output
        if room < 1:
            however = f"max_output_tokens is {output} and the prompt must fit in as well; ask for fewer tokens"
            raise ContextTooLong.beyond(bounds.max_model_len, however, param="max_output_tokens")
        within = bounds._replace(prompt_tokens=min(bounds.prompt_tokens, room))
        try:
            return _fewest_dropped(asked.messages, lambda kept: self._of_messages(asked, kept, text, within, semantic))
        except ContextTooLong:
            raise _still_too_long(bounds, output) from None

    def _of_messages(
        self, asked: ResponsesChat, kept: Sequence[Message], text: ModelText, bounds: Bounds, semantic: bool
    ) -> list[Prompt]:
        return super().prompts(msgspec.structs.replace(asked, messages=_turns(kept)), text, bounds, semantic)


class InputTokensReader:
    name = "input_tokens"

    def __init__(self, texts: Mapping[str, ModelText]) -> None:
        self.texts = texts

    def read(self, body: bytes, terms: Terms) -> tuple[bytes, list[Prompt]]:
        body, history = _without_history(body)
        asked = decode_json(_counts, body, ignore_unknown=terms.ignore_unknown)
        asked.model = terms.served(asked.model) if asked.model else terms.default_model
        name = terms.base_of(asked.model)
        terms.check_task(name, "generate")
        chat = _chat(asked, history)
        chat.messages = _turns(chat.messages)
        return encode_json(types.InputTokens(count_chat(self.texts[name], chat, terms.bounds[name]))), []


def _turns(messages: Sequence[Message]) -> list[Message]:
    """What the user says in a row is one message, as chat templates want it."""
    turns: list[Message] = []
    for message in messages:
        if turns and turns[-1].role == message.role == "user":
            text = f"{turns[-1].content}\n{message.content}"
            turns[-1] = msgspec.structs.replace(turns[-1], content=text)
        else:
            turns.append(message)
    return turns


def _fewest_dropped(messages: Sequence[Message], prompts: Callable[[list[Message]], list[Prompt]]) -> list[Prompt]:
    """The prompts of a conversation without as many of its oldest messages as necessary; instructions and the last
    message always stay."""
    fixed = [message for message in messages if message.role in ("system", "developer")]
    turns = [message for message in messages if message.role not in ("system", "developer")]
    fewest, most = 0, max(0, len(turns) - 1)
    while fewest < most:
        dropped = (fewest + most) // 2
        try:
            prompts([*fixed, *turns[dropped:]])
            most = dropped
        except ContextTooLong:
            fewest = dropped + 1
    return prompts([*fixed, *turns[fewest:]])


def _still_too_long(bounds: Bounds, output: int) -> ContextTooLong:
    """What truncation keeps of a conversation leaves no room for so many tokens of output."""
    room = bounds.max_model_len - output
    way_out = "shorten the last message, the instructions or the tools"
    if bounds.prompt_tokens < room:
        why = f"this tenant is limited to {bounds.prompt_tokens}"
    elif output > 1:
        why = f"max_output_tokens is {output}"
        way_out += ", or ask for fewer tokens"
    else:
        why = "at least one must be left for the output"
    however = f"there are more than {min(bounds.prompt_tokens, room)} tokens in messages even after truncation"
    return ContextTooLong.beyond(bounds.max_model_len, f"{however}, and {why}; {way_out}", param="messages")


def _chat(asked: types.ResponsesRequest, history: History) -> ResponsesChat:
    _check(asked)
    given = [types.InputItem("message", role="user", content=asked.input)] if isinstance(asked.input, str) else None
    listed = given if given is not None else asked.input if isinstance(asked.input, list) else []
    items = [_resolved(item, index, history) for index, item in enumerate(listed)]
    messages = [Message(role="system", content=asked.instructions)] if asked.instructions else []
    _add_items(messages, history.items, "previous_response_id")
    _add_items(messages, items, "input")
    require(len(messages) > 0, "input", "must hold some text")
    stored = asked.store is not False
    reasoning = asked.reasoning or types.Reasoning()
    return ResponsesChat(
        model=asked.model,
        messages=messages,
        max_completion_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed,
        stream=asked.stream,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(asked.tools or ())] or None,
        tool_choice=_tool_choice(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls,
        response_format=_format(asked.text),
        reasoning_effort=reasoning.effort,
        service_tier=asked.service_tier,
        user=asked.user,
        prompt_cache_key=asked.prompt_cache_key,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        deadline_ms=asked.deadline_ms,
        echo=encode_json(_echo(asked, stored)),
        items=encode_json([*history.items, *items]) if stored else b"",
        background=bool(asked.background),
        encrypted_reasoning=types.ENCRYPTED_REASONING in (asked.include or ()),
        truncates=asked.truncation == "auto",
    )


def _check(asked: types.ResponsesRequest) -> None:
    for name, (values, otherwise) in types.SUPPORTED_VALUES.items():
        value = getattr(asked, name)
        require(value is None or value in values, name, otherwise)
    for index, name in enumerate(asked.include or ()):
        known = name in INCLUDABLE
        require(known, f"include[{index}]", f"must be {INCLUDABLE[0]}: nothing else can be included")
    if asked.background:
        require(asked.store is not False, "background", "needs store: the answer is fetched later")


def _echo(asked: types.ResponsesRequest, stored: bool) -> types.Echo:
    def raw(value: Any) -> Raw:
        return Raw(encode_json(value))

    text = asked.text or types.TextConfig()
    return types.Echo(
        background=bool(asked.background),
        instructions=raw(asked.instructions),
        max_output_tokens=asked.max_output_tokens,
        metadata=raw(asked.metadata or {}),
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        previous_response_id=asked.previous_response_id,
        prompt_cache_key=raw(asked.prompt_cache_key),
        reasoning=raw(asked.reasoning or types.Reasoning()),
        safety_identifier=raw(asked.safety_identifier),
        store=stored,
        temperature=asked.temperature,
        text=raw(msgspec.structs.replace(text, format=text.format or types.TextFormat("text"))),
        tool_choice=raw("auto" if asked.tool_choice is None else asked.tool_choice),
        tools=raw(asked.tools or []),
        top_p=asked.top_p,
        truncation=asked.truncation or "disabled",
        user=raw(asked.user),
    )


# ---------------------------------------------------------------- items


def _resolved(item: types.InputItem, index: int, history: History) -> types.InputItem:
    if item.type != "item_reference":
        return item
    found = history.referenced.get(item.id or "")
    if found is None:
        raise InvalidRequest(f"input[{index}].id is no item of a stored response", param=f"input[{index}].id")
    return found


def _add_items(messages: list[Message], items: Sequence[types.InputItem], where: str) -> None:
    """Reasoning, text and calls of the assistant in a row are one message."""
    for index, item in enumerate(items):
        at = f"{where}[{index}]"
        if item.type in (None, "message"):
            _add_message(messages, item, at)
        elif item.type == "function_call_output":
            require(item.call_id is not None, f"{at}.call_id", "is required")
            content = _text(item.output, f"{at}.output")
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=content))
        else:
            turn = _assistant(messages)
            if item.type == "reasoning":
                turn.reasoning_content = (turn.reasoning_content or "") + _reasoning(item, at)
                continue
            if item.name is None or item.call_id is None:
                raise InvalidRequest(f"{at} must have a name and a call_id", param=at)
            call = ToolCall(FunctionCall(item.name, item.arguments or "{}"), item.call_id)
            turn.tool_calls = [*(turn.tool_calls or ()), call]


def _add_message(messages: list[Message], item: types.InputItem, at: str) -> None:
    require(item.role in ROLES[:-1], f"{at}.role", f"must be one of {', '.join(ROLES[:-1])}")
    text = _text(item.content, f"{at}.content")
    if item.role == "assistant":
        turn = _assistant(messages)
        turn.content = f"{turn.content or ''}{text}"
    else:
        messages.append(Message(role=item.role or "user", content=text))


def _assistant(messages: list[Message]) -> Message:
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant", content=""))
    return messages[-1]


def _text(content: str | list[types.InputContent] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"{where} is required", param=where)
    texts = []
    for index, part in enumerate(content):
        if part.type in ("input_image", "input_file"):
            message = f"{where}[{index}] is of type {part.type}; this model reads text only"
            raise InvalidRequest(message, param=f"{where}[{index}]")
        texts.append(part.text or part.refusal or "")
    return "\n".join(texts)


def _reasoning(item: types.InputItem, at: str) -> str:
    """What was thought, as we have sent it: in the open or, for clients that keep nothing else, encoded."""
    if item.content:
        return _text(item.content, f"{at}.content")
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except (binascii.Error, ValueError):  # another server's
        return "\n".join(part.text or "" for part in item.summary or ())


def encrypted(reasoning: str) -> str:
    """No secret: it only has the form that clients carry back."""
    return base64.b64encode(reasoning.encode()).decode()


# ---------------------------------------------------------------- tools and formats


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    require(kind == "function", f"{where}.type", f"must be function, not {str(kind)[:40]!r}: this server has no tools")
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in fields if tool.get(name) is not None}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        named = [_named(tool) for tool in listed] if isinstance(listed, list) else None
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return _named(choice)


def _named(choice: Any) -> dict[str, Any]:
    given = choice if isinstance(choice, dict) else {}
    return {"type": given.get("type"), "function": {"name": given.get("name")}}


def _format(text: types.TextConfig | None) -> ResponseFormat | None:
    given = text.format if text is not None else None
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ResponseFormat("json_object")
    require(given.schema is not None, "text.format.schema", "is required")
    return ResponseFormat("json_schema", JsonSchemaFormat(given.schema, given.name, given.description, given.strict))
