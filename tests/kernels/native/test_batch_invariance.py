"""The numbers of a sequence do not depend on how its tokens came: bit by bit the same in any batch and any chunks."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.checkpoint.source import resolve
from penstock.kernels.native import bindings
from penstock.kernels.native.bindings import KVFormat, Scheme
from penstock.kernels.native.model import NativeModel
from penstock.models.config import read_config
from penstock.runner.packed import fill, native_model
from tests.kernels.native.random_models import BLOCK, build, logits_of, reference, step

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))

LENGTH = 600  # three ranges of keys
TABLE = list(range(LENGTH // BLOCK, -1, -1))
OWN_BLOCKS = 12  # of each companion
Part = tuple[np.ndarray, int, list[int]]  # tokens, first position, block table


def drawn(runner: NativeModel, rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, runner.config.vocab_size, count)


def alone(runner: NativeModel, tokens: np.ndarray) -> np.ndarray:
    """Logits of every position, decoded one by one."""
    return np.concatenate([logits_of(runner, step([(tokens[i : i + 1], i, TABLE)])) for i in range(len(tokens))])


def companions(runner: NativeModel, rng: np.random.Generator, computed: int) -> list[Part]:
    """Other sequences of a step: prompts and decoding ones, some of which begin with the blocks computed so far."""
    parts: list[Part] = []
    for number in range(int(rng.choice([0, 1, 2, 7]))):
        first = len(TABLE) + OWN_BLOCKS * number
        shared = int(rng.integers(0, computed // BLOCK + 1)) if rng.random() < 0.6 else 0
        count = 1 if shared or rng.random() < 0.6 else int(rng.integers(2, 100))
        start = shared * BLOCK + int(rng.integers(0, OWN_BLOCKS * BLOCK - count))
        parts.append((drawn(runner, rng, count), start, [*TABLE[:shared], *range(first, first + OWN_BLOCKS)]))
    return parts


def scattered(runner: NativeModel, rng: np.random.Generator, tokens: np.ndarray) -> np.ndarray:
    """Logits of every position, from chunks of random sizes in steps with random companions."""
    found, at = [], 0
    while at < len(tokens):
        count = min(len(tokens) - at, int(rng.choice([1, 1, 2, 5, 17, 33, 70, 300])))
        parts = companions(runner, rng, at)
        place = int(rng.integers(0, len(parts) + 1))
        parts.insert(place, (tokens[at : at + count], at, TABLE))
        first = sum(len(part[0]) for part in parts[:place])
        found.append(logits_of(runner, step(parts))[first : first + count])
        at += count
    return np.concatenate(found)


def differing(got: np.ndarray, want: np.ndarray) -> list[int]:
    """Positions whose logits are not the same bits."""
    return np.flatnonzero((got.view(np.int32) != want.view(np.int32)).any(axis=1)).tolist()


@pytest.mark.parametrize(
    ("kind", "scheme", "kv"),
    [
        ("llama", "int8", "int8"),
        ("qwen2", "int4", "int8"),
        ("mistral", "int8", "int8"),  # with a sliding window
        ("llama", "none", "bf16"),
        ("mistral", "none", "bf16"),
    ],
)
def test_of_random_models(isa: str, kind: str, scheme: Scheme, kv: KVFormat) -> None:
    if isa == "amx" and scheme == "none":
        pytest.skip("tiles sum bfloat16 products in another order than vectors")
    model, rng = reference(kind, scheme), np.random.default_rng(5)
    runner = build(model, scheme, 1, kv)
    tokens = drawn(runner, rng, LENGTH)
    want = alone(runner, tokens)
    for threads in (1, 2, 3, 4):
        runner = build(model, scheme, threads, kv)
        assert differing(logits_of(runner, step([(tokens, 0, TABLE)])), want) == []
        assert differing(scattered(runner, rng, tokens), want) == []


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_of_a_real_model(scheme: Scheme) -> None:
    """Its greedy tokens too, whether or not a neighbour wants logits."""
    checkpoint, rng = resolve("smollm2-135m"), np.random.default_rng(6)
    config, runners = read_config(checkpoint), []
    for threads in (2, 3):
        runners.append(native_model(config, scheme, block_size=BLOCK, num_blocks=128, threads=threads))
        fill(runners[-1], checkpoint, config, None)
    tokens = drawn(runners[0], rng, 300)
    want = alone(runners[0], tokens)
    for runner in runners:
        assert differing(logits_of(runner, step([(tokens, 0, TABLE)])), want) == []
        assert differing(scattered(runner, rng, tokens), want) == []
        _, together = runner.forward(*step([(tokens, 0, TABLE)]), logits=False)
        assert together == want.argmax(axis=1).tolist()
