"""Adapter slots against the plain rule: least recently used first, and never one in use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.adapter_slots import AdapterSlots


@given(count=st.integers(1, 4), picks=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_the_least_recently_used_gives_way(count: int, picks: list[tuple[int, bool]]) -> None:
    slots, running, content = AdapterSlots(count), list[str](), dict[int, str]()
    last_used: dict[str, int] = {}  # of adapters on the device: the time of their last release
    for time, (number, starts) in enumerate(picks):
        if starts:
            digest = f"adapter {number}"
            free = [name for name in last_used if name not in running]
            assert slots.has_room(digest) == (digest in last_used or len(last_used) < count or bool(free))
            if not slots.has_room(digest):
                continue
            slot, fill = slots.acquire(digest)
            assert fill == (digest not in last_used)
            if fill and len(last_used) == count:
                oldest = min(free, key=last_used.__getitem__)
                assert content[slot] == oldest
                del last_used[oldest]
            if fill:
                content[slot] = digest
            assert content[slot] == digest
            running.append(digest)
            last_used[digest] = time
        elif running:
            digest = running.pop(number % len(running))
            slots.release(digest)
            last_used[digest] = time
        slots.check_integrity({name: running.count(name) for name in running})


def test_forgotten_slots_are_filled_again() -> None:
    slots = AdapterSlots(2)
    slots.acquire("a")
    slots.release("a")
    slots.forget()
    slots.check_integrity({})
    assert slots.acquire("a") == (0, True)
