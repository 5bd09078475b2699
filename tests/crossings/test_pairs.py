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
from tests.crossings.features import BASE, OFF, PAGE, PAIRS, Bench, page

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
    names, off = {first, second}, (first, second) in OFF
    found, plain = bench.crossed(first, second)
    assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in plain]
    assert [outcome.text.text for outcome in found] == [outcome.text.text for outcome in plain]
    assert [outcome.finish_reason for outcome in found] == [outcome.finish_reason for outcome in plain]
    if "chunked prefill" in names and "prefix hit" not in names:
        assert any(outcome.ledger and len(outcome.ledger.prefill) > 1 for outcome in found)
    for outcome in found:
        ledger = outcome.ledger
        assert ledger is not None
        if "stop string" not in names:
            assert ledger.output_tokens == len(outcome.tokens)
        if "preemption" in names:
            assert ledger.preemptions
        if "batch" in names:
            assert outcome.sat_out
        if "prefix hit" in names and not off:
            assert outcome.cached
        if "grammar" in names and not names & {"logprobs", "prompt logprobs", "resumption", "stop string"}:
            assert ledger.forced_tokens
        # Grammars reject such drafts before they are computed, and running ahead no sequence waits for them.
        if "early exit" in names and not names & {"grammar", "tools", "reasoning", "run-ahead"}:
            assert ledger.drafted_tokens
        if "speculation" in names and "early exit" not in names:
            assert ledger.accepted_tokens
            if not names & {"grammar", "tools", "reasoning"}:  # these reject wrong tokens before they are computed
                assert ledger.accepted_tokens < ledger.drafted_tokens
        if "logprobs" in names:
            resumed = len(outcome.tokens) // 2 if "resumption" in names else 0
            scored = [score.token_id for score in outcome.logprobs]  # but for tokens that lie in the stop string
            assert scored == outcome.tokens[resumed:][: len(scored) if "stop string" in names else None]
        if "prompt logprobs" in names and not off:
            assert len(outcome.prompt_logprobs or ()) == ledger.prompt_tokens


def test_the_adapter_changes_the_output(bench: Bench) -> None:
    alone = [bench.alone(BASE, 1, adapter=adapter)[0].tokens for adapter in (adapter_of(0), adapter_of(1), None)]
    assert len(set(map(tuple, alone))) == 3


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.crossings.features"
