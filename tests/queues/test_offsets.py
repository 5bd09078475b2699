from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.queues.offsets import Offsets


@given(st.permutations(range(5, 15)), st.data())
def test_what_is_committed_is_done(order: list[int], data: st.DataObject) -> None:
    """However requests end, everything below the committed offset has ended, and in the end all is committed."""
    offsets = Offsets()
    for offset in range(5, 15):
        offsets.begin(offset)
    committed, done = 5, set()
    for offset in order:
        done.add(offset)
        found = offsets.done(offset)
        assert found is None or found > committed
        committed = found or committed
        assert set(range(5, committed)) <= done
        assert committed not in done
    assert committed == 15
    assert offsets.unfinished == 0
    assert offsets.done(7) is None  # it was delivered to somebody else since
