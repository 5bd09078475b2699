"""The JSON of Anthropic's Messages API, both ways. Blocks may have fields that are not here, since clients send back
what they were sent; other unknown fields are refused, as in `openai_types.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.core.request import MAX_STOP_STRINGS
from penstock.gateway.api.openai_types import Ignored, StopString

# ---------------------------------------------------------------- requests


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ImageBlock(Struct, tag_field="type", tag="image"):
    """Refused, as no model here reads images."""


class DocumentBlock(Struct, tag_field="type", tag="document"):
    """Only plain text is read."""

    source: dict[str, Any]
    title: str | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """Says nothing to any model but the one that wrote it."""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ResultContent: TypeAlias = TextBlock | ImageBlock | DocumentBlock


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[ResultContent] | None = None
    is_error: bool | None = None


Block: TypeAlias = (
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
)


class MessageParam(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolParam(Struct):
    """Without a type or of type `custom`; tools that Anthropic runs itself are refused."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    """`budget_tokens` changes nothing: reasoning is part of `max_tokens`."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Struct):
    user_id: str | None = None


class CountRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """What makes the prompt, and fields that change nothing of the answer."""

    model: str
    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # what betas called output_config.format

    betas: Ignored = None
    cache_control: Ignored = None
    compaction: Ignored = None
    container: Ignored = None
    context_management: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=2**53)]
    metadata: Metadata | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None  # Anthropic's words, or the name of a class
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    thread: dict[str, Any] | None = None  # refused, in the way that makes clients send all messages
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: float | None = None


# ---------------------------------------------------------------- responses


class TextContent(Struct, tag_field="type", tag="text"):
    text: str
    citations: UnsetType | None = UNSET  # never any: clients differ in whether null is allowed


class ThinkingContent(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseContent(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Content: TypeAlias = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(Struct):
    """`input_tokens` are those that were computed; the cached ones come on top."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    service_tier: Literal["standard"] | UnsetType = UNSET


StopReason: TypeAlias = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class AnthropicMessage(Struct):
    id: str
    model: str
    content: list[Content]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(Struct):
    input_tokens: int


class AnthropicErrorCause(Struct):
    error_code: str
    unsupported: list[str]


class AnthropicErrorDetail(Struct):
    type: str
    message: str
    details: AnthropicErrorCause | UnsetType = UNSET


class AnthropicErrorBody(Struct):
    error: AnthropicErrorDetail
    request_id: str
    type: Literal["error"] = "error"


# ---------------------------------------------------------------- events of a stream


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Content


class TextAdded(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingAdded(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureAdded(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputAdded(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextAdded | ThinkingAdded | SignatureAdded | InputAdded


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


class Ping(Struct, tag_field="type", tag="ping"):
    pass
