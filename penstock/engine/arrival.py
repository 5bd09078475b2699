"""A request that arrives becomes a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.core.request import GenerateRequest, Grammar, Objective
from penstock.engine.bookkeeping import open_ledger
from penstock.engine.executor import AdapterWeights
from penstock.engine.fairness import TenantCounter
from penstock.engine.grammar import Constraint, Grammars, constraint_of
from penstock.engine.limits import SchedulerLimits
from penstock.engine.sequence import Sequence

MOST_PRIORITY = 100  # what is beyond is the same: for each step the queues of all priorities are looked at

_NO_OBJECTIVE = Objective()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a request needs beside its tokens."""

    constraint: Constraint | None = None  # its grammar, at the beginning of its output
    adapter: AdapterWeights | None = None  # read from its folder


NOTHING = Prepared()


def objective_of(request: GenerateRequest, limits: SchedulerLimits) -> Objective:
    """What the scheduler goes by: nothing if the first that comes is the first served."""
    return _NO_OBJECTIVE if limits.fcfs else request.objective


def max_len_of(request: GenerateRequest, limits: SchedulerLimits) -> int:
    """Of prompt and output together."""
    most = limits.longest_sequence if request.params.max_tokens is None else request.params.max_tokens
    return min(len(request.prompt) + most, limits.longest_sequence)


def stop_ids_of(request: GenerateRequest, limits: SchedulerLimits) -> frozenset[int]:
    params = request.params
    return frozenset(params.stop_token_ids).union(() if params.ignore_eos else limits.eos_ids)


def constrained(request: GenerateRequest, grammar: Grammar, grammars: Grammars, limits: SchedulerLimits) -> Constraint:
    """By its grammar, after the output that it comes with. Raises InvalidRequest if that does not fit."""
    stops = stop_ids_of(request, limits)
    matcher = grammars.matcher(grammar, limits.eos_ids - stops)
    return constraint_of(request, matcher, stops, max_len_of(request, limits))


def sequence_of(
    request: GenerateRequest,
    number: int,
    counter: TenantCounter,
    limits: SchedulerLimits,
    now: float,
    prepared: Prepared = NOTHING,
) -> Sequence:
    """`number` counts arrivals. Its due time is now, and all its tokens are to be computed."""
    params, objective, max_len = request.params, objective_of(request, limits), max_len_of(request, limits)
    given = len(request.prompt) + len(request.output)
    constraint = prepared.constraint
    tokens = [*request.prompt, *request.output, *(constraint.unsent if constraint is not None else ())]
    return Sequence(
        request=request,
        order=(objective.rank, max(-MOST_PRIORITY, min(request.priority, MOST_PRIORITY)), number),
        arrival=now,
        max_len=max_len,
        stop_ids=stop_ids_of(request, limits),
        tokens=tokens,
        prompt_len=len(request.prompt),
        given=given,
        counter=counter,
        ledger=open_ledger(request),
        due=now,
        promised=objective.ttft is not None,
        itl=objective.itl or math.inf,
        paced=objective.paced,
        background=objective.rank > 0 and objective.ttft is None and objective.itl is None,
        sampling=len(tokens) < max_len,
        to_compute=len(tokens),
        prompt_logprobs=None if params.prompt_logprobs is None or request.output else [None],
        mark=now,
        constraint=constraint,
        adapter=prepared.adapter,
    )
