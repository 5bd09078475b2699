"""The way of a request for text, the same for chats and completions: read it, build its choices, generate, shape.

An endpoint adds what is its own: how prompts are read (`TextReader`), what its options are called (`TextEndpoint`), and
the JSON of its choices and chunks (`TextAnswer`).
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.engine import EngineInfo
from penstock.core.errors import InvalidRequest
from penstock.core.request import SamplingParams, Waits
from penstock.fleet.cascade import small_may_try
from penstock.fleet.settings import CascadeConfig
from penstock.fleet.versions import is_shadowed
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.cascade import CascadedAnswer, cannot_take
from penstock.gateway.api.choices import Choice, build_choices
from penstock.gateway.api.context import Context
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.generation import Answer, Emit, Generation
from penstock.gateway.api.objectives import reported_tier
from penstock.gateway.api.openai_types import SamplingFields, Usage
from penstock.gateway.api.reading import INLINE_BYTES, BlamedOn, ModelText, Prompt, Terms, checked_options
from penstock.gateway.api.sampling import output_limit, sampling_params, truncated
from penstock.gateway.api.serving import DONE, Incoming, Serving, check_values, encode_json, event
from penstock.gateway.api.shadow import ShadowedAnswer
from penstock.gateway.api.slices import SLICE
from penstock.gateway.api.trial import Escalated, Outcome, Trial
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.limits import Reservation
from penstock.gateway.tenancy.tenants import Tenant

B = TypeVar("B", bound=SamplingFields)


class TextReader(ABC, Generic[B]):
    """From the bytes of a request to its options and prompts."""

    name: str
    decoder: msgspec.json.Decoder[B]
    without_prompt: ClassVar[Mapping[str, Any]]  # what the fields of the prompt become once it is tokens

    def __init__(self, texts: Mapping[str, ModelText]) -> None:
        self.texts = texts

    def read(self, body: bytes, terms: Terms) -> tuple[B, list[Prompt]]:
        asked = self.decode(body, terms)
        check_values(asked)
        self.check(asked)
        name = terms.read_for
        if name is None:
            asked.model = terms.served(asked.model)
            name = terms.base_of(asked.model)
        bounds = terms.bounds[name]
        terms.check_task(name, "generate")
        if asked.truncate_prompt_tokens is not None:
            bounds = bounds._replace(prompt_tokens=bounds.countable)
        prompts = self.prompts(asked, self.texts[name], bounds, terms.semantic)
        if asked.prediction is not None:
            with BlamedOn("prediction", bounds):
                predicted = self.texts[name].tokenizer.encode(
                    asked.prediction.text, add_special_tokens=False, at_most=bounds.countable
                )
            prompts = [replace(prompt, prediction=predicted[: bounds.max_model_len]) for prompt in prompts]
            asked.prediction = None
        return checked_options(asked, **self.without_prompt) if len(body) > INLINE_BYTES else asked, prompts

    def decode(self, body: bytes, terms: Terms) -> B:
        """For another API: translate what it calls differently."""
        return decode_json(self.decoder, body, ignore_unknown=terms.ignore_unknown)

    @abstractmethod
    def check(self, asked: B) -> None:
        """Refuse what no type can say of the endpoint's own fields."""

    @abstractmethod
    def prompts(self, asked: B, text: ModelText, bounds: Bounds, semantic: bool) -> list[Prompt]:
        """Tokenize for the model of `text`. With `semantic`, prompts of the same meaning may share an answer."""


class Wanted(NamedTuple):
    """How much a request asks for, whatever its endpoint calls that."""

    param: str  # the field that says how many tokens
    tokens: int | None  # which must fit beside the prompt
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_only: bool = False  # the prompt's log-probabilities and no output
    default: int | None = None  # tokens where it does not say, as far as they fit; None: as many as fit
    background: bool = False  # the client has been answered before there is any output

    @property
    def most_tokens(self) -> int | None:
        return self.default if self.tokens is None else self.tokens


