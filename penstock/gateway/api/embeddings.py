"""POST /v1/embeddings, as OpenAI's."""

from __future__ import annotations

from array import array
from base64 import b64encode
from math import sqrt
from sys import byteorder
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.core.engine import EngineInfo, Task
from penstock.gateway.api.choices import Choice
from penstock.gateway.api.completions import split_inputs
from penstock.gateway.api.openai_types import TokenIds
from penstock.gateway.api.reading import Prompt
from penstock.gateway.api.serving import encode_json
from penstock.gateway.api.slices import joined
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


class EmbeddingRequest(TextFields, kw_only=True):
    input: str | list[str | int | TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None  # of the vector's first numbers; it is normalised again


class Embedding(Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct):
    data: list[Embedding]
    model: str
    usage: TextUsage
    object: Literal["list"] = "list"


class EmbeddingReader(VectorReader[EmbeddingRequest]):
    name = "embeddings"
    decoder = msgspec.json.Decoder(EmbeddingRequest)
    tasks = ("embed",)

    def prompts(self, asked: EmbeddingRequest, texts: Texts, task: Task) -> list[Prompt]:
        inputs = split_inputs(asked.input, "input")
        require(len(inputs) <= MAX_TEXTS, "input", f"must hold at most {MAX_TEXTS} texts; send several requests")
        params = ["input"] if len(inputs) == 1 else [f"input[{position}]" for position in range(len(inputs))]
        return [texts.prompt(given, param) for given, param in zip(inputs, params, strict=True)]

    def without_texts(self, asked: EmbeddingRequest) -> dict[str, Any]:
        return {"input": ""}


class EmbeddingAnswer(VectorAnswer[EmbeddingRequest]):
    __slots__ = ()

    async def whole(self) -> bytes:
        choices, info = self.generation.choices, self.generation.engine.info
        data = [encode_json([self.shown(choice)]) async for choice in in_slices(choices, info.width)]
        return encode_json(self.listed(joined(data)))

    def listed(self, data: Any) -> Struct:
        """The answer with what `shown` makes of each text."""
        return EmbeddingList(data, self.body.model, self.usage())

    def vector(self, choice: Choice) -> array[float]:
        vector = numbers(choice)
        if self.body.dimensions is None:
            return vector
        return shortened(vector, self.body.dimensions, normalize=self.generation.engine.info.normalized)

    def shown(self, choice: Choice) -> Any:
        vector = self.vector(choice)
        if self.body.encoding_format != "base64":
            return Embedding(choice.index, vector.tolist())
        if byteorder == "big":
            vector.byteswap()
        return Embedding(choice.index, b64encode(vector.tobytes()).decode())


def shortened(vector: array[float], size: int, *, normalize: bool) -> array[float]:
    """Its first numbers, of length 1 again if it had that."""
    kept = vector[:size]
    length = sqrt(sum(x * x for x in kept)) if normalize else 1.0
    return array("f", [x / length for x in kept]) if length else kept


class Embeddings(VectorEndpoint[EmbeddingRequest]):
    endpoint = "/v1/embeddings"
    reader_type = EmbeddingReader
    answer_type = EmbeddingAnswer

    def check(self, body: EmbeddingRequest, info: EngineInfo) -> None:
        fits = body.dimensions is None or body.dimensions <= info.width
        require(fits, "dimensions", f"must be at most {info.width}, the size of this model's vectors")
