"""Rows, blocks and adapter slots: what running sequences hold on the device, and what the next step says of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.core.ledger import MissCause, QueueCause
from penstock.engine.adapter_slots import AdapterSlots
from penstock.engine.block_pool import BlockPool
from penstock.engine.executor import AdapterWeights, RowSetup, Step
from penstock.engine.limits import SchedulerLimits
from penstock.engine.sequence import Sequence

_KEPT_FROM_LEADERS = 0.25  # share of rows and blocks


class Placement:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.pool = BlockPool(limits.num_blocks)
        self._limits = limits
        self._free_rows = list(range(limits.max_seqs - 1, -1, -1))
        self._adapters = AdapterSlots(limits.max_adapters)
        self._filled: list[tuple[int, AdapterWeights]] = []
        self._setups: list[RowSetup] = []
        self._new_blocks: list[tuple[int, int, list[int]]] = []

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    def reserved(self, running: Iterable[Sequence]) -> int:
        """Blocks that known tokens of running sequences have yet to get."""
        return sum(self.missing_blocks(s, s.known) for s in running)

    def room_for(self, sequence: Sequence, reserved: int, *, leads: bool) -> list[int] | None:
        """The cached blocks a waiting sequence would start with, or None if its known tokens will not fit now.

        So many blocks are `reserved` for others. Preempted with a token still in flight, it has to wait until that is
        known. A tenant that leads leaves some rows and blocks to the others.
        """
        limits = self._limits
        alone = len(self._free_rows) == limits.max_seqs
        kept = _KEPT_FROM_LEADERS if leads and not alone else 0.0
        if len(self._free_rows) <= kept * limits.max_seqs or sequence.pending or not self._has_slot(sequence):
            return None
        hits = self.cached_blocks(sequence)
        needed = self.missing_blocks(sequence, sequence.known) - len(hits)
        available = self.pool.available - self.pool.evictable_among(hits) - int(kept * limits.num_blocks)
        return hits if reserved + needed <= available else None

    def fits(self, sequence: Sequence, running: list[Sequence], *, leads: bool) -> bool:
        """Whether a waiting sequence could begin beside these."""
        return self.room_for(sequence, self.reserved(running), leads=leads) is not None

    def _has_slot(self, sequence: Sequence) -> bool:
        return sequence.adapter is None or self._adapters.has_room(sequence.adapter.digest)

    def lacking(self, sequence: Sequence) -> QueueCause:
        """What a waiting sequence, for which there is no room, waits for."""
        if not self._free_rows:
            return "rows"
        return "memory" if self._has_slot(sequence) else "adapters"

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of this sequence. One token at least is left to compute, to have logits."""
        if not self._limits.prefix_caching or sequence.prompt_logprobs is not None:
            return []
        full = (len(sequence.tokens) - 1) // self._limits.block_size
        return self.pool.match(sequence.block_hashes(self._limits.block_size, full))

    def miss_cause(self, sequence: Sequence, hits: int) -> MissCause:
        """Why no more of it than this was cached."""
        if not self._limits.prefix_caching or sequence.prompt_logprobs is not None:
            return "off"
        first = sequence.tokens[: self._limits.block_size]
        request = sequence.request
        digest = request.adapter.digest if request.adapter else ""
        return self.pool.miss_cause(sequence.hashes, hits, first, request.prefix_scope, digest, request.cache_salt)

    def missing_blocks(self, sequence: Sequence, tokens: int) -> int:
        return max(0, -(-tokens // self._limits.block_size) - len(sequence.blocks))

    def most_tokens(self, sequence: Sequence) -> int:
        """That it could have if it took all that is free."""
        return (len(sequence.blocks) + self.pool.available) * self._limits.block_size

    def seat(self, sequence: Sequence, hits: list[int]) -> None:
        """Give it a row, with the cached blocks it starts with and a slot for its adapter."""
        self.pool.acquire(hits)
        sequence.blocks = hits
        sequence.shared = len(hits)
        sequence.computed = len(hits) * self._limits.block_size
        sequence.row = self._free_rows.pop()
        if sequence.adapter is not None:
            sequence.adapter_slot = self._slot_for(sequence.adapter)
        request, params = sequence.request, sequence.request.params
        if sequence.constraint is not None:
            sequence.constraint.uncounted = []  # the setup has all its tokens
        if sequence.prompt_logprobs is None and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # they were sent with the output that it came with
        self._setups.append(
            RowSetup(
                row=sequence.row,
                params=params,
                seed=request.seed,
                tokens=tuple(sequence.tokens),
                prompt_len=sequence.prompt_len,
                stop_ids=tuple(sequence.stop_ids),
                adapter=sequence.adapter_slot,
                second_text=request.second_text,
            )
        )
        if hits:
            self._new_blocks.append((sequence.row, 0, list(hits)))

    def _slot_for(self, adapter: AdapterWeights) -> int:
        slot, fill = self._adapters.acquire(adapter.digest)
        if fill:
            self._filled.append((slot, adapter))
        return slot

    def allocate(self, sequence: Sequence, tokens: int) -> None:
        """Blocks for this many tokens in all; the pool has them."""
        missing = self.missing_blocks(sequence, tokens)
        if missing:
            blocks = self.pool.allocate(missing)
            self._new_blocks.append((sequence.row, len(sequence.blocks), blocks))
            sequence.blocks.extend(blocks)

    def share_all(self, sequences: Iterable[Sequence]) -> None:
        """Offer what has become full of each."""
        size = self._limits.block_size
        for s in sequences:
            if s.computed // size > s.shared:
                self.share_full_blocks(s)

    def share_full_blocks(self, sequence: Sequence) -> None:
        """Offer blocks whose tokens are known and computed, or being computed by a launched step, for sharing."""
        if not self._limits.prefix_caching:
            return
        full = min(sequence.computed, len(sequence.tokens)) // self._limits.block_size
        if full > sequence.shared:
            hashes = sequence.block_hashes(self._limits.block_size, full)
            for index in range(sequence.shared, full):
                self.pool.share(sequence.blocks[index], hashes[index])
            if sequence.shared == 0:
                request, first = sequence.request, sequence.tokens[: self._limits.block_size]
                digest = request.adapter.digest if request.adapter else ""
                self.pool.remember_salt(first, request.prefix_scope, digest, request.cache_salt)
            sequence.shared = full

    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        self._free_rows.append(sequence.row)
        if sequence.adapter is not None:
            self._adapters.release(sequence.adapter.digest)
        sequence.blocks = []
        sequence.shared = sequence.computed = 0
        sequence.row = -1

    def write_into(self, step: Step) -> None:
        """What has changed since the last step."""
        step.adapters, step.setups, step.blocks = self._filled, self._setups, self._new_blocks
        self._filled, self._setups, self._new_blocks = [], [], []

    def forget(self) -> None:
        """What is on the device can no longer be trusted. No sequence runs."""
        self.pool.forget()
        self._adapters.forget()
        self._filled = []

    def readings(self, running: Iterable[Sequence]) -> dict[str, int]:
        """What `EngineStats` tells of the KV cache. Shared blocks are full, so each empty slot is of one sequence."""
        pool, slots = self.pool, self._limits.block_size
        kept = not self._limits.whole_prompts  # encoders keep no keys and values: their blocks are only counted
        return {
            "kv_blocks": pool.num_blocks,
            "kv_blocks_used": pool.used,
            "kv_slots": pool.used * slots if kept else 0,
            "kv_slots_empty": sum(len(s.blocks) * slots - s.computed for s in running) if kept else 0,
        }

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        held: dict[int, int] = {}
        users: dict[str, int] = {}
        rows = list(self._free_rows)
        for sequence in running:
            rows.append(sequence.row)
            for block in sequence.blocks:
                held[block] = held.get(block, 0) + 1
            if sequence.adapter is not None:
                users[sequence.adapter.digest] = users.get(sequence.adapter.digest, 0) + 1
        self.pool.check_integrity(held)
        self._adapters.check_integrity(users)
        assert sorted(rows) == list(range(self._limits.max_seqs)), "rows were lost or given out twice"
