"""The JSON of OpenAI's Responses API, both ways. Items may have fields that are not here, since clients send back what
they were sent; other unknown fields are refused, as in `openai_types.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from penstock.gateway.api.openai_types import MAX_DEADLINE_MS, Ignored, Int32, Limited

MAX_METADATA = 16  # keys
ENCRYPTED_REASONING = "reasoning.encrypted_content"

Status: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]

# What is accepted beside null, and what is said of anything else.
SUPPORTED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "conversation": ((), "is not supported; use previous_response_id"),
    "prompt": ((), "is not supported; use instructions and input"),
    "top_logprobs": ((0,), "is not supported; use /v1/chat/completions"),
}

# ---------------------------------------------------------------- requests

ContentType: TypeAlias = Literal[
    "input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text", "input_image", "input_file"
]


class InputContent(Struct, omit_defaults=True):
    """A part of a message, of a tool's result or of reasoning."""

    type: ContentType
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, omit_defaults=True):
    """One of several kinds; each uses some of the fields."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[InputContent] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputContent] | None = None
    summary: list[InputContent] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class TextFormat(Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesStreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: Ignored = None


class ResponsesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    include: list[str] | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    top_k: int | None = None  # from here: as in chats
    min_p: float | None = None
    seed: int | None = None
    priority: Int32 | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    deadline_ms: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_MS)] | None = None

    conversation: Limited = None
    prompt: Limited = None
    top_logprobs: Limited = None

    client_metadata: Ignored = None
    context_management: Ignored = None
    max_tool_calls: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None


class InputTokensRequest(ResponsesRequest, kw_only=True):
    """Whose tokens are counted. What does not change the prompt is checked and changes nothing."""

    model: str | None = None  # type: ignore[assignment]  # None: the first one
    personality: Ignored = None


# ---------------------------------------------------------------- responses


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputCall(Struct, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[Any] = []
    encrypted_content: str | UnsetType = UNSET


OutputItem: TypeAlias = OutputMessage | OutputCall | OutputReasoning


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class Echo(Struct, kw_only=True):
    """What a response repeats of its request. `Raw` is JSON that nobody here looks into."""

    background: bool
    instructions: Raw
    max_output_tokens: int | None
    metadata: Raw
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: Raw
    reasoning: Raw
    safety_identifier: Raw
    store: bool
    temperature: float | None
    text: Raw
    tool_choice: Raw
    tools: Raw
    top_p: float | None
    truncation: str
    user: Raw


class ResponseObject(Echo, kw_only=True):
    id: str
    created_at: float
    completed_at: float | None = None
    model: str
    output: list[OutputItem]
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    service_tier: str = "default"
    top_logprobs: int = 0
    object: Literal["response"] = "response"


class InputTokens(Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(Struct):
    id: str
    deleted: bool = True
    object: Literal["response"] = "response"


class ItemList(Struct):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


# ---------------------------------------------------------------- events of a stream


class OfResponse(Struct, tag_field="type", tag="response.created"):
    response: ResponseObject
    sequence_number: int


class Queued(OfResponse, tag="response.queued"):
    pass


class InProgress(OfResponse, tag="response.in_progress"):
    pass


class Completed(OfResponse, tag="response.completed"):
    pass


class Incomplete(OfResponse, tag="response.incomplete"):
    pass


class Failed(OfResponse, tag="response.failed"):
    pass


class ItemAdded(Struct, tag_field="type", tag="response.output_item.added"):
    output_index: int
    item: OutputItem
    sequence_number: int


class ItemDone(ItemAdded, tag="response.output_item.done"):
    pass


class PartAdded(Struct, tag_field="type", tag="response.content_part.added"):
    output_index: int
    item_id: str
    part: OutputText | ReasoningText
    sequence_number: int
    content_index: int = 0


class PartDone(PartAdded, tag="response.content_part.done"):
    pass


class TextDelta(Struct, tag_field="type", tag="response.output_text.delta"):
    output_index: int
    item_id: str
    delta: str
    sequence_number: int
    content_index: int = 0
    logprobs: list[Any] = []


class TextDone(Struct, tag_field="type", tag="response.output_text.done"):
    output_index: int
    item_id: str
    text: str
    sequence_number: int
    content_index: int = 0
    logprobs: list[Any] = []


class ReasoningDelta(Struct, tag_field="type", tag="response.reasoning_text.delta"):
    output_index: int
    item_id: str
    delta: str
    sequence_number: int
    content_index: int = 0


class ReasoningDone(Struct, tag_field="type", tag="response.reasoning_text.done"):
    output_index: int
    item_id: str
    text: str
    sequence_number: int
    content_index: int = 0


class ArgumentsDelta(Struct, tag_field="type", tag="response.function_call_arguments.delta"):
    output_index: int
    item_id: str
    delta: str
    sequence_number: int


class ArgumentsDone(Struct, tag_field="type", tag="response.function_call_arguments.done"):
    output_index: int
    item_id: str
    arguments: str
    name: str
    sequence_number: int
