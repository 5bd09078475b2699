"""Endpoints for LoRA adapters, vectors, responses, and for clients of Anthropic, Ollama and llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.gateway.api import adapter_endpoints as lora
from penstock.gateway.api import anthropic_types, llama_types, ollama_types, responses_types
from penstock.gateway.api.anthropic_messages import AnthropicErrors, Messages
from penstock.gateway.api.comparisons import Reranked, Reranking, RerankRequest, Scored, ScoreRequest, Scoring
from penstock.gateway.api.embeddings import EmbeddingList, EmbeddingRequest, Embeddings
from penstock.gateway.api.endpoint import EVENTS, GENERATE, JSON, LINES, STRING, Endpoint, in_path, parameter
from penstock.gateway.api.generation import Handler
from penstock.gateway.api.llama import (
    LLAMA_EMBEDDING_ERRORS,
    LLAMA_ERRORS,
    LlamaCompletions,
    LlamaEmbeddings,
    LlamaInfills,
)
from penstock.gateway.api.ollama import OllamaChats, OllamaErrors, OllamaGenerate
from penstock.gateway.api.ollama_embeddings import OllamaEmbed, OllamaEmbeddings
from penstock.gateway.api.responses import MAX_ITEMS, RESPONSES_ERRORS, Responses

_ANTHROPIC_ERRORS = AnthropicErrors()
_OLLAMA_ERRORS = OllamaErrors()

_RESPONSE = f"{Responses.endpoint}/{{id}}"
_PAGE = (
    parameter("query", "limit", {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS, "default": 20}, ""),
    parameter("query", "order", {"enum": ["asc", "desc"], "default": "desc"}, ""),
    parameter("query", "after", STRING, "the id of an item"),
)
_RESUMED = (
    parameter("query", "stream", {"enum": ["true", "false"], "default": "false"}, ""),
    parameter("query", "starting_after", {"type": "integer", "minimum": 0, "maximum": 10**9 - 1}, "sequence_number"),
)


def _texts(
    path: str, summary: str, handler: Callable[[Any], Handler], answer: type, body: type, *aliases: str
) -> Endpoint:
    return Endpoint("POST", path, "tenant", summary, handler, answer, body, parameters=GENERATE, aliases=aliases)


OTHER_ENDPOINTS = (
    Endpoint("GET", "/v1/lora_adapters", "operator", "All adapters", lambda h: h.adapters.all, lora.AdapterList),
    Endpoint(
        "POST",
        "/v1/load_lora_adapter",
        "operator",
        "Serve a LoRA adapter, in place of another one if the name is taken",
        lambda h: h.adapters.load,
        lora.Loaded,
        lora.LoadAdapter,
    ),
    Endpoint(
        "POST",
        "/v1/unload_lora_adapter",
        "operator",
        "Serve a LoRA adapter no longer",
        lambda h: h.adapters.unload,
        lora.Unloaded,
        lora.UnloadAdapter,
    ),
    _texts(Embeddings.endpoint, "Vectors of texts", lambda h: h.embeddings, EmbeddingList, EmbeddingRequest),
    _texts(
        Reranking.endpoint,
        "Documents by their relevance",
        lambda h: h.rerank,
        Reranked,
        RerankRequest,
        "/v2/rerank",  # Cohere's clients
        "/rerank",  # those of vLLM, Jina and Infinity
    ),
    _texts(Scoring.endpoint, "How well pairs of texts match", lambda h: h.score, Scored, ScoreRequest, "/score"),
    Endpoint(
        "POST",
        Responses.endpoint,
        "tenant",
        "Answer a conversation, and keep it for the next request",
        lambda h: h.create_response,
        responses_types.ResponseObject,
        responses_types.ResponsesRequest,
        media=(JSON, EVENTS),
        parameters=GENERATE,
        errors=RESPONSES_ERRORS,
    ),
    Endpoint(
        "POST",
        f"{Responses.endpoint}/input_tokens",
        "tenant",
        "The tokens that a conversation would have",
        lambda h: h.responses.count,
        responses_types.InputTokens,
        responses_types.InputTokensRequest,
        errors=RESPONSES_ERRORS,
    ),
    Endpoint(
        "GET",
        _RESPONSE,
        "tenant",
        "A stored response, or the events of one that was made with background and stream",
        lambda h: h.responses.retrieve,
        responses_types.ResponseObject,
        media=(JSON, EVENTS),
        parameters=(*in_path("id"), *_RESUMED),
    ),
    Endpoint(
        "DELETE",
        _RESPONSE,
        "tenant",
        "Forget a stored response",
        lambda h: h.responses.delete,
        responses_types.DeletedResponse,
        parameters=in_path("id"),
    ),
    Endpoint(
        "POST",
        f"{_RESPONSE}/cancel",
        "tenant",
        "Stop working on a background response",
        lambda h: h.responses.cancel,
        responses_types.ResponseObject,
        parameters=in_path("id"),
    ),
    Endpoint(
        "GET",
        f"{_RESPONSE}/input_items",
        "tenant",
        "The conversation that a stored response answers",
        lambda h: h.responses.input_items,
        responses_types.ItemList,
        parameters=(*in_path("id"), *_PAGE),
    ),
    Endpoint(
        "POST",
        Messages.endpoint,
        "tenant",
        "Answer a conversation, as Anthropic does",
        lambda h: h.messages,
        anthropic_types.AnthropicMessage,
        anthropic_types.MessagesRequest,
        media=(JSON, EVENTS),
        parameters=GENERATE,
        errors=_ANTHROPIC_ERRORS,
        error=anthropic_types.AnthropicErrorBody,
    ),
    Endpoint(
        "POST",
        f"{Messages.endpoint}/count_tokens",
        "tenant",
        "The tokens that a conversation would have",
        lambda h: h.count_tokens,
        anthropic_types.TokenCount,
        anthropic_types.CountRequest,
        errors=_ANTHROPIC_ERRORS,
        error=anthropic_types.AnthropicErrorBody,
    ),
    Endpoint(
        "POST",
        OllamaChats.endpoint,
        "tenant",
        "Answer a conversation, as Ollama does",
        lambda h: h.ollama_chat,
        ollama_types.OllamaChunk,
        ollama_types.OllamaChatRequest,
        media=(JSON, LINES),
        parameters=GENERATE,
        errors=_OLLAMA_ERRORS,
        error=ollama_types.OllamaError,
    ),
    Endpoint(
        "POST",
        OllamaGenerate.endpoint,
        "tenant",
        "Answer a prompt, as Ollama does",
        lambda h: h.ollama_generate,
        ollama_types.OllamaChunk,
        ollama_types.OllamaGenerateRequest,
        media=(JSON, LINES),
        parameters=GENERATE,
        errors=_OLLAMA_ERRORS,
        error=ollama_types.OllamaError,
    ),
    Endpoint(
        "POST",
        OllamaEmbed.endpoint,
        "tenant",
        "Vectors of texts, as Ollama has them",
        lambda h: h.ollama_embed,
        ollama_types.OllamaEmbedded,
        ollama_types.OllamaEmbedRequest,
        parameters=GENERATE,
        errors=_OLLAMA_ERRORS,
        error=ollama_types.OllamaError,
    ),
    Endpoint(
        "POST",
        OllamaEmbeddings.endpoint,
        "tenant",
        "The vector of a text, as older clients of Ollama ask for it",
        lambda h: h.ollama_embeddings,
        ollama_types.OllamaEmbedding,
        ollama_types.OllamaEmbeddingsRequest,
        parameters=GENERATE,
        errors=_OLLAMA_ERRORS,
        error=ollama_types.OllamaError,
    ),
    Endpoint(
        "POST",
        "/api/show",
        "tenant",
        "About a model, as Ollama says it",
        lambda h: h.ollama.show,
        ollama_types.OllamaShown,
        ollama_types.OllamaShowRequest,
        errors=_OLLAMA_ERRORS,
        error=ollama_types.OllamaError,
    ),
    Endpoint(
        "GET",
        "/api/tags",
        "tenant",
        "The models, as Ollama lists them",
        lambda h: h.ollama.tags,
        ollama_types.OllamaModels,
        errors=_OLLAMA_ERRORS,
        error=ollama_types.OllamaError,
    ),
    Endpoint(
        "GET",
        "/api/ps",
        "tenant",
        "The models that are loaded: all",
        lambda h: h.ollama.running,
        ollama_types.OllamaRunningModels,
        errors=_OLLAMA_ERRORS,
        error=ollama_types.OllamaError,
    ),
    Endpoint(
        "GET",
        "/api/version",
        "public",
        "Of Ollama's API",
        lambda h: h.ollama.version,
        ollama_types.OllamaVersion,
        errors=_OLLAMA_ERRORS,
        error=ollama_types.OllamaError,
    ),
    Endpoint(
        "POST",
        LlamaCompletions.endpoint,
        "tenant",
        "Continue a text, as llama.cpp does",
        lambda h: h.llama_completions,
        llama_types.LlamaCompletion,
        llama_types.LlamaCompletionRequest,
        media=(JSON, EVENTS),
        parameters=GENERATE,
        errors=LLAMA_ERRORS,
    ),
    Endpoint(
        "POST",
        LlamaInfills.endpoint,
        "tenant",
        "Fill in the middle, as llama.cpp does",
        lambda h: h.llama_infill,
        llama_types.LlamaCompletion,
        llama_types.LlamaInfillRequest,
        media=(JSON, EVENTS),
        parameters=GENERATE,
        errors=LLAMA_ERRORS,
    ),
    Endpoint(
        "POST",
        LlamaEmbeddings.endpoint,
        "tenant",
        "Vectors of texts, as llama.cpp has them",
        lambda h: h.llama_embedding,
        list[llama_types.LlamaEmbedding],
        llama_types.LlamaEmbeddingRequest,
        parameters=GENERATE,
        errors=LLAMA_EMBEDDING_ERRORS,
    ),
    Endpoint("GET", "/props", "tenant", "As llama.cpp has it", lambda h: h.llama.props, llama_types.LlamaProps),
    Endpoint("GET", "/slots", "tenant", "As llama.cpp has it", lambda h: h.llama.slots, list[llama_types.LlamaSlot]),
)
