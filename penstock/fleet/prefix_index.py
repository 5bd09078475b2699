"""Which replica holds how much of a prompt's beginning, by what was sent there.

The index has the engine's own chained block hashes (`core/block_hashes.py`). A replica evicts the least recently used
blocks, the end of a chain before its beginning, and so does the index: it needs no messages from the replicas. It holds
every `stride`-th block of a chain only. The stride doubles while the caches of all replicas together have more blocks
than the index has room for, so a large fleet has a coarser index and the memory is bounded. It never halves again.

A replica that holds a block holds all blocks before it: whoever uses a block uses those before it, too, so they are
more recent. Hence the replicas at some depth of a chain are a subset of those at any smaller depth, and `held` bisects.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_ENTRIES = 150_000  # blocks on replicas; measured at 320 bytes each while dictionaries grow: 48 MB


class PrefixIndex:
    """`block_size` is that of the engines. Replicas are known by their slots, small integers that may be used again."""

    def __init__(self, block_size: int = 16, max_entries: int = MAX_ENTRIES) -> None:
        self.block_size = block_size
        self.stride = 1
        self._max_entries = max_entries
        self._replicas: dict[bytes, int] = {}  # block: bits of the slots that hold it
        self._recent: dict[int, OrderedDict[bytes, None]] = {}  # of each slot, the least recently used block first
        self._blocks: dict[int, int] = {}  # in the cache of each slot

    def __len__(self) -> int:
        return sum(map(len, self._recent.values()))

    def add_replica(self, slot: int, kv_tokens: int) -> None:
        """A replica with an empty cache of this many tokens; the slot may have had another one before."""
        self.remove_replica(slot)
        self._recent[slot] = OrderedDict()
        self._blocks[slot] = kv_tokens // self.block_size
        while sum(self._blocks.values()) > self._max_entries * self.stride:
            self.stride *= 2
        for other in self._recent:
            self._evict(other)

    def remove_replica(self, slot: int) -> None:
        """Its cache is gone."""
        self._blocks.pop(slot, None)
        for key in self._recent.pop(slot, ()):
            self._forget(key, 1 << slot)

    def record(self, slot: int, hashes: Sequence[bytes]) -> None:
        """The replica computes, or has just used, the blocks of this chain."""
        recent, replicas, bit = self._recent[slot], self._replicas, 1 << slot
        for at in range(len(hashes) // self.stride * self.stride - 1, -1, -self.stride):
            key = hashes[at]
            if key in recent:
                recent.move_to_end(key)
            else:
                recent[key] = None
                replicas[key] = replicas.get(key, 0) | bit
        self._evict(slot)

    def held(self, hashes: Sequence[bytes]) -> list[int]:
        """Leading tokens of this chain that each slot holds, up to the largest slot with any."""
        get, stride, unit = self._replicas.get, self.stride, self.stride * self.block_size
        deepest = len(hashes) // stride
        first = get(hashes[stride - 1], 0) if deepest else 0
        tokens = [0] * first.bit_length()
        if not first:
            return tokens
        last = get(hashes[deepest * stride - 1], 0)
        spans = [(deepest, last, deepest + 1, 0), (1, first, deepest, last)]
        while spans:
            low, there, high, left = spans.pop()
            if there == left:
                continue
            if high - low > 1:
                middle = (low + high) // 2
                between = get(hashes[middle * stride - 1], 0)
                spans += (low, there, middle, between), (middle, between, high, left)
                continue
            ending = there & ~left
            while ending:
                slot = ending.bit_length() - 1
                tokens[slot] = low * unit
                ending ^= 1 << slot
        return tokens

    def _evict(self, slot: int) -> None:
        recent, room = self._recent[slot], self._blocks[slot] // self.stride
        while len(recent) > room:
            self._forget(recent.popitem(last=False)[0], 1 << slot)

    def _forget(self, key: bytes, bit: int) -> None:
        rest = self._replicas[key] & ~bit
        if rest:
            self._replicas[key] = rest
        else:
            del self._replicas[key]
