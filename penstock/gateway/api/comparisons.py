"""POST /v1/rerank (/v2/rerank, /rerank), as Cohere's and Jina's, and POST /v1/score (/score), as vLLM's.

A cross-encoder reads two texts at once and scores them. A model for embeddings makes a vector of each, and the score is
the cosine between them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import sqrt
from operator import mul
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.core.engine import Task
from penstock.gateway.api.generation import Generation
from penstock.gateway.api.reading import Prompt
from penstock.gateway.api.serving import encode_json
from penstock.gateway.api.vectors import (
    MAX_TEXTS,
    TextFields,
    Texts,
    TextUsage,
    VectorAnswer,
    VectorEndpoint,
    VectorReader,
    in_slices,
    numbers,
)
from penstock.gateway.errors import require


class Document(Struct):
    text: str


class RerankRequest(TextFields, kw_only=True):
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1)] | None = None  # what is longer is cut, to the window as well


class RankedDocument(Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET  # with return_documents


class Reranked(Struct):
    id: str
    model: str
    results: list[RankedDocument]  # the most relevant first
    usage: TextUsage


class ScoreRequest(TextFields, kw_only=True):
    """One text against one or several, or several against as many."""

    text_1: str | list[str]
    text_2: str | list[str]


class Score(Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class Scored(Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: TextUsage
    object: Literal["list"] = "list"


class RerankReader(VectorReader[RerankRequest]):
    name = "rerank"
    decoder = msgspec.json.Decoder(RerankRequest)
    tasks = ("score", "embed")

    def prompts(self, asked: RerankRequest, texts: Texts, task: Task) -> list[Prompt]:
        documents = [given if isinstance(given, str) else given.text for given in asked.documents]
        found = _prompts([asked.query], documents, ("query", "documents"), texts, task, asked.max_tokens_per_doc)
        if asked.return_documents:
            first = len(found) - len(documents)
            found[first:] = [replace(prompt, text=text) for prompt, text in zip(found[first:], documents, strict=True)]
        return found

    def without_texts(self, asked: RerankRequest) -> dict[str, Any]:
        return {"query": "", "documents": []}


class ScoreReader(VectorReader[ScoreRequest]):
    name = "score"
    decoder = msgspec.json.Decoder(ScoreRequest)
    tasks = ("score", "embed")

    def prompts(self, asked: ScoreRequest, texts: Texts, task: Task) -> list[Prompt]:
        firsts, seconds = _listed(asked.text_1), _listed(asked.text_2)
        for name, given in (("text_1", firsts), ("text_2", seconds)):
            require(len(given) > 0, name, "must not be empty")
        fits = len(firsts) in (1, len(seconds))
        require(fits, "text_1", f"must be one text, or as many as text_2 holds, {len(seconds)}, not {len(firsts)}")
        return _prompts(firsts, seconds, ("text_1", "text_2"), texts, task)

    def without_texts(self, asked: ScoreRequest) -> dict[str, Any]:
        return {"text_1": [""] * len(_listed(asked.text_1)), "text_2": ""}


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _prompts(
    firsts: list[str], seconds: list[str], names: tuple[str, str], texts: Texts, task: Task, most: int | None = None
) -> list[Prompt]:
    """Pairs for a cross-encoder; else all first texts, then all second ones. `most`: tokens to keep of a second one."""
    require(len(seconds) <= MAX_TEXTS, names[1], f"must hold at most {MAX_TEXTS} texts; send several requests")
    ones = [names[0]] if len(firsts) == 1 else [f"{names[0]}[{i}]" for i in range(len(firsts))]
    others = [f"{names[1]}[{i}]" for i in range(len(seconds))]
    for text, param in zip((*firsts, *seconds), (*ones, *others), strict=True):
        require(len(text) > 0, param, "must not be empty")
    if task == "embed":
        of_firsts = [texts.prompt(text, name) for text, name in zip(firsts, ones, strict=True)]
        return of_firsts + [texts.prompt(text, name, most) for text, name in zip(seconds, others, strict=True)]
    repeated = firsts * len(seconds) if len(firsts) == 1 else firsts
    return [texts.pair(one, other, name, most) for one, other, name in zip(repeated, seconds, others, strict=True)]


async def scores(generation: Generation, firsts: int) -> list[float]:
    """Of each second text, with its first one."""
    choices, info = generation.choices, generation.engine.info
    if info.task == "score":
        return [numbers(choice)[0] for choice in choices]
    known = [numbers(choice).tolist() async for choice in in_slices(choices[:firsts], info.width)]
    return [
        cosine(known[choice.index - firsts if firsts > 1 else 0], numbers(choice).tolist())
        async for choice in in_slices(choices[firsts:], info.width)
    ]


def cosine(one: list[float], other: list[float]) -> float:
    lengths = sqrt(sum(map(mul, one, one))) * sqrt(sum(map(mul, other, other)))
    # Rounding takes that of a vector with itself beyond 1.
    return max(-1.0, min(1.0, sum(map(mul, one, other)) / lengths)) if lengths else 0.0


class RerankAnswer(VectorAnswer[RerankRequest]):
    __slots__ = ()

    async def whole(self) -> bytes:
        generation, body = self.generation, self.body
        found = await scores(generation, 1)
        documents = generation.choices[len(generation.choices) - len(found) :]
        ranked = sorted(range(len(found)), key=lambda index: -found[index])[: body.top_n]
        results = [RankedDocument(index, found[index]) for index in ranked]
        for result in results:
            if (text := documents[result.index].prompt.text) is not None:
                result.document = Document(text)
        return encode_json(Reranked(f"rerank-{generation.context.id}", body.model, results, self.usage()))


class ScoreAnswer(VectorAnswer[ScoreRequest]):
    __slots__ = ()

    async def whole(self) -> bytes:
        found = await scores(self.generation, len(_listed(self.body.text_1)))
        data = [Score(index, score) for index, score in enumerate(found)]
        id = f"score-{self.generation.context.id}"
        return encode_json(Scored(id, int(time.time()), self.body.model, data, self.usage()))


class Reranking(VectorEndpoint[RerankRequest]):
    endpoint = "/v1/rerank"
    reader_type = RerankReader
    answer_type = RerankAnswer


class Scoring(VectorEndpoint[ScoreRequest]):
    endpoint = "/v1/score"
    reader_type = ScoreReader
    answer_type = ScoreAnswer
