"""LoRA adapters of the native executor are packed before a step needs them: once, and while steps run."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from penstock.core.request import SamplingParams
from penstock.engine.executor import AdapterWeights, RowSetup, Step
from penstock.kernels.native import bindings
from penstock.kernels.native.adapters import NativeAdapter
from penstock.runner import native_runner
from penstock.runner.host_rows import HostRows
from penstock.runner.native_runner import NativeRunner
from tests.kernels.native.random_models import VOCAB, build, reference
from tests.kernels.native.test_adapters import drawn_adapter

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 20).tolist()


def step(*adapters: tuple[int, AdapterWeights]) -> Step:
    """A prompt with the adapter of slot 0, after slots were filled with these."""
    setup = RowSetup(0, SamplingParams(temperature=0.0), 0, (), len(TOKENS), (), adapter=0)
    blocks = [(0, 0, [3, 1])]
    return Step([0], [0], [len(TOKENS)], [1], list(TOKENS), adapters=list(adapters), setups=[setup], blocks=blocks)


def run(runner: NativeRunner, *adapters: tuple[int, AdapterWeights]) -> list[list[int]]:
    return runner.collect(runner.launch(step(*adapters))).tokens


def test_packed_once_for_all_threads_and_while_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference("llama", "int8")
    runner = NativeRunner(build(model, "int8", 1), HostRows(1, 2, VOCAB))
    first, second = (AdapterWeights(f"{seed}", 5, drawn_adapter(model, seed)) for seed in (1, 2))
    packed: list[object] = []

    def counting(*given: Any) -> NativeAdapter:
        packed.append(given)
        return NativeAdapter(*given)

    monkeypatch.setattr(native_runner, "NativeAdapter", counting)
    expected = run(runner, (0, first))
    with ThreadPoolExecutor(8) as pool:
        preparing = [pool.submit(runner.prepare_adapter, second) for _ in range(8)]
        while not all(done.done() for done in preparing):
            assert run(runner) == expected
        for done in preparing:
            done.result()
    assert len(packed) == 2
    others = run(runner, (0, second))
    assert run(runner, (0, first)) == expected
    assert run(runner, (0, second)) == others
    assert len(packed) == 2


def test_a_slot_outlives_the_weights() -> None:
    model = reference("llama", "int8")
    runner = NativeRunner(build(model, "int8", 1), HostRows(1, 2, VOCAB))
    weights = AdapterWeights("1", 5, drawn_adapter(model, 1))
    expected = run(runner, (0, weights))
    del weights
    gc.collect()
    assert not runner._packed
    assert run(runner) == expected
