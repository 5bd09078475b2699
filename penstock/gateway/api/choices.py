"""One answer in the making, and all that a request wants made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from penstock.core.ledger import Ledger
from penstock.core.request import (
    CacheControl,
    CacheStatus,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Share,
    TokenLogprob,
    choice_seed,
)
from penstock.gateway.api.cache_control import cache_control
from penstock.gateway.api.context import Context, Options
from penstock.gateway.api.reading import Prompt
from penstock.gateway.api.resuming import resume
from penstock.gateway.api.slices import SLICE
from penstock.gateway.errors import require
from penstock.gateway.http.request import Request
from penstock.text.stream import TextDelta, TextStream

MAX_SCORES = 2**18  # log-probabilities of prompts in one answer, which are some 15 MB of JSON
TOO_MANY_SCORES = (
    f"(or logprobs with echo) asks for more than {MAX_SCORES} values, over all prompts and choices; ask for fewer "
    "alternatives, or score the text in parts"
)


@dataclass(slots=True)
class Choice:
    """One answer in the making."""

    index: int
    prompt: Prompt
    request: GenerateRequest
    stream: TextStream
    first_of_prompt: bool  # several choices share a prompt, whose tokens are billed once
    prompt_only: bool  # only the prompt's log-probabilities are wanted; the step they cost samples a token to drop
    opened: bool = False  # something was sent for it
    cached_tokens: int = 0
    cache: CacheStatus | None = None  # None: nothing has come, or there is no result cache
    prompt_logprobs: list[TokenLogprob | None] | None = None
    token_ids: list[int] = field(default_factory=list)  # these two: when it is collected, not streamed
    logprobs: list[TokenLogprob] = field(default_factory=list)
    vector: bytes | None = None  # of a model for embeddings or scores
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    submitted: float | None = None  # these three: time.monotonic()
    first: float | None = None
    ended: float | None = None
    ledger: Ledger | None = None  # None as well: the engine computed the answer for another request
    note: Callable[[list[int]], None] | None = None  # keeps tokens, of a request that outlives this process

    @property
    def computed(self) -> bool:
        """Whether the engine worked for it; otherwise a result cache had the answer or shared another's."""
        return self.cache is None or self.cache.computed

    @property
    def share(self) -> Share | None:
        return None if self.cache is None else self.cache.share

    @property
    def charged(self) -> bool:
        """Whether it pays for a computation: the engine worked for it, or went on for it when another one left."""
        if self.first is None:
            return False
        return self.computed if self.share is None else self.share.owner

    def keep(self, delta: TextDelta) -> None:
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs += delta.logprobs


async def build_choices(
    request: Request,
    context: Context,
    body: Options,
    prompts: Sequence[tuple[Prompt, SamplingParams]],
    *,
    prompt_only: bool = False,
) -> list[Choice]:
    """`n` choices of each prompt, in the order OpenAI numbers them."""
    deadline, tenant = context.remaining(), context.tenant
    tokenizer, prefixes = context.model.text.tokenizer, context.model.prefixes
    control, journal = cache_control(request), request.journal
    choices: list[Choice] = []
    scores = 0
    for position, (prompt, params) in enumerate(prompts):
        if position % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        cache = control if prompt.similar is None else replace(control or CacheControl(), similar=prompt.similar)
        if params.prompt_logprobs is not None:
            scores += len(prompt.token_ids) * (1 + params.prompt_logprobs) * params.n
            require(scores <= MAX_SCORES, "prompt_logprobs", TOO_MANY_SCORES)
        common_tokens = prefixes.common_tokens(prompt.token_ids)
        for number in range(params.n):
            resumed = None if journal is None else resume(journal, context, params, len(choices))
            wanted = GenerateRequest(
                id=f"{context.id}-{len(choices)}",
                prompt=prompt.token_ids,
                params=params,
                adapter=None if context.adapter is None else context.adapter.adapter,
                seed=choice_seed(params.seed, number) if resumed is None else resumed.seed(number),
                output=() if resumed is None else resumed.output,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                prefix_scope=prefixes.scope(tenant.name),
                common_tokens=common_tokens,
                prediction=prompt.prediction or (),
                objective=context.objective,
                deadline=deadline,
                session=context.session,
                tenant=tenant.name,
                weight=tenant.weight,
                cache=cache,
                second_text=prompt.second_text,
            )
            stream = TextStream(tokenizer, params, prompt.form)
            choices.append(Choice(len(choices), prompt, wanted, stream, number == 0, prompt_only))
            if resumed is not None:
                choices[-1].note = resumed.note
    return choices
