"""Whatever numbers a request asks for, it is refused with the name of a field or runs, and no other request fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest
from penstock.core.request import Chunk, GenerateRequest, SamplingParams, choice_seed
from penstock.engine.executor import Executor
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.kernels.native import bindings
from penstock.runner.host_rows import HostRows
from penstock.runner.native_runner import NativeRunner
from tests.kernels.native.random_models import BLOCK, VOCAB, build, reference

SEQS, MODEL_LEN = 4, 2 * BLOCK
PROMPT = [3, 1, 4, 1, 5]
GOOD = SamplingParams(temperature=1.2, top_p=0.9, frequency_penalty=0.5, max_tokens=12, ignore_eos=True)
LIMITS = SchedulerLimits(
    num_blocks=16,
    block_size=BLOCK,
    max_seqs=SEQS,
    max_step_tokens=32,
    max_model_len=MODEL_LEN,
    vocab_size=VOCAB,
    eos_ids=frozenset({5}),
)
WHOLE = ["top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"]
REAL = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
EDGES = [-(2**63) - 1, -(2**31) - 1, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 2**70, 10**400]

any_whole = st.sampled_from(EDGES) | st.integers()
any_real = st.sampled_from([*EDGES, 5e-324, 1e39, Fraction(10**400)]) | st.floats()
usual: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 1e-5, 0.7, 100]),
    "top_p": st.sampled_from([1e-300, 0.9, 1]),
    "top_k": st.integers(0, 300),
    "min_p": st.sampled_from([0, 5e-324, 0.1, 1]),
    "repetition_penalty": st.sampled_from([0.01, 1, 100]),
    "presence_penalty": st.sampled_from([-2, 0, 2]),
    "frequency_penalty": st.sampled_from([-2, 0, 2]),
    "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
    "max_tokens": st.none() | st.integers(0, 50),
    "min_tokens": st.integers(0, 9),
    "logprobs": st.none() | st.integers(0, 20),
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3),
    "ignore_eos": st.booleans(),
}
unusual: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(WHOLE, any_whole | any_real),
    **dict.fromkeys(REAL, any_real),
    "logit_bias": st.dictionaries(any_whole, any_real, min_size=1, max_size=3),
    "stop_token_ids": st.lists(any_whole, min_size=1, max_size=3),
}
asked = st.builds(
    lambda fields, others: {**fields, **others},
    st.fixed_dictionaries({}, optional=usual),
    st.just({}) | st.sampled_from(sorted(unusual)).flatmap(lambda name: st.fixed_dictionaries({name: unusual[name]})),
)


def request_of(params: SamplingParams, name: str = "r") -> GenerateRequest:
    return GenerateRequest(name, PROMPT, params, seed=choice_seed(params.seed or 0, 0))


class Engine:
    def __init__(self, executor: Executor) -> None:
        self.loop = EngineLoop(Scheduler(LIMITS), executor, self._take)
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, Chunk] = {}

    def _take(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self.tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                self.last[chunk.request_id] = chunk

    def submit(self, name: str, params: SamplingParams) -> None:
        self.loop.submit(request_of(params, name))

    def run(self) -> None:
        while self.loop.step():
            pass


def accepted(fields: Mapping[str, Any], submit: Callable[[SamplingParams], None]) -> bool:
    """If not, the error names a field."""
    refused: InvalidRequest | None = None
    try:
        submit(SamplingParams(**fields))
    except InvalidRequest as error:
        refused = error
    assert refused is None or (refused.param in fields and refused.message.startswith(str(refused.param)))
    return refused is None


@pytest.fixture(scope="module")
def executor() -> Executor:
    if not bindings.available():
        pytest.skip(str(bindings.unavailable_reason()))
    return NativeRunner(build(reference("llama", "int8"), "int8"), HostRows(SEQS, MODEL_LEN // BLOCK, VOCAB))


@given(st.lists(asked, min_size=1, max_size=SEQS - 1))
@example([{"top_k": 2**31}])
@example([{"top_k": 10**400, "temperature": 0}])
@example([{"logit_bias": {1: Fraction(10**400)}}])
def test_another_request_goes_on(executor: Executor, given_fields: list[dict[str, Any]]) -> None:
    alone = Engine(executor)
    alone.submit("good", GOOD)
    alone.run()
    engine = Engine(executor)
    engine.submit("good", GOOD)
    engine.loop.step()
    running = [str(n) for n, fields in enumerate(given_fields) if accepted(fields, partial(engine.submit, str(n)))]
    engine.run()
    assert engine.last["good"].finish_reason == "length"
    assert engine.tokens["good"] == alone.tokens["good"]
    assert [engine.last[name].error for name in running] == [None] * len(running)


def test_no_vocabulary_is_larger() -> None:
    assert SamplingParams(top_k=2**31 - 1).top_k == 2**31 - 1
    assert SamplingParams(top_k=2**31) == SamplingParams(top_k=10**400) == SamplingParams()
