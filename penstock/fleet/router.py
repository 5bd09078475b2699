"""What a fleet knows for choosing among its replicas, and the choice itself (`fleet/routing.py`)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.core.block_hashes import extend_block_hashes
from penstock.core.request import GenerateRequest
from penstock.fleet.journal import Journal
from penstock.fleet.prefix_index import PrefixIndex
from penstock.fleet.replica import Replica
from penstock.fleet.routing import RoutedRequest, choose, session_digest
from penstock.fleet.settings import RoutingConfig
from penstock.fleet.snapshot import Snapshot, Stream

ASSUMED_KV_TOKENS = 65_536  # of a server that does not say


class Router:
    """Keeps a snapshot of every replica, and the index of what was sent to each."""

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._index = PrefixIndex()
        self._snapshots: dict[Replica, Snapshot] = {}

    def snapshot(self, replica: Replica) -> Snapshot:
        return self._snapshots[replica]

    def add(self, replica: Replica) -> None:
        used = {snapshot.slot for snapshot in self._snapshots.values()}
        slot = next(slot for slot in range(len(used) + 1) if slot not in used)
        self._snapshots[replica] = Snapshot(replica.name, slot)

    def remove(self, replica: Replica) -> None:
        self._index.remove_replica(self._snapshots.pop(replica).slot)

    def restarted(self, replica: Replica) -> None:
        """Another instance serves it, with an empty KV cache."""
        snapshot, info = self._snapshots[replica], replica.engine.info
        self._index.block_size = info.block_size
        snapshot.max_model_len = info.max_model_len
        snapshot.kv_tokens = replica.stats.kv_blocks * info.block_size
        snapshot.restarted()
        self._index.add_replica(snapshot.slot, snapshot.kv_tokens or ASSUMED_KV_TOKENS)

    def place(self, request: GenerateRequest, output: Sequence[int], replicas: Sequence[Replica]) -> Placement | None:
        """Choose one of these replicas and count the request as sent there. None: it has room in none of them."""
        now, tokens = time.monotonic(), len(request.prompt) + len(output)
        if len(self._snapshots) == 1:  # nothing to choose, so nothing is hashed
            (replica,) = replicas
            return Placement(replica, self._snapshots[replica].sent(tokens, 0, now), "the only replica")
        snapshots = {}
        for replica in replicas:
            snapshot = self._snapshots[replica]
            if (stats := replica.stats) is not snapshot.stats:
                snapshot.heard(stats)
            snapshots[snapshot] = replica
        hashes: list[bytes] = []
        size = self._index.block_size
        extend_block_hashes(hashes, request, [*request.prompt, *output], size, tokens // size)
        routed = RoutedRequest(
            tokens,
            self._index.held(hashes),
            max_tokens=max(0, (request.params.max_tokens or 0) - len(output)),
            session=session_digest(request.session) if request.session else 0,
        )
        decision = choose(routed, list(snapshots), now, self._config)
        if decision is None:
            return None
        chosen = decision.snapshot
        self._index.record(chosen.slot, hashes)
        return Placement(snapshots[chosen], chosen.sent(tokens, decision.cached, now), decision.reason, hashes)

    def ended(self, placed: Placement, completed: Journal | None) -> None:
        """It is no longer there. What a completed one leaves in the KV cache is what the next turn of a conversation
        begins with, unless the replica has been removed while the stream went on, as those of upstreams do."""
        placed.stream.ended(time.monotonic(), completed=completed is not None)
        if placed.hashes and completed is not None and placed.replica in self._snapshots:
            size, tokens = self._index.block_size, [*completed.request.prompt, *completed.output]
            extend_block_hashes(placed.hashes, completed.request, tokens, size, len(tokens) // size)
            self._index.record(placed.stream.snapshot.slot, placed.hashes)


class Placement:
    """Where a request went. `stream` keeps the counts of its replica."""

    __slots__ = ("hashes", "reason", "replica", "stream")

    def __init__(self, replica: Replica, stream: Stream, reason: str, hashes: list[bytes] | None = None) -> None:
        self.replica = replica
        self.stream = stream
        self.reason = reason
        self.hashes = hashes  # of its KV blocks, where there was a choice
