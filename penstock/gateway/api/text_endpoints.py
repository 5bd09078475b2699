"""POST /tokenize and /detokenize: tokens without generation."""

from __future__ import annotations

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.gateway.api.chat import ChatReader
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.openai_types import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from penstock.gateway.api.reading import Bounds, Prompt, Reader, blamed_on
from penstock.gateway.api.serving import Serving, check_token_ids, encode_json
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant
from penstock.text.tokenizer import Tokenizer

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)

Answer = tuple[str | None, bytes]  # the model that was asked for, and JSON


class TokenizeReader:
    name = "tokenize"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chat = ChatReader(tokenizer)

    def read(self, body: bytes, bounds: Bounds) -> tuple[Answer, list[Prompt]]:
        asked = decode_json(_tokenize_decoder, body, ignore_unknown=bounds.ignore_unknown)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        bounds = bounds._replace(prompt_tokens=bounds.countable)
        with blamed_on("messages" if asked.prompt is None else "prompt", bounds):
            if asked.prompt is None:
                ids = self.chat.tokenize(asked, bounds.prompt_tokens)
            else:
                special = asked.add_special_tokens
                ids = self.tokenizer.encode(asked.prompt, add_special_tokens=special, at_most=bounds.prompt_tokens)
        answer = Tokenized(ids, len(ids), bounds.max_model_len)
        if asked.return_token_strs:
            answer.token_strs = [self.tokenizer.token_spelling(token_id) for token_id in ids]
        return (asked.model, encode_json(answer)), []


class DetokenizeReader:
    name = "detokenize"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def read(self, body: bytes, bounds: Bounds) -> tuple[Answer, list[Prompt]]:
        asked = decode_json(_detokenize_decoder, body, ignore_unknown=bounds.ignore_unknown)
        check_token_ids(asked.tokens, "tokens", bounds)
        text = self.tokenizer.decode(asked.tokens, skip_special_tokens=False)
        return (asked.model, encode_json(Detokenized(text))), []


class TextEndpoints:
    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self._tokenize = TokenizeReader(serving.tokenizer)
        self._detokenize = DetokenizeReader(serving.tokenizer)

    async def tokenize(self, request: Request, response: Response, tenant: Tenant) -> None:
        await self._answer(request, response, tenant, self._tokenize)

    async def detokenize(self, request: Request, response: Response, tenant: Tenant) -> None:
        await self._answer(request, response, tenant, self._detokenize)

    async def _answer(self, request: Request, response: Response, tenant: Tenant, reader: Reader[Answer]) -> None:
        body = await self.serving.body(request, tenant)
        (model, answer), _ = await self.serving.parse(request, tenant, body, reader)
        if model is not None:
            self.serving.check_model(tenant, model)
        await response.send(200, answer)
