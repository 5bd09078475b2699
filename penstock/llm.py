"""The engine as a library.

from penstock import LLM, SamplingParams

llm = LLM("smollm2-135m")
for completion in llm.generate(["Rain falls because", "A penstock is"], SamplingParams(max_tokens=32)):
    print(completion.text)
"""

from __future__ import annotations

import queue
import sys
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.checkpoint.source import DEFAULT_MODEL, resolve
from penstock.core.errors import InvalidRequest
from penstock.core.request import (
    Chunk,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
    choice_seed,
)
from penstock.engine.local import LocalEngine
from penstock.engine.settings import EngineConfig
from penstock.grammar.compiler import grammars_of
from penstock.runner.progress import LoadProgress, TokenProgress
from penstock.runner.startup import start
from penstock.text.chat_template import ChatTemplate
from penstock.text.stream import TextDelta, TextStream
from penstock.text.tokenizer import load_tokenizer

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class Completion:
    prompt_token_ids: Sequence[int]
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.choices[0].text


class LLM:
    """A model in this process. Keyword arguments are the fields of `EngineConfig`."""

    def __init__(self, model: str = DEFAULT_MODEL, **engine: Any) -> None:
        self.tokenizer = load_tokenizer(resolve(model))
        self._template = ChatTemplate(self.tokenizer.chat_template)
        config = EngineConfig(**{"max_waiting": sys.maxsize, **engine})  # a library's caller may queue at will
        scheduler, executor, info = start(model, config, LoadProgress(sys.stderr))
        grammars = grammars_of(scheduler.limits, executor, model, self.tokenizer)
        self.engine = LocalEngine(scheduler, executor, info, grammars)

    @property
    def sampling_defaults(self) -> SamplingParams:
        """What is used where no params are given: what the model's authors recommend."""
        return self.engine.info.sampling_defaults

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete each prompt (text or token ids). One result per prompt, in order."""
        batch = _as_batch(prompts)
        per_prompt = list(params) if isinstance(params, Sequence) else [params or self.sampling_defaults] * len(batch)
        if len(per_prompt) != len(batch):
            raise InvalidRequest(f"{len(batch)} prompts but {len(per_prompt)} params; give one each, or one for all")
        completions = [
            Completion(self._encode(prompt), [Choice() for _ in range(p.n)])
            for prompt, p in zip(batch, per_prompt, strict=True)
        ]
        inbox: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        jobs: dict[str, _Job] = {}
        try:
            for completion, p in zip(completions, per_prompt, strict=True):
                for number, choice in enumerate(completion.choices):
                    request = _request(completion.prompt_token_ids, p, number)
                    self.engine.start(request, inbox.put)
                    jobs[request.id] = _Job(completion, choice, TextStream(self.tokenizer, p))
            bar = TokenProgress(sys.stderr if progress else None, requests=len(jobs))
            while jobs:
                chunk = inbox.get()
                job = jobs.get(chunk.request_id)
                if job is None:
                    continue  # ended by a stop string; its last chunks were on their way
                delta = job.take(chunk)
                bar.advance(len(delta.token_ids), finished=delta.finish_reason is not None)
                if delta.finish_reason is not None:
                    del jobs[chunk.request_id]
                    self.engine.abort(chunk.request_id)
            bar.close()
        finally:
            for request_id in jobs:
                self.engine.abort(request_id)
        return completions

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[TextDelta, None]:
        """Complete one prompt, yielding text as it is generated. Closing the generator aborts it."""
        params = params or self.sampling_defaults
        text = TextStream(self.tokenizer, params)
        chunks = self.engine.submit(_request(self._encode(prompt), params, 0))
        try:
            async for chunk in chunks:
                chunk.raise_failure()
                delta = text.push(chunk)
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            await chunks.aclose()

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation, using the model's chat template."""
        tokenizer = self.tokenizer
        text = self._template.render(messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        return self.generate([tokenizer.encode(text, add_special_tokens=False)], params, progress=False)[0]

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def close(self) -> None:
        """Stop the engine. What still runs ends with an error, and so does every later call."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class _Job:
    completion: Completion
    choice: Choice
    stream: TextStream

    def take(self, chunk: Chunk) -> TextDelta:
        chunk.raise_failure()
        delta = self.stream.push(chunk)
        choice = self.choice
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.finish_reason = delta.finish_reason
        if delta.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + delta.logprobs
        if chunk.prompt_logprobs is not None:
            self.completion.prompt_logprobs = chunk.prompt_logprobs
        self.completion.cached_tokens = max(self.completion.cached_tokens, chunk.cached_tokens)
        return delta


def _request(prompt: Sequence[int], params: SamplingParams, choice: int) -> GenerateRequest:
    return GenerateRequest(uuid.uuid4().hex, prompt, params, seed=choice_seed(params.seed, choice))


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt may be given bare: a text, or a list of token ids."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
