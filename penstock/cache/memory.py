"""The memory tier: an LRU of encoded answers in this process, bounded by bytes."""

from __future__ import annotations

from collections import OrderedDict

from penstock.cache.tier import Reading

ENTRY_BYTES = 256  # what an entry takes beside its value: key, two object headers, its place in the dictionary
LARGEST_SHARE = 8  # an answer that takes more than one part in this many is not worth what it would push out


class MemoryTier:
    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes
        self.bytes = 0
        self.evictions = 0
        self._values: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first

    def reading(self) -> Reading:
        return Reading("memory", self.bytes, self.evictions)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> bytes | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        self.discard(key)
        if len(value) + ENTRY_BYTES > self.limit / LARGEST_SHARE:
            return
        self._values[key] = value
        self.bytes += len(value) + ENTRY_BYTES
        while self.bytes > self.limit:
            self.discard(next(iter(self._values)))
            self.evictions += 1

    def clear(self) -> None:
        self._values.clear()
        self.bytes = 0

    def discard(self, key: bytes) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self.bytes -= len(value) + ENTRY_BYTES
