"""The JSON of llama.cpp's server, both ways. Fields that are not here are ignored, as it does."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.core.request import MAX_STOP_STRINGS
from penstock.gateway.api.openai_types import Limited, StopString, TokenIds

# What is accepted beside null, and what is said of anything else.
SUPPORTED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "n_probs": ((0,), "is not supported; use logprobs of /v1/completions"),
}


class LlamaCompletionRequest(Struct, kw_only=True):
    prompt: str | TokenIds
    model: str | None = None  # null: the first one
    n_predict: int | None = None  # negative: as many as fit
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None  # negative: a random one
    stop: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None  # GBNF
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    n_probs: Limited = None


class LlamaExtra(Struct):
    """A piece of another file."""

    text: str
    filename: str | None = None


class LlamaInfillRequest(LlamaCompletionRequest, kw_only=True):
    """`prompt` is what stands on the line of the cursor before it, after `input_prefix`."""

    prompt: str = ""
    input_prefix: str
    input_suffix: str
    input_extra: list[LlamaExtra] | None = None


class LlamaEmbeddingRequest(Struct, kw_only=True):
    content: str | list[str | int | TokenIds]
    model: str | None = None  # null: the first one that is for this


class LlamaEmbedding(Struct):
    index: int
    embedding: list[list[float]]  # one vector: that of the whole text


class LlamaTimings(Struct):
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaCompletion(Struct, kw_only=True):
    """A chunk of a stream, or all of an answer. What may be missing comes with the last chunk."""

    content: str
    tokens: TokenIds
    stop: bool
    index: int = 0
    id_slot: int = 0
    tokens_predicted: int
    tokens_evaluated: int
    model: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["eos", "limit", "word"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    timings: LlamaTimings | UnsetType = UNSET


class LlamaSettings(Struct):
    n_ctx: int
    params: dict[str, float]


class LlamaProps(Struct):
    default_generation_settings: LlamaSettings
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    build_info: str
    modalities: dict[str, bool]


class LlamaSlot(Struct):
    id: int
    n_ctx: int
    is_processing: bool
