"""Every pair of features gives what each gives alone."""

from __future__ import annotations

import pytest

from penstock.bench.adapters import RandomAdapters, adapter_of
from penstock.checkpoint.source import resolve
from penstock.engine.settings import EngineConfig, SpeculationConfig
from penstock.grammar.compiler import grammars_of
from penstock.kernels.native import bindings
from penstock.runner.startup import start
from penstock.text.tokenizer import load_tokenizer
from tests.crossings.features import BASE, PAGE, PAIRS, Bench, check_parts, check_same, page

MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def bench() -> Bench:
    if not bindings.available():
        pytest.skip("numbers depend on the batch in torch")
    early_exit = SpeculationConfig("early_exit", layers=28)
    config = EngineConfig(quantization="int8", kv_memory_gib=0.05, max_model_len=256, speculation=early_exit)
    scheduler, executor, _ = start(MODEL, config)
    executor.enter_thread()
    tokenizer = load_tokenizer(resolve(MODEL))
    grammars, adapters = grammars_of(scheduler.limits, MODEL, tokenizer), RandomAdapters(executor.adapter_modules)
    assert grammars is not None
    assert scheduler.speculation is not None
    return Bench(scheduler.limits, executor, grammars, tokenizer, adapters, scheduler.speculation.drafter)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[" and ".join(pair) for pair in PAIRS])
def test_pair(bench: Bench, first: str, second: str) -> None:
    found, plain = bench.crossed(first, second)
    check_same(found, plain)
    check_parts(first, second, found)


def test_the_adapter_changes_the_output(bench: Bench) -> None:
    alone = [bench.alone(BASE, 1, adapter=adapter)[0].tokens for adapter in (adapter_of(0), adapter_of(1), None)]
    assert len(set(map(tuple, alone))) == 3


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.crossings.features"
