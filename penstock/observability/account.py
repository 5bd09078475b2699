"""Where the time of a request went, from its arrival at the gateway to the end of its response. Seconds throughout.

The engine's ledger covers the time between the submission of a choice and its last token; the gateway adds what came
before and after. `relay` is what nothing else explains: the sockets and queues between gateway and worker, turning
tokens into text, and sending. The parts of a choice add up to the request's total.
"""

from __future__ import annotations

from msgspec import Struct

from penstock.core.ledger import Ledger


class Parts(Struct, kw_only=True):
    prepare: float  # from arrival to submission: reading the body, template, tokenising, limits
    cascade: float = 0.0  # at a small model whose answer was not used
    held: float = 0.0  # until there was a replica: none was running
    queued: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    stalled: float = 0.0
    failover: float = 0.0  # at replicas that were lost, and until another one took over
    answer: float = (
        0.0  # in place of those from `held` on where there is no ledger: answered from a cache, or never run
    )
    relay: float = 0.0


class ChoiceAccount(Struct, kw_only=True):
    index: int
    parts: Parts
    finish_reason: str | None  # None: it failed, or the client left
    cache: str | None  # what the result cache did: hit, similar, shared, miss or bypass; None: there is none
    engine: Ledger | None


class Attempt(Struct, kw_only=True):
    """Of the small model of a cascade, whose answer was not used."""

    model: str
    why: str  # a phrase for people: why not
    seconds: float
    output_tokens: int  # that it had given by then; they are not charged


class AdapterAccount(Struct):
    """The LoRA adapter that a model computed with."""

    name: str
    digest: str


class Account(Struct, kw_only=True):
    id: str  # ours; the client's own is `request_id`
    request_id: str
    tenant: str
    objective: str  # name of the class
    endpoint: str
    asked: str  # what the client called the model
    model: str  # that answered
    adapter: AdapterAccount | None = None
    why: str = ""  # a phrase for people: why that one; empty if it is the one that was asked for
    status: int
    error: str | None
    arrived: float  # seconds since 1970
    total: float
    ttft: float | None  # from arrival to the first token, as the gateway saw it
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    choices: list[ChoiceAccount]
    attempts: list[Attempt] = []  # before the model that answered


def parts_of(total: float, prepare: float, answered: float, ledger: Ledger | None, cascade: float = 0.0) -> Parts:
    """`answered` is the time between submission and the last chunk, `cascade` what models before this one took."""
    before = prepare + cascade
    if ledger is None:
        return Parts(prepare=prepare, cascade=cascade, answer=answered, relay=max(total - before - answered, 0.0))
    return Parts(
        prepare=prepare,
        cascade=cascade,
        held=ledger.held,
        queued=sum(ledger.queued.values()),
        prefill=sum(chunk.seconds for chunk in ledger.prefill),
        decode=ledger.decode,
        stalled=ledger.stalled,
        failover=ledger.failover,
        relay=total - before - ledger.accounted,
    )
