"""Paged KV blocks: reference counts, sharing of equal prefixes by chained content hash, eviction of the least recent.

A block is in exactly one of three states:
  used       referenced by one or more sequences
  evictable  referenced by none, but its content is known by hash and may be hit again
  free       referenced by none, content worthless
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from penstock.core.block_hashes import chain_hashes, root_hash
from penstock.core.ledger import MissCause


def _unsalted(first_tokens: Sequence[int], scope: str, adapter: str) -> bytes:
    return chain_hashes(root_hash(scope, "", adapter), first_tokens, len(first_tokens))[0]


_REMEMBERED_SALTS = 4096


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        # To say why something was not found: contents that were evicted, and the salts first blocks were seen with.
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._salts: OrderedDict[bytes, str] = OrderedDict()

    @property
    def available(self) -> int:
        return len(self._free) + len(self._evictable)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    def allocate(self, count: int) -> list[int]:
        """Blocks of one reference each. The caller has checked `available`."""
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        value = self._hash_of.pop(block)
        del self._by_hash[value]
        self._evicted[value] = None
        if len(self._evicted) > self.num_blocks:
            self._evicted.popitem(last=False)
        return block

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest run of blocks whose content is at hand, from the start of the chain. Takes no reference."""
        found = []
        for value in hashes:
            block = self._by_hash.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def evictable_among(self, blocks: Sequence[int]) -> int:
        """How many of these would leave `available` if acquired."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def acquire(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1

    def share(self, block: int, value: bytes) -> None:
        """Let others find this block by its content. The first block with a given content wins."""
        if value not in self._by_hash and block not in self._hash_of:
            self._by_hash[value] = block
            self._hash_of[block] = value

    def remember_salt(self, first_tokens: Sequence[int], scope: str, adapter: str, salt: str) -> None:
        """The tokens of a first block were seen in this scope and with this LoRA adapter under this salt."""
        self._salts[_unsalted(first_tokens, scope, adapter)] = salt
        if len(self._salts) > _REMEMBERED_SALTS:
            self._salts.popitem(last=False)

    def miss_cause(
        self, hashes: Sequence[bytes], found: int, first_tokens: Sequence[int], scope: str, adapter: str, salt: str
    ) -> MissCause:
        """Why the block after the first `found` of this chain, which begins with these tokens, was not there. Says
        nothing of other scopes."""
        if found >= len(hashes):
            return "too_short"
        if hashes[found] in self._evicted:
            return "evicted"
        if found == 0 and self._salts:
            seen = self._salts.get(_unsalted(first_tokens, scope, adapter))
            if seen is not None and seen != salt:
                return "other_salt"
        return "never_seen"

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference each. The end of a chain is evicted before its beginning, so release runs backwards."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def forget(self) -> None:
        """Drop all sharing, because contents can no longer be trusted."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._hash_of.clear()
        self._by_hash.clear()

    def check_integrity(self, references: dict[int, int]) -> None:
        """Raise AssertionError unless the books balance against the references that sequences hold."""
        for block, count in enumerate(self._references):
            assert count == references.get(block, 0), (
                f"block {block}: {count} references, {references.get(block, 0)} held"
            )
        used = {block for block, count in enumerate(self._references) if count}
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(used | free | evictable) == len(used) + len(free) + len(evictable), "a block is in two states"
        assert len(used) + len(free) + len(evictable) == self.num_blocks, "a block was lost"
        assert {b: h for h, b in self._by_hash.items()} == self._hash_of, "hash index and blocks disagree"
        assert evictable <= self._hash_of.keys(), "an evictable block has no hash"
