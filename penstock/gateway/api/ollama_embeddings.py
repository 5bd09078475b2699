"""Vectors as Ollama has them: /api/embed, and /api/embeddings of older clients."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

import msgspec

from penstock.gateway.api import ollama_types as types
from penstock.gateway.api.choices import Choice
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.embeddings import EmbeddingAnswer, EmbeddingReader, EmbeddingRequest, Embeddings
from penstock.gateway.api.ollama import nanoseconds, of_no_page
from penstock.gateway.api.reading import Terms
from penstock.gateway.api.serving import Incoming, encode_json
from penstock.gateway.http.request import Request
from penstock.gateway.tenancy.limits import Reservation
from penstock.gateway.tenancy.tenants import Tenant


class OllamaEmbedReader(EmbeddingReader):
    name = "ollama_embed"
    requests = msgspec.json.Decoder(types.OllamaEmbedRequest)

    def decode(self, body: bytes, terms: Terms) -> EmbeddingRequest:
        asked = decode_json(self.requests, body)
        given: Any = asked.input
        truncate = asked.truncate is not False
        return EmbeddingRequest(model=asked.model, input=given, truncate=truncate, dimensions=asked.dimensions)


class OllamaEmbeddingsReader(EmbeddingReader):
    name = "ollama_embeddings"
    requests = msgspec.json.Decoder(types.OllamaEmbeddingsRequest)

    def decode(self, body: bytes, terms: Terms) -> EmbeddingRequest:
        asked = decode_json(self.requests, body)
        return EmbeddingRequest(model=asked.model, input=asked.prompt, truncate=True)


class OllamaEmbedAnswer(EmbeddingAnswer):
    __slots__ = ()

    def listed(self, data: Any) -> types.OllamaEmbedded:
        took = time.monotonic() - self.generation.context.arrived
        return types.OllamaEmbedded(self.body.model, data, nanoseconds(took), self.usage().prompt_tokens)

    def shown(self, choice: Choice) -> list[float]:
        return self.vector(choice).tolist()


class OllamaEmbeddingsAnswer(EmbeddingAnswer):
    __slots__ = ()

    async def whole(self) -> bytes:
        return encode_json(types.OllamaEmbedding(self.vector(self.generation.choices[0]).tolist()))


class OllamaEmbed(Embeddings):
    endpoint = "/api/embed"
    reader_type: type[EmbeddingReader] = OllamaEmbedReader
    answer_type: type[EmbeddingAnswer] = OllamaEmbedAnswer

    def receive(self, request: Request, tenant: Tenant, reservation: Reservation) -> Awaitable[Incoming]:
        return self.serving.receive(request, tenant, reservation, any_type=of_no_page(request))


class OllamaEmbeddings(OllamaEmbed):
    endpoint = "/api/embeddings"
    reader_type = OllamaEmbeddingsReader
    answer_type = OllamaEmbeddingsAnswer
