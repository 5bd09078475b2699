"""One request to an upstream under way: what arrives becomes chunks, and a ledger is kept."""

from __future__ import annotations

import time

from penstock.core.ledger import Ledger, PrefillChunk
from penstock.core.request import Chunk, GenerateRequest, TokenLogprob
from penstock.fleet.upstream.protocol import UNKNOWN_LOGPROB, Piece, Usage
from penstock.fleet.upstream.retokenizer import Retokenizer, Vocabulary


class Answer:
    def __init__(self, request: GenerateRequest, vocabulary: Vocabulary) -> None:
        self.request = request
        self.usage: Usage | None = None
        self.output_tokens = len(request.output)
        self._retokenizer = Retokenizer(vocabulary)
        self._text = ""  # so far, where the server repeats it
        self._stops = frozenset(request.params.stop_token_ids)
        self._arrived, self._started = time.time(), time.perf_counter()
        self._first: float | None = None

    def chunk(self, piece: Piece) -> Chunk | None:
        """None: nothing that can be passed on yet."""
        self.usage = piece.usage or self.usage
        token_ids = self._token_ids(piece)
        chunk = Chunk(self.request.id, token_ids, piece.finish_reason)
        if self.request.params.logprobs is not None:
            chunk.logprobs = self._scores(token_ids, piece.logprobs or [])
        self._cut_at_stop_token(chunk)
        if not chunk.token_ids and chunk.finish_reason is None:
            return None
        if chunk.token_ids and self._first is None:
            self._first = time.perf_counter()
        self.output_tokens += len(chunk.token_ids)
        return chunk

    def end(self, limit: int) -> Chunk:
        """The last chunk of an answer whose server does not say why it ended."""
        token_ids = self._retokenizer.finish()
        self.output_tokens += len(token_ids)
        full = self.output_tokens - len(self.request.output) >= limit
        return Chunk(self.request.id, token_ids, "length" if full else "stop")

    def _token_ids(self, piece: Piece) -> list[int]:
        if piece.cumulative:
            piece.text, self._text = piece.text.removeprefix(self._text), piece.text
        if piece.token_ids is None:
            scored = [score.token_id for score in piece.logprobs or []]
            ids = self._retokenizer.push(piece.text, scored)
        elif piece.ids_complete:
            ids = piece.token_ids
        else:
            ids = self._retokenizer.complete(piece.text, piece.token_ids)
        return ids if piece.finish_reason is None else ids + self._retokenizer.finish()

    def _scores(self, token_ids: list[int], scores: list[TokenLogprob]) -> list[TokenLogprob]:
        """One per token. Where the server named too few tokens, the first ones have no log-probability."""
        top = self.request.params.logprobs or 0
        unknown = max(0, len(token_ids) - len(scores))
        given = zip(token_ids[unknown:], scores, strict=False)
        return [TokenLogprob(token_id, UNKNOWN_LOGPROB) for token_id in token_ids[:unknown]] + [
            TokenLogprob(token_id, score.logprob, score.top[:top]) for token_id, score in given
        ]

    def _cut_at_stop_token(self, chunk: Chunk) -> None:
        """Not every server knows `stop_token_ids`, so they end the stream here, wherever it goes on there."""
        if self._stops.isdisjoint(chunk.token_ids):
            return
        for place, token_id in enumerate(chunk.token_ids):
            if token_id in self._stops and self.output_tokens + place >= self.request.params.min_tokens:
                del chunk.token_ids[place + 1 :]
                if chunk.logprobs is not None:
                    del chunk.logprobs[place + 1 :]
                chunk.finish_reason = "stop"
                return

    def ledger(self) -> Ledger:
        """All time to the first token counts as prefill: an upstream does not say how long it waited."""
        request, now = self.request, time.perf_counter()
        ttft = (self._first or now) - self._started
        usage = self.usage or Usage(len(request.prompt), 0)
        total = now - self._started
        return Ledger(
            request.id,
            request.tenant,
            request.objective.name,
            arrived=self._arrived,
            total=total,
            ttft=None if self._first is None else ttft,
            prefill=[PrefillChunk(max(0, len(request.prompt) - usage.cached_tokens), ttft)],
            decode=total - ttft,
            decode_steps=max(0, self.output_tokens - len(request.output) - 1),
            prompt_tokens=len(request.prompt),
            cached_tokens=min(usage.cached_tokens, len(request.prompt)),
            output_tokens=self.output_tokens,
        )
