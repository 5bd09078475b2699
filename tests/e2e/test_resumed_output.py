"""A request that carries what another engine emitted for it continues exactly as it would have gone on there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock import LLM, SamplingParams
from penstock.checkpoint.source import DEFAULT_MODEL
from penstock.core.engine import Engine
from penstock.core.request import Chunk, GenerateRequest
from penstock.engine.settings import EngineConfig
from penstock.fleet.launcher import LocalLauncher
from penstock.worker.protocol import Start

PROMPT = [1, 504, 2365, 6354, 16438, 284, 260, 1250, 30, 378]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
CASES = {
    "greedy": GREEDY,
    "penalties": replace(
        GREEDY, temperature=0.9, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.7
    ),
    "min_tokens": SamplingParams(temperature=1.0, max_tokens=24, min_tokens=16, stop_token_ids=(28, 30, 198, 260)),
    "logprobs": replace(GREEDY, logprobs=3, prompt_logprobs=1),
    "no_output": replace(GREEDY, max_tokens=0, prompt_logprobs=2),
}


async def run(engine: Engine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.submit(request)]


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def check_resuming(engine: Engine, params: SamplingParams) -> None:
    request = GenerateRequest("whole", PROMPT, params, seed=7)
    whole = await run(engine, request)
    tokens, scores = tokens_of(whole), [one for chunk in whole for one in chunk.logprobs or ()]
    assert len(tokens) >= params.min_tokens
    if params.prompt_logprobs is not None:
        assert len(whole[0].prompt_logprobs or ()) == len(PROMPT)
    for cut in {1, 2, len(tokens) // 2, len(tokens) - 1}:
        if not 0 < cut < len(tokens):
            continue
        rest = await run(engine, replace(request, id=f"from {cut}", output=tokens[:cut], cache_salt=str(cut)))
        assert tokens_of(rest) == tokens[cut:]
        assert rest[-1].finish_reason == whole[-1].finish_reason
        assert all(chunk.prompt_logprobs is None for chunk in rest)
        assert rest[-1].ledger is not None
        assert rest[-1].ledger.output_tokens == len(tokens)
        for again, first in zip([one for chunk in rest for one in chunk.logprobs or ()], scores[cut:], strict=True):
            assert again.token_id == first.token_id
            assert again.logprob == pytest.approx(first.logprob, abs=0.02)


@pytest.fixture(scope="module", params=["none", "int8"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("smollm2-135m", quantization=request.param, kv_memory_gib=0.1, max_model_len=256) as llm:
        yield llm


@pytest.mark.parametrize("name", CASES)
def test_in_process(llm: LLM, name: str) -> None:
    asyncio.run(check_resuming(llm.engine, CASES[name]))


async def test_over_the_workers_socket() -> None:
    launcher = LocalLauncher(Start(DEFAULT_MODEL, EngineConfig(kv_memory_gib=0.1, max_model_len=256), "info"))
    worker = await launcher.launch()
    try:
        for params in CASES.values():
            await check_resuming(worker.engine, params)
    finally:
        await worker.stop()
