"""What /v1/embeddings, /v1/rerank and /v1/score share: texts become vectors, all at once, without any sampling."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from sys import byteorder
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from penstock.core.engine import EngineInfo, Task
from penstock.core.errors import EngineFailure
from penstock.core.request import SamplingParams
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.choices import Choice, build_choices
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.generation import Generation
from penstock.gateway.api.openai_types import MAX_DEADLINE_MS, Ignored, Int32
from penstock.gateway.api.reading import INLINE_BYTES, BlamedOn, ModelText, Prompt, Terms, checked_options
from penstock.gateway.api.serving import Incoming, Serving
from penstock.gateway.errors import require
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.limits import Reservation
from penstock.gateway.tenancy.tenants import Tenant

MAX_TEXTS = 2048  # of one request; OpenAI's limit for embeddings
SLICE_NUMBERS = 8192  # numbers that become JSON at once, in about a millisecond

# Greedy: the same text always gives the same vector, which a result cache may keep.
_COMPUTED_ONLY = SamplingParams(temperature=0, max_tokens=0)


class TextFields(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # keep the first so many; -1: as many as fit
    truncate: bool | None = None  # the same as -1
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    priority: Int32 | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    deadline_ms: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_MS)] | None = None

    prompt_cache_key: Ignored = None
    safety_identifier: Ignored = None
    user: Ignored = None


class TextUsage(Struct):
    prompt_tokens: int
    total_tokens: int


B = TypeVar("B", bound=TextFields)


class Texts:
    """Tokenizes the texts of a request for one model, cut to what the request wants to keep of each. `most`: tokens of
    this one text, without those around it; it is cut to the model's window as well."""

    def __init__(self, asked: TextFields, text: ModelText, bounds: Bounds) -> None:
        self._tokenizer = text.tokenizer
        self._bounds = bounds
        self._keep = _kept_tokens(asked, bounds)

    def prompt(self, given: str | list[int], param: str, most: int | None = None) -> Prompt:
        require(len(given) > 0, param, "must not be empty")
        keep = self._kept(self._tokenizer.framing[0], most)
        ids = given if isinstance(given, list) else self._encoded(given, param, keep)
        return Prompt(self._fitting(ids, param, keep))

    def pair(self, first: str, second: str, param: str, most: int | None = None) -> Prompt:
        """For a cross-encoder. What is too long is cut at the end of the second text."""
        with BlamedOn(param, self._bounds):
            ids, second_begins = self._tokenizer.encode_pair(first, second)
        kept = self._fitting(ids, param, self._kept(second_begins, most))
        require(second_begins < len(kept), param, "has no room: the first text alone fills the model's window")
        return Prompt(kept, second_text=second_begins)

    def _kept(self, before: int, most: int | None) -> int | None:
        """Tokens to keep of a prompt with `before` tokens before the text that is cut. None: all."""
        if most is None:
            return self._keep
        whole = self._bounds.prompt_tokens if self._keep is None else self._keep
        return min(whole, before + most + self._tokenizer.framing[1])

    def _encoded(self, given: str, param: str, keep: int | None) -> list[int]:
        with BlamedOn(param, self._bounds):
            at_most = self._bounds.prompt_tokens if keep is None else self._bounds.countable
            return self._tokenizer.encode(given, at_most=at_most)

    def _fitting(self, ids: list[int], param: str, keep: int | None) -> list[int]:
        require(min(ids, default=0) >= 0, param, "must not hold negative token ids")
        limit = self._bounds.vocab_size
        require(max(ids, default=0) < limit, param, f"must hold token ids below {limit}")
        if keep is not None and len(ids) > keep:
            return self._tokenizer.truncated(ids, keep)
        if len(ids) > self._bounds.prompt_tokens:
            raise self._bounds.too_long(param, str(len(ids)))
        return ids


