"""What differs between kinds of upstreams: how to probe them, what to send, and what came back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.client.http import HttpClient, Response, StreamingResponse
from penstock.core.errors import InvalidRequest, Overloaded, PenstockError, Unavailable
from penstock.core.request import FinishReason, GenerateRequest, TokenLogprob
from penstock.fleet.upstream.capabilities import Capabilities
from penstock.fleet.upstream.dialects import Dialect

FAILED = "upstream_failed"  # code of an error that the server has met with a request
RETRY_SECONDS = 1.0  # where a server that refuses does not say when to come again
NO_TOKEN = -1  # in log-probabilities, for a token that the server names by a text of which there is none
UNKNOWN_LOGPROB = -9999.0  # as OpenAI says "very unlikely", for tokens whose log-probability the server did not give

_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "content_filter": "stop",
    "length": "length",
}


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Piece:
    """What one server-sent event adds to an answer."""

    text: str = ""
    cumulative: bool = False  # the text is the whole answer so far
    token_ids: list[int] | None = None  # None: the server gives text alone
    ids_complete: bool = True  # False: of a character of several tokens only the last is named
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a probe found out."""

    server: str  # the program, as in "vllm"; for people
    model: str  # its name there
    max_model_len: int
    health_path: str
    dialect: Dialect
    capabilities: Capabilities


class UpstreamProtocol(Protocol):
    says_finish: bool  # False: an answer is complete when its body ends

    async def probe(self, http: HttpClient) -> Found:
        """Raise Unavailable if the server cannot be reached or serves another model, StartupError if it says too
        little of itself and the settings do not say it either."""
        ...

    def request(self, found: Found, request: GenerateRequest, max_tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body for a request that the capabilities allow."""
        ...

    def parse(self, event: str) -> Piece | None:
        """None: the stream is at its end. Raises what the server reports as an error."""
        ...


def finish_reason(word: str | None) -> FinishReason | None:
    """None where it goes on: servers leave it out, send null or an empty word. A server that aborts a request does so
    for its own reasons: another one may answer it."""
    if not word:
        return None
    if word not in _FINISH:
        raise Unavailable(f"the upstream ended the request: {word}", code="aborted")
    return _FINISH[word]


async def described(http: HttpClient, path: str, seconds: float) -> Response:
    """What a server says of itself. It computes nothing for that, so it takes no longer than a health check."""
    try:
        async with asyncio.timeout(seconds):
            return await http.get(path)
    except TimeoutError:
        raise Unavailable(f"{path} was not answered within {seconds:g} s", code="timeout") from None


async def collect(http: HttpClient, protocol: UpstreamProtocol, path: str, body: Mapping[str, Any]) -> list[Piece]:
    """All of a short answer, each piece with what is new in it."""
    so_far = ""
    async with http.stream("POST", path, body) as response:
        if response.status != 200:
            raise await response_error(response)
        pieces = [piece async for event in response.events() if (piece := protocol.parse(event)) is not None]
    for piece in pieces:
        if piece.cumulative:
            piece.text, so_far = piece.text.removeprefix(so_far), piece.text
    return pieces


async def response_error(response: StreamingResponse) -> PenstockError:
    """What an answer with another status than 200 means to whoever sent the request."""
    return status_error(response.status, await response.read_error(), response.headers)


def status_error(status: int, message: str, headers: Mapping[str, str]) -> PenstockError:
    """Credentials and paths are matters of the settings, so 401, 403 and 404 are no fault of the request."""
    said = f"the upstream answers {status}: {message}"
    if status == 429:
        return Overloaded(said, retry_after=_seconds(headers.get("retry-after")))
    if 400 <= status < 500 and status not in (401, 403, 404, 408):
        return InvalidRequest(said, code="upstream_refused")
    return Unavailable(said, code=FAILED if status == 500 else "upstream_error")


def _seconds(text: str | None) -> float:
    """Retry-After may also be a date, which few servers send."""
    try:
        return max(0.0, float(text or RETRY_SECONDS))
    except ValueError:
        return RETRY_SECONDS
