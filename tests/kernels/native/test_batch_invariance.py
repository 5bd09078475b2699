"""The numbers of a sequence do not depend on how its tokens came: bit by bit the same in any batch and any chunks."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from penstock.kernels.native import bindings
from penstock.kernels.native.bindings import KVFormat, Scheme
from penstock.kernels.native.model import NativeModel
from tests.kernels.native.random_models import BLOCK, VOCAB, build, logits_of, reference, step

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))

LENGTH = 600
TABLE = list(range(LENGTH // BLOCK, -1, -1))
Part = tuple[np.ndarray, int, list[int]]  # tokens, first position, block table


def alone(runner: NativeModel, tokens: np.ndarray) -> np.ndarray:
    """Logits of every position, decoded one by one."""
    return np.concatenate([logits_of(runner, step([(tokens[i : i + 1], i, TABLE)])) for i in range(len(tokens))])


def companions(rng: np.random.Generator, vocab: int, computed: int) -> list[Part]:
    """Other sequences of a step: prompts and decoding ones, some of which begin with the blocks computed so far."""
    parts: list[Part] = []
    for number in range(int(rng.choice([0, 1, 2, 7]))):
        own = list(range(len(TABLE) + 12 * number, len(TABLE) + 12 * (number + 1)))
        shared = int(rng.integers(0, computed // BLOCK + 1)) if rng.random() < 0.6 else 0
        count = 1 if shared or rng.random() < 0.6 else int(rng.integers(2, 100))
        start = shared * BLOCK + int(rng.integers(0, 12 * BLOCK - count))
        parts.append((rng.integers(0, vocab, count), start, TABLE[:shared] + own))
    return parts


def scattered(rng: np.random.Generator, runner: NativeModel, tokens: np.ndarray) -> np.ndarray:
    """The same logits from chunks of random sizes in steps with random others."""
    vocab, found, at = runner.config.vocab_size, [], 0
    while at < len(tokens):
        count = min(len(tokens) - at, int(rng.choice([1, 1, 2, 5, 17, 33, 70, 300])))
        parts = companions(rng, vocab, at)
        place = int(rng.integers(0, len(parts) + 1))
        parts.insert(place, (tokens[at : at + count], at, TABLE))
        first = sum(len(part[0]) for part in parts[:place])
        found.append(logits_of(runner, step(parts))[first : first + count])
        at += count
    return np.concatenate(found)


def differing(got: np.ndarray, want: np.ndarray) -> list[int]:
    """Positions whose logits are not the same bits."""
    return np.flatnonzero((got.view(np.int32) != want.view(np.int32)).any(axis=1)).tolist()


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("scheme", get_args(Scheme))
@pytest.mark.parametrize("kv", get_args(KVFormat))
def test_of_random_models(isa: str, kind: str, scheme: Scheme, kv: KVFormat) -> None:
    model, rng = reference(kind, scheme), np.random.default_rng(5)
    tokens = rng.integers(0, VOCAB, LENGTH)
    want = alone(build(model, scheme, 1, kv), tokens)
    for threads in (1, 2, 3, 4):
        runner = build(model, scheme, threads, kv)
        assert differing(logits_of(runner, step([(tokens, 0, TABLE)])), want) == []
        for _ in range(3):
            assert differing(scattered(rng, runner, tokens), want) == []
