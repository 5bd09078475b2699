"""Whoever has a request and the block size computes the hashes under which the engine keeps its KV blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.block_hashes import extend_block_hashes
from penstock.core.request import GenerateRequest, SamplingParams
from tests.engine.test_scheduler import Harness, limits

BLOCK = limits().block_size


def prompt_hashes(request: GenerateRequest) -> list[bytes]:
    """As a router would compute them; the engine leaves at least one token of a prompt to compute."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, request, request.prompt, BLOCK, (len(request.prompt) - 1) // BLOCK)
    return hashes


@given(
    prompt=st.lists(st.integers(2, 5), min_size=1, max_size=18),
    other=st.lists(st.integers(2, 5), min_size=1, max_size=18),
    kept=st.integers(0, 18),
    common=st.integers(0, 18),
    scopes=st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"])),
    salts=st.tuples(st.sampled_from(["", "x"]), st.sampled_from(["", "x"])),
    adapters=st.tuples(st.sampled_from(["", "x"]), st.sampled_from(["", "x"])),
)
def test_hashes_from_outside_tell_what_the_engine_finds(
    prompt: list[int],
    other: list[int],
    kept: int,
    common: int,
    scopes: tuple[str, str],
    salts: tuple[str, str],
    adapters: tuple[str, str],
) -> None:
    harness = Harness(limits())
    follower = [*prompt[:kept], *other]
    options = [
        {"common_tokens": common, "prefix_scope": s, "cache_salt": t, "adapter": a}
        for s, t, a in zip(scopes, salts, adapters, strict=True)
    ]
    first = harness.submit(prompt, 1, **options[0])
    harness.run()
    second = harness.submit(follower, 1, **options[1])
    harness.run()
    cached = {*prompt_hashes(replace(harness.requests[first], prompt=[*prompt, 0]))}
    expected = [value in cached for value in prompt_hashes(harness.requests[second])]
    assert harness.outcomes[second].cached == BLOCK * sum(expected)
    assert expected == sorted(expected, reverse=True), "a block was found whose predecessors differ"


@pytest.mark.parametrize("step", [1, 2, 5])
def test_hashes_are_the_same_however_they_are_extended(step: int) -> None:
    request = GenerateRequest(
        "r", list(range(40)), SamplingParams(), cache_salt="salt", prefix_scope="tenant", common_tokens=17
    )
    hashes: list[bytes] = []
    for blocks in range(0, 10, step):
        extend_block_hashes(hashes, request, request.prompt, BLOCK, blocks)
    assert hashes == prompt_hashes(request)[: len(hashes)]
