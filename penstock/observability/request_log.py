"""The accounts of the latest requests, kept for a while as the JSON they are asked for in."""

from __future__ import annotations

import heapq
import re
from collections import OrderedDict
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

import msgspec

from penstock.observability.account import Account

MAX_REQUESTS = 4096
MAX_BYTES = 8 * 2**20

# In the id of a response, of a choice, or of an attempt at one, as accounts name those that others stood still for.
_OURS = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_|rerank-|score-)?([0-9a-f]{24})(?:-\d+(?:\.\w+)*)?")

_encode = msgspec.json.Encoder().encode


class Entry(NamedTuple):
    tenant: str
    request_id: str
    seconds: float
    body: bytes


class RequestLog:
    """A request is found by our id or by the one its client chose, by its own tenant only."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        # Oldest first. The first key of a plain dict is found by walking over those deleted before it.
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._named: dict[tuple[str, str], str] = {}  # (tenant, client's id) to the latest of ours
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, account: Account) -> bytes:
        """Returns its JSON."""
        entry = Entry(account.tenant, account.request_id, account.total, _encode(account))
        self._entries[account.id] = entry
        self._named[entry.tenant, entry.request_id] = account.id
        self._bytes += len(entry.body)
        while len(self._entries) > self._max_requests or self._bytes > self._max_bytes:
            self._drop_oldest()
        return entry.body

    def _drop_oldest(self) -> None:
        id, entry = self._entries.popitem(last=False)
        self._bytes -= len(entry.body)
        if self._named.get((entry.tenant, entry.request_id)) == id:
            del self._named[entry.tenant, entry.request_id]

    def find(self, tenant: str, id: str) -> bytes | None:
        ours = _OURS.fullmatch(id)
        entry = self._entries.get(ours[1]) if ours else None
        if entry is None:
            entry = self._entries.get(self._named.get((tenant, id), ""))
        return entry.body if entry is not None and entry.tenant == tenant else None

    def latest(self, limit: int) -> list[bytes]:
        """Of all tenants, the oldest first."""
        return [entry.body for entry in islice(reversed(self._entries.values()), limit)][::-1]

    def slowest(self, tenant: str, limit: int) -> list[bytes]:
        return [body for _, body in self.timed(tenant, limit)]

    def timed(self, tenant: str, limit: int) -> list[tuple[float, bytes]]:
        """The slowest, with their seconds."""
        theirs = ((entry.seconds, entry.body) for entry in self._entries.values() if entry.tenant == tenant)
        return heapq.nlargest(limit, theirs, key=itemgetter(0))
