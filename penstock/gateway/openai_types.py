"""The JSON of the OpenAI endpoints, both ways.

Requests accept null wherever OpenAI does and ignore fields they do not know, as SDKs send extras. A field that would
change the answer and is not supported has the type `Unsupported`: a value there is refused by name, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.core.request import FinishReason
from penstock.observability.account import Account

Unsupported: TypeAlias = Any
TokenIds: TypeAlias = list[int]
Int32: TypeAlias = Annotated[int, Meta(ge=-(2**31), lt=2**31)]


# ---------------------------------------------------------------- requests


class StreamOptions(Struct):
    include_usage: bool | None = None


class ResponseFormat(Struct):
    type: str


class ContentPart(Struct):
    type: str
    text: str | None = None


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


class SamplingFields(Struct, kw_only=True):
    """What both endpoints share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None  # OpenAI's words, or the name of a class

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    priority: Int32 | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    deadline_ms: Annotated[float, Meta(gt=0, le=86_400_000)] | None = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    audio: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    web_search_options: Unsupported = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | TokenIds]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    suffix: Unsupported = None


class TokenizeRequest(Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


# ---------------------------------------------------------------- responses


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    ledger: Account | UnsetType = UNSET  # when the request asks for it


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptTokenLogprob(Struct):
    logprob: float
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[int, PromptTokenLogprob] | None]


class ChatMessage(Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    service_tier: str | UnsetType = UNSET


class CompletionChoice(Struct):
    """Also the choice of a streamed chunk, which differs only in that the finish reason may be null."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """Also a streamed chunk."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    service_tier: str | UnsetType = UNSET


class ModelCard(Struct):
    id: str
    created: int
    max_model_len: int
    sampling_defaults: dict[str, float]  # of requests that do not say
    object: Literal["model"] = "model"
    owned_by: str = "penstock"


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(Struct):
    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(Struct):
    prompt: str


class HealthReport(Struct):
    status: Literal["ok", "draining", "unhealthy"]
    detail: str
