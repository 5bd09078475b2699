"""An answer as it is stored, and its replay as chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Literal

import msgspec

from penstock.core.request import Chunk, TokenLogprob

FORMAT = b"\x01"
DIGEST_BYTES = 16
REPLAY_TOKENS = 16  # in one chunk

End = Literal["stop", "length", "stop string"]


class Answer(msgspec.Struct, array_like=True, frozen=True):
    created: float  # seconds since 1970
    end: End
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None
    vector: bytes | None = None

    def fits(self, max_tokens: int | None) -> bool:
        """Whether the same answer would be computed with this `max_tokens`."""
        count = len(self.token_ids)
        return count == max_tokens if self.end == "length" else max_tokens is None or count <= max_tokens

    def replay(self, request_id: str, prompt_tokens: int) -> Iterator[Chunk]:
        """Yield the stored answer as chunks of up to `REPLAY_TOKENS` tokens."""
        count = len(self.token_ids)
        for start in range(0, count or 1, REPLAY_TOKENS):
            piece = slice(start, start + REPLAY_TOKENS)
            chunk = Chunk(request_id, self.token_ids[piece])
            if self.logprobs is not None:
                chunk.logprobs = self.logprobs[piece]
            if start == 0:
                chunk.prompt_logprobs, chunk.cached_tokens = self.prompt_logprobs, prompt_tokens
            if start + REPLAY_TOKENS >= count and self.end != "stop string":
                chunk.finish_reason, chunk.vector = self.end, self.vector
            yield chunk
        if self.end == "stop string":
            yield Chunk(request_id, finish_reason="stop")


def answer_of(chunks: Sequence[Chunk], end: End, created: float) -> Answer:
    with_logprobs = chunks[0].logprobs is not None
    return Answer(
        created,
        end,
        [token_id for chunk in chunks for token_id in chunk.token_ids],
        [entry for chunk in chunks for entry in chunk.logprobs or ()] if with_logprobs else None,
        chunks[0].prompt_logprobs,
        chunks[-1].vector,
    )


encode_answer = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def seal(key: bytes, payload: bytes) -> bytes:
    """Prepend a checksum over key and value, so that `unseal` rejects a damaged value or one of another key."""
    return FORMAT + _digest(key, payload) + payload


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    start = len(FORMAT) + DIGEST_BYTES
    payload = sealed[start:]
    intact = sealed[: len(FORMAT)] == FORMAT and sealed[len(FORMAT) : start] == _digest(key, payload)
    return payload if intact else None


def _digest(key: bytes, payload: bytes) -> bytes:
    return blake2b(payload, key=key, digest_size=DIGEST_BYTES).digest()
