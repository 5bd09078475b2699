"""POST /tokenize and /detokenize: tokens without generation."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.chat import tokenize_chat
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.openai_types import Detokenized, DetokenizeRequest, Piece, Tokenized, TokenizeRequest
from penstock.gateway.api.reading import BlamedOn, ModelText, Prompt, Reader, Terms
from penstock.gateway.api.serving import Incoming, Serving, check_token_ids, encode_json
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class TokenizeReader:
    name = "tokenize"

    def __init__(self, texts: Mapping[str, ModelText]) -> None:
        self.texts = texts

    def read(self, body: bytes, terms: Terms) -> tuple[bytes, list[Prompt]]:
        asked = decode_json(_tokenize_decoder, body, ignore_unknown=terms.ignore_unknown)
        if [asked.prompt, asked.messages, asked.content].count(None) != 2:
            raise InvalidRequest("send either prompt or messages", param="prompt")
        if asked.content is not None:
            asked.prompt, asked.add_special_tokens = asked.content, asked.add_special
        text, bounds = _text_and_bounds(self.texts, terms, asked.model)
        bounds = bounds._replace(prompt_tokens=bounds.countable)
        with BlamedOn("messages" if asked.prompt is None else "prompt", bounds):
            if asked.prompt is None:
                ids = tokenize_chat(text, asked, bounds.prompt_tokens)
            else:
                special = asked.add_special_tokens
                ids = text.tokenizer.encode(asked.prompt, add_special_tokens=special, at_most=bounds.prompt_tokens)
        answer = Tokenized(ids, len(ids), bounds.max_model_len)
        if asked.return_token_strs:
            answer.token_strs = [text.tokenizer.token_spelling(token_id) for token_id in ids]
        if asked.with_pieces:
            answer.tokens = [Piece(token_id, _piece(text.tokenizer.token_bytes(token_id))) for token_id in ids]
        return encode_json(answer), []


class DetokenizeReader:
    name = "detokenize"

    def __init__(self, texts: Mapping[str, ModelText]) -> None:
        self.texts = texts

    def read(self, body: bytes, terms: Terms) -> tuple[bytes, list[Prompt]]:
        asked = decode_json(_detokenize_decoder, body, ignore_unknown=terms.ignore_unknown)
        text, bounds = _text_and_bounds(self.texts, terms, asked.model)
        check_token_ids(asked.tokens, "tokens", bounds)
        decoded = text.tokenizer.decode(asked.tokens, skip_special_tokens=False)
        return encode_json(Detokenized(decoded, decoded)), []


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _text_and_bounds(texts: Mapping[str, ModelText], terms: Terms, model: str | None) -> tuple[ModelText, Bounds]:
    """A request may leave its model out; only one that is named must be the tenant's to use."""
    if model is None:
        return texts[terms.default_model], terms.bounds[terms.default_model]
    name = terms.base_of(terms.served(model))
    return texts[name], terms.bounds[name]


class TextEndpoints:
    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self._tokenize = TokenizeReader(serving.texts)
        self._detokenize = DetokenizeReader(serving.texts)

    async def tokenize(self, request: Request, response: Response, tenant: Tenant) -> None:
        await self._answer(request, response, tenant, self._tokenize)

    async def detokenize(self, request: Request, response: Response, tenant: Tenant) -> None:
        await self._answer(request, response, tenant, self._detokenize)

    async def _answer(self, request: Request, response: Response, tenant: Tenant, reader: Reader[bytes]) -> None:
        incoming = Incoming(request, tenant, await self.serving.body(request, tenant))
        answer, *_ = await self.serving.parse(incoming, reader)
        await response.send(200, answer)
