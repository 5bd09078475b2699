"""Content hashes of KV blocks, chained over a request's tokens.

Two requests share the KV of a prefix where the hashes of its blocks agree. The engine finds cached blocks by them, and
whoever chooses among engines can tell by the same hashes which one holds a prompt's beginning.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from penstock.core.request import GenerateRequest


def extend_block_hashes(
    hashes: list[bytes], request: GenerateRequest, tokens: Sequence[int], block_size: int, blocks: int
) -> None:
    """Extend the hashes of a request's first blocks until there are `blocks` of them; `tokens` are its prompt and
    output. Those of tokens that all scopes share form one chain, from which each scope's own goes on."""
    common, digest = request.common_tokens // block_size, request.adapter.digest if request.adapter else ""
    while (done := len(hashes)) < blocks:
        end = min(blocks, common) if done < common else blocks
        scope = "" if done < common else request.prefix_scope
        parent = hashes[-1] if done else root_hash(scope, request.cache_salt, digest)
        if done and done == common and scope:
            parent = _enter_scope(parent, scope, request.cache_salt)
        hashes += chain_hashes(parent, tokens[done * block_size : end * block_size], block_size)


def chain_hashes(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Identities of blocks that follow `parent`: of each its tokens and everything before them.

    Cryptographic, so no client can forge a hit.
    """
    data, hashes = array("i", tokens), []
    raw, width = data.tobytes(), block_size * data.itemsize
    for start in range(0, len(raw), width):
        parent = hashlib.blake2b(parent + raw[start : start + width], digest_size=16).digest()
        hashes.append(parent)
    return hashes


def root_hash(scope: str, salt: str, adapter: str = "") -> bytes:
    """Where the chains of a scope, a salt and a LoRA adapter, named by its digest, begin."""
    return hashlib.blake2b(f"{len(scope)}:{scope}{len(salt)}:{salt}{adapter}".encode(), digest_size=16).digest()


def _enter_scope(parent: bytes, scope: str, salt: str) -> bytes:
    """Where a chain that all scopes have in common goes on in one of them."""
    return hashlib.blake2b(parent + root_hash(scope, salt), digest_size=16, person=b"scope").digest()
