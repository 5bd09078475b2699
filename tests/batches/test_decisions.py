from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.batches.decisions import (
    MAX_ATTEMPTS,
    MAX_DELAY,
    MAX_LOSSES,
    MAX_WAIT,
    RENEW_SECONDS,
    after_failure,
    at_once,
    next_status,
    renewal_seconds,
    room,
    window_seconds,
)
from penstock.batches.records import Batch
from penstock.core.engine import EngineStats

RUNNING = Batch("batch_1", "", "/v1/completions", "file-1", "24h", 0, 100, "in_progress", total=3)


def test_answers_and_refusals_are_final() -> None:
    assert after_failure(200, False, 0, 0.5) is None
    assert after_failure(400, False, 0, 0.5) is None


def test_a_full_engine_is_not_the_fault_of_the_line() -> None:
    for attempts in (0, MAX_ATTEMPTS, 1000):
        retry = after_failure(429, True, attempts, 0.0, retry_after=7.0)
        assert retry is not None
        assert not retry.counts
        assert 7.0 <= retry.delay <= MAX_DELAY


def test_a_spent_budget_is_waited_for_while_there_is_time() -> None:
    for attempts in (0, 1000):
        retry = after_failure(429, False, attempts, 0.0, retry_after=40_000.0, patience=50_000.0)
        assert retry is not None
        assert not retry.counts
        assert MAX_DELAY < retry.delay <= MAX_WAIT  # it may be raised meanwhile
    assert after_failure(429, False, 0, 0.0, retry_after=40_000.0, patience=30_000.0) is None


def test_what_fails_in_the_engine_is_tried_again_ever_later_and_then_given_up() -> None:
    retries = [after_failure(500, True, attempts, 1.0) for attempts in range(MAX_ATTEMPTS)]
    assert retries[-1] is None
    delays = [retry.delay for retry in retries if retry is not None]
    assert delays == sorted(delays)
    assert len(set(delays)) == len(delays) == MAX_ATTEMPTS - 1


def test_a_batch_ends_when_all_is_answered_or_its_time_has_passed() -> None:
    assert next_status(RUNNING, unanswered=1, leased=1, now=99) is None
    assert next_status(RUNNING, unanswered=0, leased=0, now=99) == ("finalizing", "completed")
    assert next_status(RUNNING, unanswered=1, leased=1, now=100) == ("finalizing", "expired")


def test_a_cancelled_batch_waits_for_what_runs() -> None:
    cancelling = replace(RUNNING, status="cancelling")
    assert next_status(cancelling, unanswered=2, leased=1, now=1) is None
    assert next_status(cancelling, unanswered=2, leased=0, now=1) == ("cancelling", "cancelled")
    assert next_status(replace(cancelling, ending="cancelled"), unanswered=2, leased=0, now=1) is None


@pytest.mark.parametrize(
    ("window", "seconds"), [("24h", 86400), ("30m", 1800), ("7d", 604800), ("0h", None), ("31d", None), ("h", None)]
)
def test_completion_windows(window: str, seconds: int | None) -> None:
    assert window_seconds(window) == seconds


def test_an_engine_is_given_what_makes_its_steps_efficient() -> None:
    fast = EngineStats(fixed_step_seconds=0.02, stream_step_seconds=0.002, prefill_tokens_per_second=1000.0)
    assert room(EngineStats(), 0, 64) == 64  # nothing was measured yet
    assert room(fast, 30, 64) == 10
    assert room(fast, 0, 8) == 8
    for busy in (replace(fast, waiting=1), replace(fast, prefill_tokens=600)):
        assert room(busy, 0, 64) == 1
        assert room(busy, 1, 64) == 0


@pytest.mark.parametrize("answered", [1, 2, 5, 20])
def test_requests_that_meet_many_kills_are_not_taken_for_their_cause(answered: int) -> None:
    """Each process is killed after so many answers; the next one begins with the oldest requests again."""
    begun = [0] * 1000
    first = 0
    while first < len(begun):
        last = first
        for ended in range(answered):
            for number in range(last, min(len(begun), first + ended + at_once(ended, 256))):
                begun[number] += 1
                last = number + 1
        first += answered
    assert max(begun) < MAX_LOSSES


def test_a_process_that_goes_on_works_on_as_many_as_it_may() -> None:
    assert at_once(1000, 64) == 64


def test_journals_are_kept_soon_after_a_start_and_then_now_and_then() -> None:
    waits = [renewal_seconds(number) for number in range(2000)]
    assert waits == sorted(waits)
    assert sum(waits[:3]) < 2
    assert waits[-1] == RENEW_SECONDS
