"""Any server with OpenAI's `/v1/completions`: vLLM, SGLang, TGI, TensorRT-LLM, llama.cpp, or another Penstock."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from penstock.client.http import HttpClient, Response
from penstock.core.errors import InvalidRequest, StartupError, Unavailable
from penstock.core.request import GenerateRequest, SamplingParams, TokenLogprob
from penstock.fleet.upstream.capabilities import Capabilities
from penstock.fleet.upstream.dialects import BY_OWNER, DIALECTS
from penstock.fleet.upstream.probing import (
    GREEDY,
    TRIAL_PROMPT,
    TRIAL_TOKENS,
    Ask,
    Prompt,
    continues_text,
    heeds_grammar,
    heeds_seed,
    text_of,
)
from penstock.fleet.upstream.protocol import (
    NO_TOKEN,
    UNKNOWN_LOGPROB,
    Found,
    Piece,
    Usage,
    collect,
    described,
    finish_reason,
    status_error,
)
from penstock.fleet.upstream.retokenizer import Vocabulary
from penstock.fleet.upstream.settings import UpstreamConfig

PATH = "/v1/completions"
MODELS = "/v1/models"

Get = Callable[[str], Awaitable[Response]]


class OpenAIProtocol:
    says_finish = True

    def __init__(self, config: UpstreamConfig, vocabulary: Vocabulary) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.tokenizer

    # ------------------------------------------------------------ probing

    async def probe(self, http: HttpClient) -> Found:
        get = partial(described, http, seconds=self._config.timeouts.check)
        card = await self._model_card(http.url, get)
        server = await self._server(get, card)
        dialect, model = DIALECTS[server], str(card["id"])
        if self._config.capabilities.token_ids_out is False:
            dialect = dialect.without_token_ids()
        max_model_len = self._config.max_model_len or await _context_length(get, card)
        if max_model_len is None:
            raise StartupError(f"{http.url} does not say how long its context is", param="max_model_len")

        async def ask(prompt: Prompt, params: SamplingParams) -> list[Piece]:
            request = GenerateRequest("probe", (), params, seed=params.seed or 0)
            body = dialect.body(request, 0, TRIAL_TOKENS) | _common(model, prompt, TRIAL_TOKENS)
            return await collect(http, self, PATH, body)

        prompt, pieces = await self._first_trial(http, ask)
        self._check_tokenizer(http, pieces)
        by_ids = not isinstance(prompt, str)
        found = Capabilities(
            token_ids_in=by_ids,
            token_ids_out=all(piece.token_ids is not None for piece in pieces if piece.text),
            logprobs=any(piece.logprobs for piece in pieces),
            seed="seed" in dialect.fields and await heeds_seed(ask, prompt),
            continuation=by_ids or await continues_text(ask),
            params=frozenset(dialect.fields),
            grammars=frozenset(dialect.grammars if dialect.grammars and await heeds_grammar(ask, prompt) else ()),
        )
        path = self._config.health_path or ("/health" if (await get("/health")).status == 200 else MODELS)
        return Found(server, model, max_model_len, path, dialect, found.overridden(self._config.capabilities))

    async def _model_card(self, url: str, get: Get) -> Mapping[str, Any]:
        response = await get(MODELS)
        if response.status != 200:
            raise Unavailable(f"{url}{MODELS} answers {response.status}: {response.error_message}")
        listed = response.json()
        cards = listed.get("data") if isinstance(listed, dict) else None
        named = [card for card in cards or [] if isinstance(card, dict) and "id" in card]
        wanted = self._config.model
        for card in named:
            if wanted in (None, card["id"]):
                return card
        raise Unavailable(f"{url} serves {', '.join(str(card['id']) for card in named) or 'nothing'}, not {wanted}")

    async def _server(self, get: Get, card: Mapping[str, Any]) -> str:
        if self._config.server != "auto":
            return self._config.server
        if (known := BY_OWNER.get(str(card.get("owned_by")))) is not None:
            return known
        response = await get("/info")
        return "tgi" if response.status == 200 and b'"max_total_tokens"' in response.body else "openai"

    async def _first_trial(self, http: HttpClient, ask: Ask) -> tuple[Prompt, list[Piece]]:
        """With as much as the server accepts: the prompt in the form in which it took it, and its answer."""
        token_ids = self._tokenizer.encode(TRIAL_PROMPT)
        by_text = self._config.capabilities.token_ids_in is False
        forms: tuple[Prompt, ...] = (TRIAL_PROMPT,) if by_text else (token_ids, TRIAL_PROMPT)
        refusal = ""
        for prompt, logprobs in product(forms, (1, None)):
            try:
                pieces = await ask(prompt, replace(GREEDY, logprobs=logprobs))
            except InvalidRequest as error:
                refusal = error.message
                continue
            counts = {piece.usage.prompt_tokens for piece in pieces if piece.usage is not None}
            if isinstance(prompt, str) or counts <= {len(token_ids)}:
                return prompt, pieces  # else it took the list for something else, such as a list of texts
        raise Unavailable(f"{http.url} refuses even a short request: {refusal}")

    def _check_tokenizer(self, http: HttpClient, pieces: list[Piece]) -> None:
        """Tokens that spell another text than the server's are of another vocabulary."""
        if any(piece.token_ids is None or not piece.ids_complete for piece in pieces if piece.text):
            return
        spelled = self._tokenizer.decode(i for piece in pieces for i in piece.token_ids or []).strip()
        text = text_of(pieces).strip()
        if not (spelled.startswith(text) or text.startswith(spelled.rstrip("\ufffd"))):
            message = f"{http.url} has another tokenizer: its tokens for {text!r} spell {spelled!r} here"
            raise StartupError(f"{message}; with token_ids_in and token_ids_out false it can be used by text")

    # ------------------------------------------------------------ requests

    def request(self, found: Found, request: GenerateRequest, max_tokens: int) -> tuple[str, dict[str, Any]]:
        known = [*request.prompt, *request.output]
        prompt = known if found.capabilities.token_ids_in else self._vocabulary.prompt_text(known)
        min_tokens = max(0, request.params.min_tokens - len(request.output))
        body = found.dialect.body(request, min_tokens, found.max_model_len)
        return PATH, body | _common(found.model, prompt, max_tokens)

    # ------------------------------------------------------------ answers

    def parse(self, event: str) -> Piece | None:
        if event.strip() == "[DONE]":
            return None
        try:
            data = json.loads(event)
            error = data.get("error") or (data if data.get("object") == "error" else None)
            if error:
                raise _reported(error)
            choices, usage = data.get("choices") or [], data.get("usage")
            piece = self._choice(choices[0], data) if choices else Piece()
            piece.usage = _usage(usage) if usage else None
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            raise Unavailable(f"the upstream sends what is not OpenAI's: {event[:80]!r}", code="protocol") from problem
        return piece

    def _choice(self, choice: Mapping[str, Any], data: Mapping[str, Any]) -> Piece:
        piece = Piece(choice.get("text") or "", token_ids=choice.get("token_ids"))
        if (verbose := data.get("__verbose")) is not None:  # llama.cpp
            piece.token_ids, piece.ids_complete = verbose.get("tokens"), False
        if (scores := choice.get("logprobs")) is not None:
            content = scores.get("content")
            piece.logprobs = self._listed(scores) if content is None else [_score(entry) for entry in content]
        piece.finish_reason = finish_reason(choice.get("finish_reason"))
        return piece

    def _listed(self, scores: Mapping[str, Any]) -> list[TokenLogprob]:
        """OpenAI's lists for completions. Alternatives by text that is not one token are left out."""
        token_of = self._vocabulary.token_of
        tops = scores.get("top_logprobs") or [None] * len(scores["tokens"])
        listed = []
        for token, logprob, top in zip(scores["tokens"], scores["token_logprobs"], tops, strict=True):
            found = ((token_of(text), float(value)) for text, value in (top or {}).items())
            alternatives = _best((token_id, value) for token_id, value in found if token_id is not None)
            chosen = token_of(token)
            listed.append(TokenLogprob(NO_TOKEN if chosen is None else chosen, _number(logprob), alternatives))
        return listed


