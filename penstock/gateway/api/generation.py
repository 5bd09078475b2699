"""Run the choices of one request on an engine, all at once, and hand on each chunk as it comes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Protocol
from urllib.parse import quote

from msgspec import UNSET, UnsetType

from penstock.core.errors import DeadlineTooShort, EngineFailure, InvalidRequest, Overloaded, Unavailable
from penstock.core.request import Chunk
from penstock.gateway.api.cache_control import NAME as CACHE
from penstock.gateway.api.cache_control import cache_header
from penstock.gateway.api.choices import Choice
from penstock.gateway.api.context import Context
from penstock.gateway.api.openai_types import SamplingFields, Usage
from penstock.gateway.api.slices import slices
from penstock.gateway.api.trial import Escalated, Trial
from penstock.gateway.api.usage import count_charged, count_tokens, usage_of
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.limits import Reservation
from penstock.gateway.tenancy.tenants import Tenant
from penstock.observability.account import Account, Attempt, ChoiceAccount, parts_of
from penstock.observability.metrics import GatewayMetrics
from penstock.observability.tracing import Inference
from penstock.text.stream import TextDelta

MAX_ACCOUNTED = 128  # choices of a request, the first ones, whose time is accounted for: more would take too long

REPLICA = b"x-penstock-replica"
MODEL = b"x-penstock-model"
_TRUE = re.compile(rb"true|1", re.IGNORECASE)


Emit = Callable[[Choice, TextDelta], Awaitable[None]]


class Generation:
    """`run` must be called: it settles or releases the reservation."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        reservation: Reservation,
        response: Response,
        context: Context,
        choices: list[Choice],
        trial: Trial | None = None,
    ) -> None:
        """`trial`: if the answer is not good enough, refused, or fails before anything was sent, another model gives
        one."""
        self.engine = context.model.engine
        self.metering = context.model.metering
        self.metrics = metrics.models[context.model.name]
        self.reservation = reservation
        self.request = response.request
        self.response = response
        self.context = context
        self.choices = choices
        self.trial = trial
        self.discarded = False  # whether the trial failed: nothing is charged, nothing counted
        self.attempts: list[Attempt] = []  # by models whose answers were discarded before this one
        self.final_usage: Usage | None = None  # when all has been generated
        self.response_id = context.id  # as the client sees it; ours unless the endpoint says otherwise
        if context.why:
            response.headers[MODEL] = quote(context.answered_by, safe="/:@+ ").encode()

    async def run(self, emit: Emit | None = None) -> None:
        """Returns when every choice has finished. If one fails or the client leaves, all are aborted in the engine.

        Without `emit` the choices hold what was generated.
        """
        refused = False
        try:
            with self.request.cancelling_on_disconnect():
                await self.reservation.admit(self.metering, *self._expected_tokens())
                try:
                    if len(self.choices) == 1:
                        await self._run_choice(self.choices[0], emit)
                    else:
                        await self._run_all(emit)
                except (Escalated, InvalidRequest, Unavailable, Overloaded, EngineFailure) as error:
                    self.discarded = self.trial is not None and not self.response.status
                    if isinstance(error, Overloaded) and not self.discarded:
                        if isinstance(error, DeadlineTooShort):
                            self.metrics.refused_deadlines += 1
                        else:
                            self.metrics.refused += 1
                        refused = not self._begun()
                    raise
                finally:
                    if not self.discarded and not refused:
                        self._record()
                        self._settle()
        finally:
            self.reservation.release()

    async def _run_all(self, emit: Emit | None) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                async for some in slices(self.choices):
                    for choice in some:
                        tasks.create_task(self._run_choice(choice, emit))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run_choice(self, choice: Choice, emit: Emit | None) -> None:
        choice.submitted = time.monotonic()
        chunks = self.engine.submit(choice.request)
        push, trial = choice.stream.push, self.trial
        latencies = self.metrics.of_class(self.context.objective.name)
        observe_inter_token = latencies.inter_token.observe
        trace_id = self.request.trace_id
        last: float | None = None
        computed = True
        try:
            if choice.request.output:
                before = push(Chunk(choice.request.id, list(choice.request.output)))
                if emit is not None:
                    await emit(choice, before)
                else:
                    choice.keep(before)
            async for chunk in chunks:
                if chunk.finish_reason is not None:
                    self._last_chunk(choice, chunk)
                now = time.monotonic()
                if last is None:
                    self._first_chunk(choice, chunk)
                    computed = choice.computed
                elif computed and (count := len(chunk.token_ids)):
                    observe_inter_token((now - last) / count, count, trace_id)
                last = now
                delta = TextDelta("", [], "length") if choice.prompt_only else push(chunk)
                if trial is not None:
                    judged = await trial.judge(choice.index, delta)
                    if judged is None:
                        continue
                    delta = judged
                if choice.first is None:
                    choice.first = time.monotonic()
                    latencies.first_token.observe(choice.first - self.context.arrived, 1, trace_id)
                finished = delta.finish_reason
                if finished is not None:
                    choice.finish_reason, choice.stop_reason = finished, delta.stop_matched
                if emit is not None:
                    await emit(choice, delta)
                else:
                    choice.keep(delta)
                if finished is not None:
                    return
                if choice.note is not None:
                    choice.note(chunk.token_ids)
            raise EngineFailure("the engine ended the stream without a finish reason")
        finally:
            choice.ended = time.monotonic()
            unused = trial is not None and trial.failed
            share = choice.share
            if share is not None:
                share.waived = unused or choice.first is None
            await chunks.aclose()
            if share is not None and share.owner and share.paid is None and share.cached_tokens is not None:
                choice.cached_tokens = share.cached_tokens
            if choice.computed and choice.ledger is None and not unused:
                # it was ended here: by a stop string, or the client left
                choice.ledger = await self.engine.aborted(choice.request.id)

    def _first_chunk(self, choice: Choice, chunk: Chunk) -> None:
        if chunk.cache is None or chunk.cache.computed:
            self.metrics.queue_time.observe(chunk.queue_seconds, 1, self.request.trace_id)
        if chunk.cache is not None:
            choice.cache = chunk.cache
            statuses = [known.cache for known in self.choices if known.cache is not None]
            self.response.headers[CACHE] = cache_header(statuses)
        if chunk.replica:
            others = self.response.headers.get(REPLICA)
            names = chunk.replica if others is None else _with_name(others.decode(), chunk.replica)
            self.response.headers[REPLICA] = names.encode()
        choice.cached_tokens = chunk.cached_tokens
        choice.prompt_logprobs = chunk.prompt_logprobs

    def _last_chunk(self, choice: Choice, chunk: Chunk) -> None:
        if chunk.ledger is not None and chunk.ledger.request_id == choice.request.id:
            choice.ledger = chunk.ledger
        choice.vector = chunk.vector
        chunk.raise_failure()

    def _begun(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.first is not None]

    def _record(self) -> None:
        self.final_usage = self.usage()
        prompt_tokens, cached_tokens, outputs = count_tokens(self._begun())
        self.metrics.prompt_tokens += prompt_tokens
        self.metrics.cached_tokens += cached_tokens
        self.metrics.output_tokens += sum(outputs)
        self.metrics.request_time.observe(time.monotonic() - self.context.arrived, 1, self.request.trace_id)

    def _expected_tokens(self) -> tuple[int, int]:
        """Of the prompts and of the output."""
        tenant, asked = self.context.tenant.name, self.context.output_asked
        expected = self.metering.expected_output
        prompt_tokens = output_tokens = 0
        for choice in self.choices:
            output_tokens += expected(tenant, choice.request.params.max_tokens or 0, asked)
            if choice.first_of_prompt:
                prompt_tokens += len(choice.prompt.token_ids)
        return prompt_tokens, output_tokens

    def _settle(self) -> None:
        """What was stored, or is computed for another request that stays to its end, is not charged."""
        self.reservation.settle(self.metering, *count_charged(self.choices))

    def usage(self) -> Usage:
        return usage_of(self.choices)

    def usage_in_chunks(self, body: SamplingFields) -> Callable[[], Usage | UnsetType | None]:
        """What each chunk of a stream says of usage: nothing, null when it comes at the end, or what it is so far."""
        options = body.stream_options
        if options is None or not options.include_usage:
            return lambda: UNSET
        return self.usage if options.continuous_usage_stats else lambda: None

    def reported_usage(self) -> Usage:
        """What the response says, with the account so far when the client asked for it."""
        usage = self.final_usage or self.usage()
        if self.request.header(b"x-penstock-ledger", _TRUE) is not None:
            usage.ledger = self.account(200, None)
        return usage

    def account(self, status: int, error: str | None) -> Account:
        """Up to the end of the answer, or to now while there is none."""
        context, usage = self.context, self.final_usage or self.usage()
        total = self.response.elapsed()
        firsts = [choice.first for choice in self.choices if choice.first is not None]
        return Account(
            id=context.id,
            request_id=context.request_id,
            tenant=context.tenant.name,
            objective=context.objective.name,
            endpoint=context.endpoint,
            asked=context.asked,
            model=context.model.name,
            adapter=None if context.adapter is None else context.adapter.account,
            why=context.why if self.trial is None else self.trial.verdict,
            status=status,
            error=error,
            arrived=time.time() - (time.monotonic() - context.arrived),
            total=total,
            ttft=min(firsts) - context.arrived if firsts else None,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            output_tokens=usage.completion_tokens,
            choices=[self._choice_account(choice, total) for choice in self.choices[:MAX_ACCOUNTED]],
            attempts=self.attempts,
        )

    def inference(self) -> Inference:
        """What traces tell beside the account."""
        choice = self.choices[0]
        reasoning_tokens = sum(choice.stream.reasoning_tokens for choice in self.choices)
        return Inference(
            response_id=self.response_id,
            params=None if choice.prompt_only else choice.request.params,
            max_tokens=choice.request.params.max_tokens if self.context.output_asked else None,
            streamed=self.response.streaming,
            reasoning_tokens=reasoning_tokens if choice.stream.reasons else None,
        )

    def attempt(self, why: str) -> Attempt:
        """Of a trial that failed. The headers that it set are taken back."""
        for header in (REPLICA, CACHE):
            self.response.headers.pop(header, None)
        begun = min((choice.submitted for choice in self.choices if choice.submitted is not None), default=None)
        seconds = 0.0 if begun is None else time.monotonic() - begun
        return Attempt(
            model=self.context.answered_by,
            why=why,
            seconds=seconds,
            output_tokens=sum(choice.stream.output_tokens for choice in self.choices),
        )

    def _choice_account(self, choice: Choice, total: float) -> ChoiceAccount:
        arrived = self.context.arrived
        end = arrived + total
        tried = sum(attempt.seconds for attempt in self.attempts)
        submitted = end if choice.submitted is None else choice.submitted
        answered = (choice.ended or end) - submitted
        parts = parts_of(total, submitted - arrived - tried, answered, choice.ledger, tried)
        return ChoiceAccount(
            index=choice.index,
            parts=parts,
            finish_reason=choice.finish_reason,
            cache=None if choice.cache is None else choice.cache.state,
            engine=choice.ledger,
        )


def _with_name(names: str, name: str) -> str:
    return ", ".join(sorted({name, *names.split(", ")}))


class Answer(Protocol):
    """What an endpoint makes of a request to generate, before it sends anything."""

    @property
    def generation(self) -> Generation: ...

    def respond(self) -> Awaitable[None]:
        """Generate, and send what is generated in the endpoint's format."""
        ...


# Sends a response itself, or returns the answer to a request to generate.
Handler = Callable[[Request, Response, Tenant], Awaitable[Answer | None]]
