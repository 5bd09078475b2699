"""Which LoRA adapters are on the device: a few slots, of which the least recently used one is filled anew.

A slot is in one of three states:
  used      running sequences compute with its adapter, so it is never replaced
  resident  no sequence uses it, but its adapter is still there and needs no copy if it is asked for again
  empty     it was never filled, or its content can no longer be trusted
"""

from __future__ import annotations

from collections import OrderedDict


class AdapterSlots:
    def __init__(self, count: int) -> None:
        self._count = count
        self._slot_of: dict[str, int] = {}  # by digest: of adapters on the device
        self._users: dict[str, int] = {}  # by digest: how many sequences use it, where any do
        self._resident: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._empty = list(range(count - 1, -1, -1))

    def has_room(self, digest: str) -> bool:
        """Whether a sequence with this adapter can run now."""
        return digest in self._slot_of or bool(self._empty or self._resident)

    def acquire(self, digest: str) -> tuple[int, bool]:
        """A slot for one more sequence with this adapter, for which there is room, and whether the slot has to be
        filled with it first."""
        fill = digest not in self._slot_of
        if fill:
            self._slot_of[digest] = self._empty.pop() if self._empty else self._evict()
        self._resident.pop(digest, None)
        self._users[digest] = self._users.get(digest, 0) + 1
        return self._slot_of[digest], fill

    def _evict(self) -> int:
        digest, _ = self._resident.popitem(last=False)
        return self._slot_of.pop(digest)

    def release(self, digest: str) -> None:
        """A sequence with this adapter no longer runs."""
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]
            self._resident[digest] = None

    def forget(self) -> None:
        """Contents of slots can no longer be trusted. No sequence uses one."""
        assert not self._users, "slots are forgotten while sequences use them"
        self._slot_of.clear()
        self._resident.clear()
        self._empty = list(range(self._count - 1, -1, -1))

    def check_integrity(self, users: dict[str, int]) -> None:
        """Raise AssertionError unless the books balance against the adapters that running sequences use."""
        assert self._users == users, "adapters and the sequences that use them disagree"
        assert self._slot_of.keys() == self._users.keys() | self._resident.keys(), "an adapter was lost"
        assert not self._users.keys() & self._resident.keys(), "an adapter in use could be replaced"
        slots = sorted([*self._slot_of.values(), *self._empty])
        assert slots == list(range(self._count)), "slots were lost or given out twice"
