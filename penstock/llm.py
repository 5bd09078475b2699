"""The engine as a library.

from penstock import LLM, SamplingParams

llm = LLM("smollm2-135m")
for completion in llm.generate(["Rain falls because", "A penstock is"], SamplingParams(max_tokens=32)):
    print(completion.text)
"""

from __future__ import annotations

import gc
import operator
import queue
import sys
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from penstock.checkpoint.source import DEFAULT_MODEL, resolve
from penstock.core.errors import InvalidRequest
from penstock.core.request import (
    Adapter,
    Chunk,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
    choice_seed,
)
from penstock.core.settings import convert_section
from penstock.engine.local import LocalEngine
from penstock.engine.settings import EngineConfig
from penstock.grammar.compiler import grammars_of
from penstock.lora.checkpoint import adapter_digest
from penstock.lora.host_memory import adapters_of
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
    """A model in this process. `adapters` are folders of LoRA adapters by the names that `generate`, `chat` and
    `stream` choose them by; further keyword arguments are those of the section `engine` of the settings, such as
    `kv_memory_gib=4, speculation={"method": "off"}`."""

    def __init__(
        self, model: str = DEFAULT_MODEL, *, adapters: Mapping[str, str | Path] | None = None, **engine: Any
    ) -> None:
        self.tokenizer = load_tokenizer(resolve(model))
        self._template = ChatTemplate(self.tokenizer.chat_template)
        # A library's caller may queue at will.
        config = convert_section(EngineConfig, "", {"max_waiting": sys.maxsize, **engine})
        scheduler, executor, info = start(model, config, LoadProgress(sys.stderr))
        grammars = grammars_of(scheduler.limits, model, self.tokenizer)
        self._host_adapters = adapters_of(executor, config.max_adapter_rank, config.adapter_memory_gib)
        self.engine = LocalEngine(scheduler, executor, info, grammars, self._host_adapters)
        self._adapters: dict[str, Adapter] = {}
        for name, folder in (adapters or {}).items():
            self.load_adapter(name, folder)

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """A LoRA adapter as PEFT writes it; a name that is taken means this one from now on. Raises InvalidRequest for
        what does not fit the model."""
        self.engine.check_open()
        if self._host_adapters is None:
            raise InvalidRequest("this model runs without LoRA adapters", param="adapters")
        adapter = Adapter(adapter_digest(folder), str(folder))
        self._host_adapters.get(adapter)
        self._adapters[name] = adapter

    @property
    def sampling_defaults(self) -> SamplingParams:
        """What is used where no params are given: what the model's authors recommend."""
        return self.engine.info.sampling_defaults

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete each prompt (text or token ids), with a LoRA adapter or without (None). One result per prompt, in
        order."""
        batch = _as_batch(prompts)
        per_prompt = list(params) if isinstance(params, Sequence) else [params or self.sampling_defaults] * len(batch)
        names = list(adapter) if adapter is not None and not isinstance(adapter, str) else [adapter] * len(batch)
        for one in per_prompt:
            if not isinstance(one, SamplingParams):
                raise InvalidRequest(f"params must be SamplingParams, not {one!r}", param="params")
        for given, what in ((per_prompt, "params"), (names, "adapters")):
            if len(given) != len(batch):
                raise InvalidRequest(f"{len(batch)} prompts but {len(given)} {what}; give one each, or one for all")
        adapters = [self._adapter(name) for name in names]
        completions = [
            Completion(self._encode(prompt), [Choice() for _ in range(p.n)])
            for prompt, p in zip(batch, per_prompt, strict=True)
        ]
        inbox: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        jobs: dict[str, _Job] = {}
        try:
            for completion, p, used in zip(completions, per_prompt, adapters, strict=True):
                for number, choice in enumerate(completion.choices):
                    request = _request(completion.prompt_token_ids, p, number, used)
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

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> AsyncGenerator[TextDelta, None]:
        """Complete one prompt, yielding text as it is generated. Closing the generator aborts it."""
        params = params or self.sampling_defaults
        if params.n > 1:
            raise InvalidRequest("n must be 1: what is streamed is one answer", param="n")
        text = TextStream(self.tokenizer, params)
        chunks = self.engine.submit(_request(self._encode(prompt), params, 0, self._adapter(adapter)))
        try:
            async for chunk in chunks:
                chunk.raise_failure()
                delta = text.push(chunk)
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            await chunks.aclose()

    def chat(
        self, messages: list[dict[str, Any]], params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Completion:
        """Answer a conversation, using the model's chat template."""
        if isinstance(messages, str) or not all(isinstance(message, dict) for message in messages):
            problem = 'messages must be a list such as [{"role": "user", "content": "Hello!"}]'
            raise InvalidRequest(problem, param="messages")
        tokenizer = self.tokenizer
        text = self._template.render(messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        return self.generate([prompt], params, adapter=adapter, progress=False)[0]

    def _adapter(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise InvalidRequest(f"there is no adapter {name!r}; loaded: {known}", param="adapter")
        return self._adapters[name]

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise InvalidRequest("a prompt must be text or a list of token ids", param="prompt") from None

    def close(self) -> None:
        """Stop the engine and free its memory. What still runs ends with an error, and so does every later call."""
        self.engine.close()
        self._host_adapters = None
        gc.collect()  # parts of the model refer to each other, and the next one may need the memory of the GPU

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


def _request(prompt: Sequence[int], params: SamplingParams, choice: int, adapter: Adapter | None) -> GenerateRequest:
    seed = choice_seed(params.seed, choice)
    return GenerateRequest(uuid.uuid4().hex, prompt, params, seed=seed, adapter=adapter)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt may be given bare: a text, or a list of token ids."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
