"""The messages of chats, both ways: as clients send them, and as answers, whole or in deltas."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from penstock.core.request import FinishReason

# ---------------------------------------------------------------- requests


class ContentPart(Struct, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, omit_defaults=True):
    function: FunctionCall
    id: str | None = None
    type: str | None = "function"


class Message(Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it
    refusal: str | None = None


# ---------------------------------------------------------------- responses


ChatFinishReason: TypeAlias = FinishReason | Literal["tool_calls"]


class FunctionText(Struct):
    name: str
    arguments: str  # JSON, unless the model wrote something else


class MessageToolCall(Struct):
    id: str
    function: FunctionText
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    role: str
    content: str | None  # null beside tool calls alone
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The first one of a call has its id, type and name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