def _common(model: str, prompt: str | list[int], max_tokens: int) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, **options}


def _score(entry: Mapping[str, Any]) -> TokenLogprob:
    """As llama.cpp gives them."""
    top = _best((int(other["id"]), float(other["logprob"])) for other in entry.get("top_logprobs") or [])
    return TokenLogprob(int(entry["id"]), _number(entry["logprob"]), top)


def _best(alternatives: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(alternatives, key=lambda pair: -pair[1]))


def _number(logprob: float | None) -> float:
    return UNKNOWN_LOGPROB if logprob is None else max(float(logprob), UNKNOWN_LOGPROB)


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(int(usage.get("prompt_tokens") or 0), int(details.get("cached_tokens") or 0))


def _reported(error: Any) -> Exception:
    """An error in mid-stream, where the status was sent long before."""
    if not isinstance(error, dict):
        return status_error(500, str(error), {})
    code = error.get("code")
    return status_error(code if isinstance(code, int) else 500, str(error.get("message") or error), {})


async def _context_length(get: Get, card: Mapping[str, Any]) -> int | None:
    """vLLM, SGLang and Penstock say it in the list of models, llama.cpp in /props, TGI in /info."""
    if isinstance(length := card.get("max_model_len"), int):
        return length
    for path, keys in (("/props", ("default_generation_settings", "n_ctx")), ("/info", ("max_total_tokens",))):
        response = await get(path)
        value: Any = response.json() if response.status == 200 and response.body.startswith(b"{") else None
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int):
            return value
    return None
