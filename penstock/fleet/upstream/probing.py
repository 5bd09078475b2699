"""Short requests that show what an upstream can do, whatever it speaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar, SamplingParams
from penstock.fleet.upstream.protocol import Piece

TRIAL_PROMPT = "Once upon a time there was a small house by the river, and in it"
TRIAL_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0)
_CONSTRAINED = SamplingParams(temperature=0.0, grammar=Grammar("json_schema", '{"const":"zq"}'))
_SEEDED = SamplingParams(temperature=1.0, seed=20_240_229)

Prompt = str | list[int]
Ask = Callable[[Prompt, SamplingParams], Awaitable[list[Piece]]]  # for `TRIAL_TOKENS`


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


async def heeds_seed(ask: Ask, prompt: Prompt) -> bool:
    try:
        return text_of(await ask(prompt, _SEEDED)) == text_of(await ask(prompt, _SEEDED))
    except InvalidRequest:
        return False


async def heeds_grammar(ask: Ask, prompt: Prompt) -> bool:
    """Whether a schema is enforced. Servers ignore what they do not know, as older versions do."""
    try:
        return text_of(await ask(prompt, _CONSTRAINED)).strip() == '"zq"'
    except InvalidRequest:
        return False


async def continues_text(ask: Ask) -> bool:
    """Whether a server goes on exactly where a text ends. One that puts a template around it does not."""
    texts = [piece.text for piece in await ask(TRIAL_PROMPT, GREEDY) if piece.text]
    if len(texts) == 1:  # a server that does not stream
        start, space, end = texts[0].rpartition(" ")
        texts = [start, space + end]
    half = len(texts) // 2
    begin, rest = "".join(texts[:half]), "".join(texts[half:])
    return bool(begin) and text_of(await ask(TRIAL_PROMPT + begin, GREEDY)).startswith(rest)
