"""The load of `penstock chaos`: streams of many kinds whose right answers are known, and what differs from those."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from penstock.bench.prompts import WORDS
from penstock.bench.server import LEDGER_HEADER
from penstock.client.http import HttpClient
from penstock.core.errors import Unavailable

PROMPT_WORDS = (12, 40, 120)
RESYNC = 6  # tokens that have to agree after tokens that were lost or repeated
PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.6, "repetition_penalty": 1.1}
STOPPED = "stop string"  # the kind whose stop string is cut from the answer that it would have without

# Whether it is a chat, and the fields of its requests. Tokens beside `max_tokens` are shares of it.
KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "chat": (True, {"temperature": 0}),
    "chat, sampled": (True, {"temperature": 0.8, "top_p": 0.95}),
    "chat, logprobs": (True, {"temperature": 0, "logprobs": True, "top_logprobs": 2}),
    "chat, min_tokens": (True, {"temperature": 1.0, "min_tokens": 0.75}),
    "completion": (False, {"temperature": 0, "ignore_eos": True}),
    "completion, penalties": (False, {"temperature": 0.9, "top_k": 40, "ignore_eos": True, **PENALTIES}),
    "completion, n = 3": (False, {"temperature": 0.7, "n": 3, "ignore_eos": True}),
    "completion, logprobs": (False, {"temperature": 0.5, "logprobs": 2, "ignore_eos": True}),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request that can be sent again and again, and has one right answer."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    times: list[float] = field(default_factory=list)  # of each delivery

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """The times of deliveries that follow each other."""
        return list(pairwise(self.times))


@dataclass(slots=True, eq=False)
class Stream:
    """What has come of one request."""

    ask: Ask
    sent: float = field(default_factory=time.perf_counter)
    finished: float = 0.0
    id: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None  # tokens of prompt and answer
    ledgers: dict[int, dict[str, Any]] = field(default_factory=dict)  # the engine's, by choice
    error: str | None = None
    shed: bool = False  # refused with 429 or 503 before anything was streamed
    retry_after: float = 1.0

    def flows_since(self, at: float) -> bool:
        """Whether it has brought something since then, for every choice that is not at its end."""
        choices = self.choices.values()
        return bool(choices) and all(c.finish_reason or (c.times and c.times[-1] > at) for c in choices)


async def has_chats(http: HttpClient, model: str) -> bool:
    """False: a base model, without a chat template."""
    answer = await http.post("/tokenize", {"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    return answer.status != 400


def plan(model: str, count: int, output_tokens: int, seed: int, *, chats: bool = True) -> list[Ask]:
    """At least so many requests: every kind, each with several prompts."""
    rng = random.Random(seed)
    kinds = [kind for kind, (chat, _) in KINDS.items() if chats or not chat]
    prompts = max(2, -(-count // (len(kinds) + 1)))
    return [_ask(model, kind, output_tokens, rng) for kind in kinds for _ in range(prompts)]


def _ask(model: str, kind: str, output_tokens: int, rng: random.Random) -> Ask:
    chat, fields = KINDS[kind]
    prompt = " ".join(rng.choices(WORDS, k=rng.choice(PROMPT_WORDS)))
    body = {
        "model": model,
        "max_tokens": output_tokens,
        "seed": rng.getrandbits(31),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **fields,
    }
    if "min_tokens" in fields:
        body["min_tokens"] = int(fields["min_tokens"] * output_tokens)
    if chat:
        return Ask(kind, "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]})
    return Ask(kind, "/v1/completions", body | {"prompt": prompt})


def with_stop_string(ask: Ask, text: str) -> Ask:
    """The same request, to end within the answer that it has without a stop string."""
    at = len(text) * 2 // 3
    return replace(ask, kind=STOPPED, body=ask.body | {"stop": [text[at : at + 6] or text or "\n"]})


async def send(http: HttpClient, stream: Stream) -> None:
    """Stream its answer. Failures are recorded, not raised."""
    ask = stream.ask
    try:
        async with http.stream("POST", ask.path, ask.body, LEDGER_HEADER) as response:
            if response.status == 200:
                async for event in response.events():
                    if event != "[DONE]":
                        take(stream, json.loads(event))
            else:
                _refused(stream, response.status, await response.read_error(), response.headers.get("retry-after"))
    except Unavailable as error:
        stream.error = error.message
    except (ValueError, LookupError) as error:
        stream.error = f"an event that is not understood: {error!r}"
    stream.finished = time.perf_counter()
    if stream.error is None and not stream.shed and (stream.usage is None or _unfinished(stream)):
        stream.error = "the stream ended before the answer"


def _unfinished(stream: Stream) -> bool:
    ended = [choice for choice in stream.choices.values() if choice.finish_reason is not None]
    return len(ended) < int(stream.ask.body.get("n", 1))


def _refused(stream: Stream, status: int, message: str, retry_after: str | None) -> None:
    if status in (429, 503):
        stream.shed = True
        stream.retry_after = float(retry_after) if retry_after and retry_after.isdigit() else 1.0
    stream.error = None if stream.shed else f"{status}: {message}"


def take(stream: Stream, chunk: dict[str, Any]) -> None:
    """Add what one event brings."""
    if "error" in chunk:
        stream.error = str(chunk["error"].get("message"))
        return
    stream.id = chunk["id"]
    for one in chunk["choices"]:
        choice = stream.choices.setdefault(one["index"], Choice())
        choice.text += one.get("text") or one.get("delta", {}).get("content") or ""
        choice.finish_reason = one["finish_reason"] or choice.finish_reason
        if one.get("token_ids"):
            choice.token_ids += one["token_ids"]
            choice.times.append(time.perf_counter())
        if scores := one.get("logprobs"):
            choice.logprobs.append(scores)
    if usage := chunk.get("usage"):
        stream.usage = usage["prompt_tokens"], usage["completion_tokens"]
        accounts = (usage.get("ledger") or {}).get("choices", ())
        stream.ledgers = {account["index"]: account["engine"] for account in accounts if account["engine"]}


# -- comparing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """Between an answer and the right one."""

    lost: int = 0  # tokens
    repeated: int = 0
    changed: bool = False  # other text, tokens, log-probabilities, finish reason or usage

    def __bool__(self) -> bool:
        return bool(self.lost or self.repeated or self.changed)


def difference(right: Stream, stream: Stream) -> Difference:
    lost = repeated = 0
    changed = right.usage != stream.usage or right.choices.keys() != stream.choices.keys()
    for index in right.choices.keys() & stream.choices.keys():
        expected, choice = right.choices[index], stream.choices[index]
        missing, again, other = token_difference(expected.token_ids, choice.token_ids)
        lost += missing
        repeated += again
        changed |= other or (expected.text, expected.finish_reason) != (choice.text, choice.finish_reason)
        changed |= _scores(expected) != _scores(choice)
    return Difference(lost, repeated, changed)


def _scores(choice: Choice) -> list[Any]:
    """One entry for each token, however they were divided among chunks."""
    entries: list[Any] = []
    for scores in choice.logprobs:
        if "content" in scores:
            entries += scores["content"]
        else:
            entries += zip(*(scores[name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    return entries


def token_difference(expected: Sequence[int], found: Sequence[int]) -> tuple[int, int, bool]:
    """How many tokens are missing, how many came twice, and whether others came instead."""
    lost = repeated = i = j = 0
    while i < len(expected) and j < len(found):
        if expected[i] == found[j]:
            i, j = i + 1, j + 1
        elif skipped := _ahead(expected, i, found[j : j + RESYNC]):
            lost, i = lost + skipped, i + skipped
        elif (again := _ahead(found, j, expected[i : i + RESYNC])) and found[j : j + again] == expected[i - again : i]:
            repeated, j = repeated + again, j + again
        else:
            return lost, repeated, True
    return lost + len(expected) - i, repeated + len(found) - j, False


def _ahead(tokens: Sequence[int], start: int, wanted: Sequence[int]) -> int:
    """How far after `start` these tokens come; 0: nowhere."""
    for at in range(start + 1, len(tokens) - len(wanted) + 1):
        if tokens[at : at + len(wanted)] == wanted:
            return at - start
    return 0
