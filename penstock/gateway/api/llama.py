"""What clients of llama.cpp's server use of its own API: /completion, /infill, /embedding, /props, /slots."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import msgspec

from penstock import __version__
from penstock.core.request import RECOMMENDED
from penstock.gateway.api import llama_types as types
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.choices import Choice
from penstock.gateway.api.completions import CompletionReader, infilling
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.embeddings import EmbeddingAnswer, EmbeddingReader, EmbeddingRequest, Embeddings
from penstock.gateway.api.models import Model
from penstock.gateway.api.openai_types import CompletionRequest
from penstock.gateway.api.reading import ModelText, Prompt, Terms
from penstock.gateway.api.serving import Serving, encode_json, event
from penstock.gateway.api.text_generation import TextAnswer, TextEndpoint, Wanted
from penstock.gateway.errors import OpenAIErrors, require
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant
from penstock.text.stream import TextDelta

INFILL_TOKENS = 256  # kept free for an answer that names no limit, before pieces of other files fill the window

LLAMA_ERRORS = OpenAIErrors(
    {
        "max_tokens": "n_predict",
        "repetition_penalty": "repeat_penalty",
        "guided_json": "json_schema",
        "guided_grammar": "grammar",
        "suffix": "input_suffix",
    }
)
LLAMA_EMBEDDING_ERRORS = OpenAIErrors({"input": "content"})


class LlamaReader(CompletionReader):
    name = "llama"
    requests = msgspec.json.Decoder(types.LlamaCompletionRequest)

    def decode(self, body: bytes, terms: Terms) -> CompletionRequest:
        asked = decode_json(self.requests, body)
        prompt = asked.prompt if isinstance(asked.prompt, str) else [asked.prompt]
        return CompletionRequest(prompt=prompt, **_fields(asked, terms))  # type: ignore[arg-type]


class LlamaInfill(CompletionRequest, kw_only=True):
    extra: list[types.LlamaExtra]


class LlamaInfillReader(CompletionReader):
    name = "llama_infill"
    requests = msgspec.json.Decoder(types.LlamaInfillRequest)
    without_prompt: ClassVar = {**CompletionReader.without_prompt, "extra": []}

    def decode(self, body: bytes, terms: Terms) -> LlamaInfill:
        asked = decode_json(self.requests, body)
        before, after = asked.input_prefix + asked.prompt, asked.input_suffix
        return LlamaInfill(prompt=before, suffix=after, extra=asked.input_extra or [], **_fields(asked, terms))

    def check(self, asked: CompletionRequest) -> None:
        """There is nothing that another field rules out."""

    def prompts(self, asked: CompletionRequest, text: ModelText, bounds: Bounds, semantic: bool) -> list[Prompt]:
        assert isinstance(asked, LlamaInfill)
        assert isinstance(asked.prompt, str)
        others = [(each.filename or "tmp", each.text) for each in asked.extra]
        free = INFILL_TOKENS if asked.max_tokens is None else asked.max_tokens
        return [infilling(asked.prompt, asked.suffix or "", "input_prefix", text, bounds, others, free)]


def _fields(asked: types.LlamaCompletionRequest, terms: Terms) -> dict[str, Any]:
    """`n_predict: 0` fills the cache and generates nothing."""
    for name, (values, otherwise) in types.SUPPORTED_VALUES.items():
        value = getattr(asked, name)
        require(value is None or value in values, name, otherwise)
    most = asked.n_predict if asked.n_predict is not None and asked.n_predict >= 0 else None
    return {
        "model": asked.model or terms.default_model,
        "max_tokens": most,
        "echo": most == 0,
        "stream": asked.stream,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "min_p": asked.min_p,
        "repetition_penalty": asked.repeat_penalty,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "seed": asked.seed if asked.seed is not None and asked.seed >= 0 else None,
        "stop": asked.stop or None,
        "ignore_eos": asked.ignore_eos,
        "guided_grammar": asked.grammar or None,
        "guided_json": asked.json_schema,
        "return_token_ids": asked.return_tokens,
    }


class LlamaAnswer(TextAnswer[CompletionRequest]):
    __slots__ = ()

    id_prefix = "cmpl-"

    async def whole(self) -> types.LlamaCompletion:
        choice = self.generation.choices[0]
        return self._last(choice.stream.text, choice.token_ids)

    async def _stream(self) -> None:
        async def emit(choice: Choice, delta: TextDelta) -> None:
            if delta.text:
                await self.response.send_events(event(self._chunk(delta.text, delta.token_ids, stop=False)))

        await self.generation.run(emit)
        await self.response.end_events(event(self._last("", [])))

    def _chunk(self, text: str, tokens: list[int], *, stop: bool) -> types.LlamaCompletion:
        usage = self.generation.usage()
        return types.LlamaCompletion(
            content=text,
            tokens=tokens if self.body.return_token_ids else [],
            stop=stop,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
        )

    def _last(self, text: str, tokens: list[int]) -> types.LlamaCompletion:
        choice, chunk = self.generation.choices[0], self._chunk(text, tokens, stop=True)
        params = choice.request.params
        chunk.model = self.body.model
        chunk.truncated = False
        chunk.tokens_cached = choice.cached_tokens
        chunk.stop_type = "limit" if choice.finish_reason == "length" else "word" if choice.stop_reason else "eos"
        chunk.stopping_word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        chunk.generation_settings = {
            "n_predict": params.max_tokens,
            "seed": choice.request.seed,
            **{name: getattr(params, name) for name in RECOMMENDED},
        }
        now = time.monotonic()
        submitted = now if choice.submitted is None else choice.submitted
        first = now if choice.first is None else choice.first
        read, written = chunk.tokens_evaluated - choice.cached_tokens, chunk.tokens_predicted
        chunk.timings = types.LlamaTimings(*_speed(read, first - submitted), *_speed(written, now - first))
        return chunk


def _speed(tokens: int, seconds: float) -> tuple[int, float, float, float]:
    """Tokens, milliseconds, milliseconds for each, tokens in a second."""
    return tokens, seconds * 1000, seconds * 1000 / max(1, tokens), tokens / max(1e-9, seconds)


class LlamaCompletions(TextEndpoint[CompletionRequest]):
    endpoint = "/completion"
    prompt_param = "prompt"
    reader_type: type[CompletionReader] = LlamaReader
    answer_type = LlamaAnswer

    def wanted(self, body: CompletionRequest) -> Wanted:
        """`n_predict` is an upper limit: what does not fit is cut."""
        prompt_only = body.max_tokens == 0
        return Wanted("max_tokens", None, None, None, prompt_only, default=1 if prompt_only else body.max_tokens)


class LlamaInfills(LlamaCompletions):
    endpoint = "/infill"
    prompt_param = "input_prefix"
    reader_type = LlamaInfillReader


class LlamaEmbeddingReader(EmbeddingReader):
    name = "llama_embedding"
    requests = msgspec.json.Decoder(types.LlamaEmbeddingRequest)

    def decode(self, body: bytes, terms: Terms) -> EmbeddingRequest:
        asked = decode_json(self.requests, body)
        first = next((name for name in terms.allowed if terms.bounds[name].task == "embed"), terms.default_model)
        return EmbeddingRequest(model=asked.model or first, input=asked.content)


class LlamaEmbeddingAnswer(EmbeddingAnswer):
    __slots__ = ()

    def listed(self, data: Any) -> Any:
        return data

    def shown(self, choice: Choice) -> types.LlamaEmbedding:
        return types.LlamaEmbedding(choice.index, [self.vector(choice).tolist()])


class LlamaEmbeddings(Embeddings):
    endpoint = "/embedding"
    reader_type = LlamaEmbeddingReader
    answer_type = LlamaEmbeddingAnswer


class LlamaStatus:
    """Of the first model. A slot is a sequence that is computed; there are as many as are needed, at least one."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def _model(self, tenant: Tenant) -> Model:
        models = self.serving.models
        return models.by_name[next(iter(models.names(tenant)), models.all[0].name)]

    async def props(self, request: Request, response: Response, tenant: Tenant) -> None:
        model = self._model(tenant)
        info = model.engine.info
        defaults = {name: getattr(info.sampling_defaults, name) for name in RECOMMENDED}
        props = types.LlamaProps(
            types.LlamaSettings(info.max_model_len, defaults),
            len(self._slots(model)),
            model.name,
            model.name,
            model.text.tokenizer.chat_template or "",
            f"penstock {__version__}",
            {"vision": False, "audio": False},
        )
        await response.send(200, encode_json(props))

    async def slots(self, request: Request, response: Response, tenant: Tenant) -> None:
        await response.send(200, encode_json(self._slots(self._model(tenant))))

    def _slots(self, model: Model) -> list[types.LlamaSlot]:
        running, length = model.engine.stats.running, model.engine.info.max_model_len
        return [types.LlamaSlot(index, length, index < running) for index in range(max(1, running))]
