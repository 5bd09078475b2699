"""The JSON of the OpenAI endpoints, both ways.

Requests accept null wherever OpenAI does. Fields that are not here are refused (`decoding.py`), except in messages and
tools, where clients send back what they were sent. OpenAI's own fields are all here: those that change no answer are
`Ignored`, those that would change it and cannot be served are `Limited` to the values in `SUPPORTED_VALUES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.core.engine import Task
from penstock.core.request import MAX_STOP_STRINGS, FinishReason
from penstock.gateway.api.messages import ChatDelta, ChatFinishReason, ChatMessage, ContentPart, Message
from penstock.observability.account import Account

Ignored: TypeAlias = Any
Limited: TypeAlias = Any
TokenIds: TypeAlias = list[int]
Int32: TypeAlias = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Choices: TypeAlias = Annotated[list[str], Meta(min_length=1, max_length=10_000)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]

MAX_TOKEN_LIST = 1024  # stop_token_ids, and the tokens of logit_bias
MAX_DEADLINE_MS = 24 * 3600 * 1000
MAX_DETOKENIZED = 100_000  # tokens; they become text on the event loop

# What is accepted beside null, and what is said of anything else.
SUPPORTED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "is not supported"),
    "functions": ((), "is not supported; use tools"),
    "function_call": ((), "is not supported; use tools"),
    "moderation": ((), "is not supported"),
    "web_search_options": ((), "is not supported"),
    "modalities": (([], ["text"]), 'must be ["text"]: other outputs are not supported'),
    "skip_special_tokens": ((True,), "must be true: special tokens are not part of the text"),
    "include_stop_str_in_output": ((False,), "must be false: the text ends before the stop string"),
    "use_beam_search": ((False,), "must be false: beam search is not supported"),
    "length_penalty": ((1.0,), "must be 1: it is for beam search, which is not supported"),
    "include_reasoning": ((True,), "must be true: reasoning is always part of the answer"),
}


# ---------------------------------------------------------------- requests


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage: so far, in every chunk
    include_obfuscation: Ignored = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True):
    """`strict` changes nothing: every schema is enforced, or refused."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """A `json_object` may have a schema, as llama.cpp calls it or as TGI and huggingface_hub do."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's words for what the output must match; one of them."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Prediction(Struct, forbid_unknown_fields=True):
    """Text that the answer is expected to repeat. Only how fast it comes depends on it."""

    content: str | list[ContentPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class SamplingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_TOKEN_LIST)] | None = None
    seed: int | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None  # OpenAI's words, or the name of a class

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Meta(max_length=MAX_TOKEN_LIST)] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # keep the last so many; -1: as many as fit
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities: "token_id:17" instead of text
    priority: Int32 | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    deadline_ms: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_MS)] | None = None
    prediction: Prediction | None = None

    skip_special_tokens: Limited = None
    include_stop_str_in_output: Limited = None
    use_beam_search: Limited = None
    length_penalty: Limited = None
    include_reasoning: Limited = None

    guided_decoding_backend: Ignored = None
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    spaces_between_special_tokens: Ignored = None
    store: Ignored = None
    user: Ignored = None
    verbosity: Ignored = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # false: one call at most
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    audio: Limited = None
    functions: Limited = None
    function_call: Limited = None
    modalities: Limited = None
    moderation: Limited = None
    web_search_options: Limited = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | TokenIds]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


IGNORED = tuple(name for name, kind in SamplingFields.__annotations__.items() if kind == "Ignored")


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt` or `messages`; or, as llama.cpp calls it, `content`."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = None
    content: str | None = None  # from here: llama.cpp's
    add_special: bool = False
    with_pieces: bool = False
    parse_special: Ignored = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: Annotated[TokenIds, Meta(max_length=MAX_DETOKENIZED)]


# ---------------------------------------------------------------- responses


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0  # these two: drafted tokens that were right, and those that were not
    rejected_prediction_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # with reasoning or a prediction
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


StopReason: TypeAlias = str | int | None  # the stop string or stop token that ended it


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET  # with the first chunk of a choice
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChoice(Struct):
    """Also the choice of a streamed chunk, which differs only in that the finish reason may be null."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason | UnsetType = UNSET  # with the finish reason
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET  # with the first chunk of a choice
    token_ids: TokenIds | UnsetType = UNSET


class Completion(Struct):
    """Also a streamed chunk."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    service_tier: str | UnsetType = UNSET


class ClassCard(Struct):
    """What a class of requests is promised. None: nothing."""

    ttft_ms: float | None
    itl_ms: float | None


class ModelCard(Struct):
    id: str
    created: int
    max_model_len: int
    classes: dict[str, ClassCard]
    tool_parser: str | None  # the format of its tool calls, and of its reasoning
    reasoning_parser: str | None
    root: str  # the model's first name; of a LoRA adapter that of the model it changes
    parent: str | None = None  # of a LoRA adapter: the model it changes
    digest: str | UnsetType = UNSET  # of a LoRA adapter: what it is known by, whatever its name
    sampling_defaults: dict[str, float] | UnsetType = UNSET  # of requests that do not say; for generated text
    task: Task = "generate"  # embed: /v1/embeddings; score: /v1/score and /v1/rerank
    embedding_size: int | UnsetType = UNSET  # of a model for embeddings
    object: Literal["model"] = "model"
    owned_by: str = "penstock"
    # From here: what Anthropic's client looks for.
    display_name: str = ""
    created_at: str = ""
    max_input_tokens: int = 0
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"


class ModelList(Struct):
    data: list[ModelCard]
    first_id: str | None = None  # these three: for Anthropic's client; all models are on one page
    last_id: str | None = None
    has_more: bool = False
    object: Literal["list"] = "list"


class Piece(Struct):
    """A token as llama.cpp shows it: bytes that are only part of a character as numbers."""

    id: int
    piece: str | list[int]


class Tokenized(Struct):
    tokens: Sequence[int | Piece]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET  # as the vocabulary spells them


class Detokenized(Struct):
    prompt: str
    content: str  # the same, as llama.cpp calls it


class HealthReport(Struct):
    status: Literal["ok", "degraded", "draining", "overloaded", "unhealthy"]
    detail: str


class Load(Struct):
    """As vLLM says it."""

    server_load: int


class Version(Struct):
    version: str
