"""Grammars that are tried in a process of their own before the worker compiles them."""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import pytest

from penstock.bench.schemas import SCHEMAS
from penstock.checkpoint.source import resolve
from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar
from penstock.grammar import trial
from penstock.grammar.compiler import LLGuidance
from penstock.grammar.trial import Trials
from penstock.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def grammars() -> LLGuidance:
    tokenizer = load_tokenizer(resolve("smollm2-135m"))
    return LLGuidance(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_ids, Trials())


def all_of(patterns: int) -> Grammar:
    source = {"type": "string", "allOf": [{"pattern": f".*a{number}.*"} for number in range(patterns)]}
    return Grammar("json_schema", json.dumps(source), param="guided_json")


BOMBS = {
    "an exponential automaton": all_of(40),
    "a chain of rules": Grammar(
        "lark", "\n".join(["root ::= r0", *(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(4000)), 'r4000 ::= "a"'])
    ),
    "patterns of names": Grammar(
        "json_schema", json.dumps({"patternProperties": {f"^p{n}_": {"type": "string"} for n in range(600)}})
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_takes_forever_is_refused(grammars: LLGuidance, name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"too complex: it takes more than (2 s|512 MiB)") as refused:
        grammars.compile(BOMBS[name])
    assert refused.value.param == BOMBS[name].param
    grammars.compile(Grammar("regex", f"the next one, after {name}"))


def test_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """With so much time that memory is what ends it."""
    limits = "from penstock.grammar import trial; trial.MAX_SECONDS, trial.MAX_BYTES = 600, 32 * 2**20"
    program = f"{limits}; from penstock.grammar.trial_process import main; main()"
    monkeypatch.setattr(trial, "_COMMAND", [sys.executable, "-c", program])
    with pytest.raises(ValueError, match="takes more than 512 MiB"):
        Trials().try_out("json_schema", all_of(40).source)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar("json_schema", '{"uniqueItems": true}'), "uniqueItems"),
        (Grammar("json_schema", '{"const": 9007199254740993}'), "beyond"),
        (Grammar("json_schema", "{"), "Expecting"),
        (Grammar("lark", "root ::= missing"), "missing"),
        (Grammar("lark", "root ::= " + " | ".join(f'"w{number}"' for number in range(2100))), "max is 2000"),
    ],
)
def test_other_errors_are_the_same_as_without_it(grammars: LLGuidance, grammar: Grammar, problem: str) -> None:
    plain = LLGuidance(grammars._load, grammars._vocab_size, grammars._eos_ids)
    with pytest.raises(InvalidRequest, match=problem) as expected:
        plain.compile(grammar)
    with pytest.raises(InvalidRequest) as refused:
        grammars.compile(grammar)
    assert str(refused.value) == str(expected.value)


def test_a_process_that_was_killed_is_replaced() -> None:
    trials = Trials()
    trials.start()
    os.kill(trials._kept[0].pid, signal.SIGKILL)
    trials._kept[0].wait()
    assert trials.try_out("regex", "a+")


def test_several_at_once_do_not_wait_for_each_other() -> None:
    trials = Trials()
    with ThreadPoolExecutor(4) as pool:
        bomb = pool.submit(trials.try_out, "json_schema", all_of(40).source)
        list(pool.map(trials.try_out, repeat("json_schema"), map(json.dumps, SCHEMAS.values())))
        assert not bomb.done()
        with pytest.raises(ValueError, match="takes more than"):
            bomb.result()
    assert [process.poll() for process in trials._kept] == [None] * trial.MOST_KEPT


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are kept on CPUs on Linux alone")
def test_a_process_may_use_all_cpus_whoever_starts_it() -> None:
    """The thread that computes steps does, and is kept on one of them."""
    trials = Trials()

    def start() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        trials.start()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(start).result()
    trials.try_out("regex", "a")
    assert os.sched_getaffinity(trials._kept[0].pid) == os.sched_getaffinity(os.getpid())


def test_a_process_ends_with_its_parent() -> None:
    trials = Trials()
    trials.start()
    (process,) = trials._kept
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 0