class TextEndpoint(ABC, Generic[B]):
    endpoint: str
    prompt_param: str  # the field that holds the prompt
    reader_type: type[TextReader[B]]
    answer_type: Callable[[B, Generation], TextAnswer[B]]

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.reader = self.reader_type(serving.texts)

    async def __call__(
        self, request: Request, response: Response, tenant: Tenant, reservation: Reservation
    ) -> Answer | None:
        """None: it has been answered."""
        return await self.answer(await self.receive(request, tenant, reservation), response, reservation)

    async def answer(self, incoming: Incoming, response: Response, reservation: Reservation) -> Answer:
        if incoming.entry is None:
            return await self._answer(incoming, response, reservation)
        config, version, why = incoming.entry.config, incoming.version, ""
        if version is not None:
            why = f"a version for {config.versions[version] / sum(config.versions.values()):.3g} of the users"
        if config.cascade is None:
            answer: Answer = await self._answer(incoming, response, reservation, version, why)
        else:
            answer = await self._cascaded(incoming, response, reservation, incoming.entry.name, config.cascade)
        if config.shadow is None or not is_shadowed(incoming.request.unique, config.shadow.fraction):
            return answer
        return self._shadowed(answer, incoming, config.shadow.model)

    def receive(self, request: Request, tenant: Tenant, reservation: Reservation) -> Awaitable[Incoming]:
        return self.serving.receive(request, tenant, reservation)

    async def _cascaded(
        self, incoming: Incoming, response: Response, reservation: Reservation, name: str, cascade: CascadeConfig
    ) -> Answer:
        def count(outcome: Outcome) -> None:
            self.serving.metrics.cascades[name, outcome] += 1

        async def large(why: str) -> Answer:
            return await self._answer(incoming, response, reservation, cascade.large, why)

        try:
            why = "the small model of the cascade"
            small = await self._answer(incoming, response, reservation, cascade.small, why, cascade)
            return CascadedAnswer(small, large, count)
        except Escalated as skipped:
            why = skipped.message
        except InvalidRequest as error:
            why = cannot_take(error)
        count("skipped")
        return await large(why)

    async def _answer(
        self,
        incoming: Incoming,
        response: Response,
        reservation: Reservation,
        read_for: str | None = None,
        why: str = "",
        cascade: CascadeConfig | None = None,
    ) -> TextAnswer[B]:
        """`read_for`: the model that is to answer, where that is another than the request names, and `why`. With a
        `cascade` it is the small one of that: raises Escalated if it is not to try."""
        context, body, found = await self.serving.accept(incoming, self.endpoint, self.reader, read_for, why)
        wanted, trial = self.wanted(body), None
        if cascade is not None and cascade.min_logprob is not None and wanted.logprobs is None:
            wanted = wanted._replace(logprobs=0)
        choices = await self._choices(incoming.request, context, body, found, wanted)
        if cascade is not None:
            self._check_easy(choices, wanted, cascade)
            trial = Trial(cascade, len(choices), show_logprobs=self.wanted(body).logprobs is not None)
            waits: Waits = "begun" if body.stream else "never"
            for choice in choices:
                # Another id than that of the large model's attempt, which may be at the same worker while this one is
                # still being aborted there: where one of them is an adapter of the other.
                choice.request = replace(choice.request, id=f"{choice.request.id}.small", waits=waits)
        generation = Generation(self.serving.metrics, reservation, response, context, choices, trial)
        return self.answer_type(body, generation)

    async def _choices(
        self, request: Request, context: Context, body: B, found: list[Prompt], wanted: Wanted
    ) -> list[Choice]:
        tenant, info, prompts = context.tenant, context.model.engine.info, []
        for position, prompt in enumerate(found):
            if position % SLICE == SLICE - 1:
                await asyncio.sleep(0)
            kept = self._cut(info, tenant, body, wanted, prompt)
            params = self._params(info, tenant, body, wanted, kept)
            if kept.form is not None:
                params = kept.form.constrain(params, context.model.text.tokenizer)
            prompts.append((kept, params))
        return await build_choices(request, context, body, prompts, prompt_only=wanted.prompt_only)

    def _shadowed(self, answer: Answer, incoming: Incoming, name: str) -> Answer:
        """With a shadow of it to this model or adapter, unless that has answered itself."""
        model = self.serving.model_of(name)

        async def choices() -> list[Choice]:
            context, body, found = await self.serving.accept(incoming, self.endpoint, self.reader, name, "shadow")
            context = msgspec.structs.replace(context, deadline=None)  # that of the answer, which has been sent
            return await self._choices(incoming.request, context, body, found, self.wanted(body))

        def send(generation: Generation) -> None:
            if generation.context.answered_by != name:
                self.serving.shadows.send(model, choices)

        return ShadowedAnswer(answer, send)

    def _check_easy(self, choices: list[Choice], wanted: Wanted, cascade: CascadeConfig) -> None:
        """Raise Escalated unless the small model is to try. Log-probabilities of a prompt are wanted of the large."""
        longest = max(len(choice.prompt.token_ids) for choice in choices)
        tokens = wanted.most_tokens
        if wanted.prompt_logprobs is not None:
            raise Escalated("skipped", "the log-probabilities of a prompt are those of the large model")
        if wanted.background:
            raise Escalated("skipped", "a background response has been accepted before an answer could be discarded")
        if not small_may_try(longest, tokens, cascade):
            limit = "" if tokens is None else f" and may have {tokens} more"
            raise Escalated("skipped", f"not easy enough for the small model: it has {longest} tokens{limit}")

    @abstractmethod
    def wanted(self, body: B) -> Wanted: ...

    def _cut(self, info: EngineInfo, tenant: Tenant, body: B, wanted: Wanted, prompt: Prompt) -> Prompt:
        """To what `truncate_prompt_tokens` leaves of it."""
        if (keep := body.truncate_prompt_tokens) is None:
            return prompt
        kept = truncated(prompt.token_ids, keep, wanted.most_tokens, info, tenant)
        return prompt if len(kept) == len(prompt.token_ids) else replace(prompt, token_ids=kept, text=None)

    def _params(self, info: EngineInfo, tenant: Tenant, body: B, wanted: Wanted, prompt: Prompt) -> SamplingParams:
        limit = output_limit(
            wanted.tokens,
            wanted.default,
            len(prompt.token_ids),
            info,
            tenant,
            prompt_param=self.prompt_param,
            param=wanted.param,
        )
        return sampling_params(
            body, info, max_tokens=limit, logprobs=wanted.logprobs, prompt_logprobs=wanted.prompt_logprobs
        )


