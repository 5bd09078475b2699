"""The JSON of Ollama's API, both ways. Fields that are not here are ignored, as Ollama does."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.gateway.api.openai_types import Ignored, Limited

# What is accepted beside null, and what is said of anything else.
SUPPORTED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "logprobs": ((False,), "is not supported; use /v1/chat/completions"),
    "images": (([],), "is not supported: this model reads text only"),
}

# ---------------------------------------------------------------- requests


class OllamaOptions(Struct):
    """Those that decide an answer; the others are about loading a model, which has happened."""

    num_predict: int | None = None  # negative: as many as fit
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None


class OllamaFunction(Struct):
    name: str
    arguments: dict[str, Any] | str | None = None


class OllamaCall(Struct):
    function: OllamaFunction


class OllamaMessage(Struct, omit_defaults=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    images: Limited = None


class OllamaRequest(Struct, kw_only=True):
    model: str
    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None  # "json" or a JSON schema
    stream: bool | None = None  # null: true
    think: bool | str | None = None
    keep_alive: Ignored = None
    logprobs: Limited = None
    images: Limited = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None  # the prompt is not put into the chat template


class OllamaEmbedRequest(Struct, kw_only=True):
    model: str
    input: str | list[str]
    truncate: bool | None = None  # null: true
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    options: Ignored = None
    keep_alive: Ignored = None


class OllamaEmbeddingsRequest(Struct, kw_only=True):
    """Of the endpoint that /api/embed has superseded."""

    model: str
    prompt: str
    options: Ignored = None
    keep_alive: Ignored = None


class OllamaShowRequest(Struct):
    model: str = ""
    name: str = ""  # what older clients call it


# ---------------------------------------------------------------- responses


class OllamaCallMade(Struct):
    function: OllamaFunction


class OllamaAnswerMessage(Struct):
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCallMade] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"


class OllamaChunk(Struct, kw_only=True):
    """A line of a stream, or all of an answer. Durations are in nanoseconds; with the last line."""

    model: str
    created_at: str
    message: OllamaAnswerMessage | UnsetType = UNSET  # of /api/chat
    response: str | UnsetType = UNSET  # these two: of /api/generate
    thinking: str | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaEmbedded(Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    prompt_eval_count: int
    load_duration: int = 0


class OllamaEmbedding(Struct):
    embedding: list[float]


class OllamaDetails(Struct, frozen=True):
    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: tuple[str, ...] = ()
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Struct):
    name: str
    model: str
    modified_at: str
    digest: str  # of the name: clients show its beginning
    size: int = 0
    details: OllamaDetails = OllamaDetails()


class OllamaRunning(OllamaModel, kw_only=True):
    expires_at: str
    size_vram: int = 0
    context_length: int


class OllamaModels(Struct):
    models: list[OllamaModel]


class OllamaRunningModels(Struct):
    models: list[OllamaRunning]


class OllamaShown(Struct, kw_only=True):
    modified_at: str
    template: str
    model_info: dict[str, Any]
    capabilities: list[str]
    details: OllamaDetails = OllamaDetails()
    modelfile: str = ""
    parameters: str = ""
    license: str = ""


class OllamaVersion(Struct):
    version: str


class OllamaError(Struct):
    error: str
