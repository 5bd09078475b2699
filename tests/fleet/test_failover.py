"""What keeps a failure from spreading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import EngineFailure
from penstock.core.request import GenerateRequest, SamplingParams
from penstock.fleet.failover import (
    BREAK_AFTER,
    LAST_BREAK_SECONDS,
    QUARANTINE_SECONDS,
    QUARANTINED,
    SPARE_RETRIES,
    CircuitBreaker,
    Quarantine,
    RetryBudget,
)


def asking(*prompt: int, **params: float) -> GenerateRequest:
    return GenerateRequest("r", prompt, SamplingParams(**params))  # type: ignore[arg-type]


def test_a_convict_and_its_like_are_refused_for_a_while() -> None:
    quarantine = Quarantine()
    quarantine.check(asking(1, 2), 0.0)
    assert quarantine.convict(asking(1, 2), 0.0).code == "quarantined"
    with pytest.raises(EngineFailure, match="not tried again"):
        quarantine.check(asking(1, 2), 1.0)
    quarantine.check(asking(1, 3), 1.0)
    quarantine.check(asking(1, 2, temperature=0.5), 1.0)
    quarantine.check(asking(1, 2), QUARANTINE_SECONDS + 1)


def test_it_remembers_a_bounded_number() -> None:
    quarantine = Quarantine()
    for number in range(QUARANTINED + 5):
        quarantine.convict(asking(number), 0.0)
    quarantine.check(asking(0), 1.0)
    with pytest.raises(EngineFailure):
        quarantine.check(asking(QUARANTINED), 1.0)


def test_fruitless_retries_end() -> None:
    budget = RetryBudget()
    allowed = 0
    while budget.spend(in_flight=4, now=0.0):
        allowed += 1
    assert allowed == SPARE_RETRIES + 8
    budget.refund()
    assert budget.spend(4, 0.0)
    assert not budget.spend(4, 0.0)
    assert budget.spend(4, 10.0), "they are forgotten with time"


@given(st.lists(st.booleans(), max_size=200))
def test_retries_that_bring_tokens_are_never_refused(losses: list[bool]) -> None:
    budget = RetryBudget()
    for _ in losses * 10:
        assert budget.spend(1, 0.0)
        budget.refund()


def test_a_breaker_opens_and_lets_one_through() -> None:
    breaker = CircuitBreaker()
    for _ in range(BREAK_AFTER):
        assert breaker.allows(0.0)
        breaker.failed(0.0)
    assert breaker.open
    assert not breaker.allows(0.5)
    assert breaker.allows(1.5)
    breaker.try_again(1.5)
    assert not breaker.allows(1.6), "one request is enough to see"
    breaker.succeeded()
    assert breaker.allows(1.6)
    assert not breaker.open


@given(st.integers(BREAK_AFTER, 60))
def test_a_breaker_stays_open_ever_longer_but_not_for_ever(failures: int) -> None:
    breaker = CircuitBreaker()
    for _ in range(failures):
        breaker.failed(0.0)
    assert breaker.allows(LAST_BREAK_SECONDS)