class TextAnswer(ABC, Generic[B]):
    """Sends what is generated, whole or as a stream of chunks."""

    __slots__ = ("body", "created", "generation", "id", "response", "tier", "tokenizer")

    id_prefix: ClassVar[str]

    def __init__(self, body: B, generation: Generation) -> None:
        self.body = body
        self.generation = generation
        self.response = generation.response
        self.tokenizer = generation.context.model.text.tokenizer
        self.id = generation.response_id = f"{self.id_prefix}{generation.context.id}"
        self.created = int(time.time())
        self.tier = reported_tier(body.service_tier)

    def respond(self) -> Awaitable[None]:
        return self._stream() if self.body.stream else self._send()

    async def _send(self) -> None:
        await self.generation.run()
        await self.response.send(200, encode_json(await self.whole()))

    @abstractmethod
    async def whole(self) -> msgspec.Struct:
        """The answer with all that was generated."""

    @abstractmethod
    async def _stream(self) -> None:
        """Generate, and send what comes as it comes."""


class ChunkedAnswer(TextAnswer[B]):
    """Streams as OpenAI's first endpoints do: chunks of one kind, then usage, then `[DONE]`."""

    __slots__ = ()

    async def _stream(self) -> None:
        usage_so_far = self.generation.usage_in_chunks(self.body)
        await self.generation.run(self.emitter(usage_so_far))
        reported = self.generation.reported_usage()
        with_last = usage_so_far() is not UNSET or reported.ledger is not UNSET
        last = event(self.last_chunk(reported)) if with_last else b""
        await self.response.end_events(last + DONE)

    @abstractmethod
    def emitter(self, usage_so_far: Callable[[], Usage | UnsetType | None]) -> Emit:
        """What sends each piece of a choice as the chunk, or chunks, that it is."""

    @abstractmethod
    def last_chunk(self, usage: Usage) -> msgspec.Struct:
        """A chunk without choices, for the usage alone."""
