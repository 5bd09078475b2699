from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.capacity import MAX_HALVINGS, CapacitySearch


def search(first: float, limit: float, probes: int = 30) -> tuple[CapacitySearch, list[float]]:
    """On a server that holds up to `limit`."""
    found, tried = CapacitySearch(first, probes), []
    while (rate := found.next_rate()) is not None:
        tried.append(rate)
        found.record(rate, held=rate <= limit)
    return found, tried


@given(first=st.floats(0.01, 1000), factor=st.floats(1 / 15, 1000))
def test_the_answer_holds_and_is_within_the_precision(first: float, factor: float) -> None:
    limit = first * factor
    found, tried = search(first, limit)
    assert found.held is not None
    assert found.held <= limit <= found.held * (1 + found.precision) * 1.01  # rates are rounded to three digits
    assert len(tried) < 30
    assert len(set(tried)) == len(tried)


@given(first=st.floats(0.01, 1000), factor=st.floats(0.001, 1000), probes=st.integers(1, 8))
def test_probes_are_bounded_and_the_answer_is_a_rate_that_was_seen_to_hold(
    first: float, factor: float, probes: int
) -> None:
    found, tried = search(first, first * factor, probes)
    assert len(tried) <= probes
    assert found.held == max((rate for rate in tried if rate <= first * factor), default=None)


def test_a_hopeless_search_ends_early() -> None:
    found, tried = search(first=16.0, limit=0.0)
    assert found.held is None
    assert tried == [16.0 / 2**i for i in range(MAX_HALVINGS + 1)]
