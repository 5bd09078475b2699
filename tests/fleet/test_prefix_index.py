"""The prefix index beside a plain model of each replica's cache, and its memory at the bound."""

from __future__ import annotations

import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.block_hashes import chain_hashes, root_hash
from penstock.fleet.prefix_index import MAX_ENTRIES, PrefixIndex

CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def chain(path: list[int]) -> list[bytes]:
    return chain_hashes(root_hash("", ""), path, 1)


class Cache:
    """One replica's, as the engine evicts: the least recently used first, of one chain its end."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.recent: list[bytes] = []

    def use(self, hashes: list[bytes]) -> None:
        for value in reversed(hashes):
            if value in self.recent:
                self.recent.remove(value)
            self.recent.append(value)
        del self.recent[: max(0, len(self.recent) - self.blocks)]

    def leading(self, hashes: list[bytes]) -> int:
        return next((i for i, value in enumerate(hashes) if value not in self.recent), len(hashes))


@given(st.lists(st.tuples(st.integers(0, 3), CHAINS), max_size=40), CHAINS)
def test_it_holds_what_the_caches_hold(sent: list[tuple[int, list[int]]], asked: list[int]) -> None:
    caches = {slot: Cache(blocks) for slot, blocks in enumerate((4, 9, 20, 50))}
    index = PrefixIndex()
    for slot, cache in caches.items():
        index.add_replica(slot, cache.blocks * index.block_size + 3)
    for slot, path in sent:
        hashes = chain(path)
        caches[slot].use(hashes)
        index.record(slot, hashes)
    hashes = chain(asked)
    held = index.held(hashes)
    assert [*held, 0, 0, 0, 0][:4] == [16 * cache.leading(hashes) for cache in caches.values()]
    assert len(index) == sum(len(cache.recent) for cache in caches.values())


def test_what_a_lost_replica_held_is_forgotten() -> None:
    index = PrefixIndex()
    hashes = chain([1] * 10)
    for slot in (0, 5):
        index.add_replica(slot, 1600)
        index.record(slot, hashes[: slot + 5])
    assert index.held(hashes) == [80, 0, 0, 0, 0, 160]
    index.remove_replica(5)
    assert index.held(hashes) == [80]
    index.add_replica(0, 1600)  # restarted: its cache is empty
    assert index.held(hashes) == []
    assert len(index) == 0


def test_a_fleet_that_is_too_large_for_it_has_a_coarser_index() -> None:
    index = PrefixIndex(max_entries=100)
    hashes = chain([2] * 90)
    index.add_replica(0, 90 * 16)
    index.record(0, hashes)
    index.add_replica(1, 300 * 16)
    assert index.stride == 4
    assert len(index) <= 90 // 4  # of what was there before, the beginnings of chains
    index.record(0, hashes)
    index.record(1, hashes[:50])
    assert len(index) <= 100
    assert index.held(hashes) == [88 * 16, 48 * 16]
    assert index.held(hashes[:3]) == []


def test_memory_is_bounded() -> None:
    """As many entries as there may be, on 64 replicas, to which more is sent than they hold."""
    draw = random.Random(0)
    tracemalloc.start()
    try:
        index = PrefixIndex()
        for slot in range(64):
            index.add_replica(slot, MAX_ENTRIES // 64 * 16)
        for request in range(2 * MAX_ENTRIES // 300):
            hashes = [draw.randbytes(16) for _ in range(300)]
            index.record(request % 64, hashes)
            index.record((request * 7 + 1) % 64, hashes[:30])
        assert len(index) > 0.95 * MAX_ENTRIES
        assert tracemalloc.get_traced_memory()[1] <= 64e6
    finally:
        tracemalloc.stop()