def _kept_tokens(asked: TextFields, bounds: Bounds) -> int | None:
    """None: texts are not cut."""
    keep = -1 if asked.truncate and asked.truncate_prompt_tokens is None else asked.truncate_prompt_tokens
    if keep is None:
        return None
    most = bounds.prompt_tokens
    require(keep != 0 and keep <= most, "truncate_prompt_tokens", f"must be between 1 and {most}, or -1")
    return most if keep < 0 else keep


class VectorReader(ABC, Generic[B]):
    """From the bytes of a request to its options and the texts that are to become vectors."""

    name: str
    decoder: msgspec.json.Decoder[B]
    tasks: tuple[Task, ...]

    def __init__(self, texts: Mapping[str, ModelText]) -> None:
        self.texts = texts

    def read(self, body: bytes, terms: Terms) -> tuple[B, list[Prompt]]:
        asked = self.decode(body, terms)
        name = terms.read_for
        if name is None:
            asked.model = terms.served(asked.model)
            name = terms.base_of(asked.model)
        bounds = terms.bounds[name]
        terms.check_task(name, *self.tasks)
        prompts = self.prompts(asked, Texts(asked, self.texts[name], bounds), bounds.task)
        return checked_options(asked, **self.without_texts(asked)) if len(body) > INLINE_BYTES else asked, prompts

    def decode(self, body: bytes, terms: Terms) -> B:
        """For another API: translate what it calls differently."""
        return decode_json(self.decoder, body, ignore_unknown=terms.ignore_unknown)

    @abstractmethod
    def prompts(self, asked: B, texts: Texts, task: Task) -> list[Prompt]: ...

    @abstractmethod
    def without_texts(self, asked: B) -> dict[str, Any]:
        """What the fields that hold the texts become once these are tokens."""


class VectorEndpoint(ABC, Generic[B]):
    endpoint: str
    reader_type: type[VectorReader[B]]
    answer_type: type[VectorAnswer[B]]

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.reader = self.reader_type(serving.texts)

    async def __call__(
        self, request: Request, response: Response, tenant: Tenant, reservation: Reservation
    ) -> VectorAnswer[B]:
        incoming = await self.receive(request, tenant, reservation)
        why = "" if incoming.version is None else "a version"
        context, body, found = await self.serving.accept(incoming, self.endpoint, self.reader, incoming.version, why)
        self.check(body, context.model.engine.info)
        prompts = [(prompt, _COMPUTED_ONLY) for prompt in found]
        choices = await build_choices(request, context, body, prompts, prompt_only=True)
        generation = Generation(self.serving.metrics, reservation, response, context, choices)
        return self.answer_type(body, generation)

    def receive(self, request: Request, tenant: Tenant, reservation: Reservation) -> Awaitable[Incoming]:
        return self.serving.receive(request, tenant, reservation)

    def check(self, body: B, info: EngineInfo) -> None:
        """Refuse what this model cannot give."""


class VectorAnswer(ABC, Generic[B]):
    """Sends what is made of the vectors, once all are there."""

    __slots__ = ("body", "generation")

    def __init__(self, body: B, generation: Generation) -> None:
        self.body = body
        self.generation = generation

    def respond(self) -> Awaitable[None]:
        return self._send()

    async def _send(self) -> None:
        await self.generation.run()
        await self.generation.response.send(200, await self.whole())

    @abstractmethod
    async def whole(self) -> bytes:
        """The answer as JSON."""

    def usage(self) -> TextUsage:
        tokens = self.generation.reported_usage().prompt_tokens
        return TextUsage(tokens, tokens)


def numbers(choice: Choice) -> array[float]:
    """The vector that an engine has computed."""
    if choice.vector is None:
        raise EngineFailure("the engine gave no vector for a text")
    found = array("f", choice.vector)
    if byteorder == "big":
        found.byteswap()
    return found


async def in_slices(choices: Sequence[Choice], width: int) -> AsyncIterator[Choice]:
    """The choices, with a break for others after so many numbers as take about a millisecond."""
    at_once = max(1, SLICE_NUMBERS // max(width, 1))
    for position, choice in enumerate(choices):
        if position and position % at_once == 0:
            await asyncio.sleep(0)
        yield choice
