"""The process that reads long requests, for `reading.LongRequests`: bodies on its standard input, what they hold on its
standard output. It ends with its standard input, so with the gateway."""

from __future__ import annotations

import gc
import logging
import pickle
import sys
from contextlib import suppress
from typing import Any, BinaryIO

from penstock.core.errors import InvalidRequest, PenstockError
from penstock.gateway.api.anthropic_reading import CountReader, MessagesReader
from penstock.gateway.api.chat import ChatReader
from penstock.gateway.api.comparisons import RerankReader, ScoreReader
from penstock.gateway.api.completions import CompletionReader
from penstock.gateway.api.embeddings import EmbeddingReader
from penstock.gateway.api.llama import LlamaEmbeddingReader, LlamaInfillReader, LlamaReader
from penstock.gateway.api.ollama_embeddings import OllamaEmbeddingsReader, OllamaEmbedReader
from penstock.gateway.api.ollama_reading import OllamaChatReader, OllamaGenerateReader
from penstock.gateway.api.reading import LENGTH, ModelReader, Prompt, Reader, Setup, Terms
from penstock.gateway.api.responses_reading import HeadReader, InputTokensReader, ResponsesReader
from penstock.gateway.api.text_endpoints import DetokenizeReader, TokenizeReader
from penstock.observability.logging import configure_logging

logger = logging.getLogger("penstock.gateway")

GC_THRESHOLDS = (100_000, 50, 100)  # a body may hold millions of lists, and none of them in a cycle


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    if not (first := _frame(requests)):
        return  # the gateway ended before it had said anything
    setup: Setup = pickle.loads(first)
    texts = setup.texts
    configure_logging(setup.logs)
    of_openai = (ChatReader, CompletionReader, ResponsesReader, HeadReader, InputTokensReader, EmbeddingReader)
    of_others = (MessagesReader, CountReader, OllamaChatReader, OllamaGenerateReader, LlamaReader, LlamaInfillReader)
    of_texts = (OllamaEmbedReader, OllamaEmbeddingsReader, LlamaEmbeddingReader)
    of_pairs = (RerankReader, ScoreReader)
    kinds = (*of_openai, *of_others, *of_texts, *of_pairs, TokenizeReader, DetokenizeReader, ModelReader)
    readers: dict[str, Reader[Any]] = {kind.name: kind(texts) for kind in kinds}
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    while header := _frame(requests):
        name, terms = pickle.loads(header)
        for data in _answer(*_read(readers[name], _frame(requests), terms)):
            answers.write(LENGTH.pack(len(data)))
            answers.write(data)
        answers.flush()


def _answer(ok: bool, head: Any, prompts: list[Prompt]) -> list[bytes]:
    try:
        return [pickle.dumps(part) for part in ((ok, head, len(prompts)), *prompts)]
    except RecursionError:
        return [pickle.dumps((False, InvalidRequest("the request is nested too deeply"), 0))]


def _read(reader: Reader[Any], body: bytes, terms: Terms) -> tuple[bool, Any, list[Prompt]]:
    try:
        return True, *reader.read(body, terms)
    except PenstockError as error:
        return False, error, []
    except Exception as error:
        logger.exception("a request could not be read")
        return False, RuntimeError(str(error)), []


def _frame(requests: BinaryIO) -> bytes:
    """Empty at the end, also in the middle of one."""
    header = requests.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return b""
    (length,) = LENGTH.unpack(header)
    data = requests.read(length)
    return data if len(data) == length else b""


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the gateway has gone
        main(sys.stdin.buffer, sys.stdout.buffer)
