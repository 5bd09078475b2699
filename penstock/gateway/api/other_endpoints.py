"""Endpoints of other servers' APIs, for clients that were written for those."""

from __future__ import annotations

from penstock.gateway.api import anthropic_types
from penstock.gateway.api.anthropic_messages import AnthropicErrors, Messages
from penstock.gateway.api.endpoint import EVENTS, GENERATE, JSON, Endpoint

_ANTHROPIC_ERRORS = AnthropicErrors()

OTHER_ENDPOINTS = (
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
