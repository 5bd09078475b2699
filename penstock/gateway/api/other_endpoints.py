"""Endpoints for vectors of texts, of OpenAI's Responses API, and of other servers, for clients written for those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.gateway.api import anthropic_types, responses_types
from penstock.gateway.api.anthropic_messages import AnthropicErrors, Messages
from penstock.gateway.api.comparisons import Reranked, Reranking, RerankRequest, Scored, ScoreRequest, Scoring
from penstock.gateway.api.embeddings import EmbeddingList, EmbeddingRequest, Embeddings
from penstock.gateway.api.endpoint import EVENTS, GENERATE, JSON, STRING, Endpoint, in_path, parameter
from penstock.gateway.api.generation import Handler
from penstock.gateway.api.responses import MAX_ITEMS, RESPONSES_ERRORS, Responses

_ANTHROPIC_ERRORS = AnthropicErrors()

_RESPONSE = f"{Responses.endpoint}/{{id}}"
_PAGE = (
    parameter("query", "limit", {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS, "default": 20}, ""),
    parameter("query", "order", {"enum": ["asc", "desc"], "default": "desc"}, ""),
    parameter("query", "after", STRING, "the id of an item"),
)


def _texts(path: str, summary: str, handler: Callable[[Any], Handler], answer: type, body: type) -> Endpoint:
    return Endpoint("POST", path, "tenant", summary, handler, answer, body, parameters=GENERATE)


OTHER_ENDPOINTS = (
    _texts(Embeddings.endpoint, "Vectors of texts", lambda h: h.embeddings, EmbeddingList, EmbeddingRequest),
    _texts(Reranking.endpoint, "Documents by their relevance", lambda h: h.rerank, Reranked, RerankRequest),
    _texts(Scoring.endpoint, "How well pairs of texts match", lambda h: h.score, Scored, ScoreRequest),
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
        "GET",
        _RESPONSE,
        "tenant",
        "A stored response",
        lambda h: h.responses.retrieve,
        responses_types.ResponseObject,
        parameters=in_path("id"),
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
)
