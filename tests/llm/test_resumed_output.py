"""A request that carries what another engine emitted for it continues exactly as it would have gone on there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock import LLM, SamplingParams
from penstock.checkpoint.source import DEFAULT_MODEL
from penstock.core.engine import Engine
from penstock.core.request import Chunk, GenerateRequest, TokenLogprob
from penstock.engine.settings import EngineConfig
from penstock.fleet.launcher import LocalLauncher
from penstock.kernels.native import bindings
from penstock.observability.settings import LogConfig
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
LONG = PROMPT * 25  # answers to it begin in one range of keys and end in the next
BESIDE = {
    "greedy": replace(GREEDY, logprobs=5),
    "sampled": replace(CASES["penalties"], logprobs=5, max_tokens=32),
}


async def run(engine: Engine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.submit(request)]


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def scores_of(chunks: list[Chunk]) -> list[TokenLogprob]:
    return [one for chunk in chunks for one in chunk.logprobs or ()]


async def check_resuming(engine: Engine, params: SamplingParams) -> None:
    request = GenerateRequest("whole", PROMPT, params, seed=7)
    whole = await run(engine, request)
    tokens, scores = tokens_of(whole), scores_of(whole)
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
        assert scores_of(rest) == scores[cut:]


@pytest.fixture(scope="module", params=["none", "int8"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    if not bindings.available() or (request.param == "none" and bindings.isa() == "amx"):
        pytest.skip("numbers depend on the batch in torch, and those of bfloat16 weights in AMX tiles")
    with LLM("smollm2-135m", quantization=request.param, kv_memory_gib=0.1, max_model_len=512) as llm:
        yield llm


@pytest.mark.parametrize("name", CASES)
def test_in_process(llm: LLM, name: str) -> None:
    asyncio.run(check_resuming(llm.engine, CASES[name]))


async def check_beside_others(engine: Engine, params: SamplingParams) -> None:
    """An answer cut in many places at once, some of which find blocks in the prefix cache, while others come and go."""
    request = GenerateRequest("whole", LONG, params, seed=7)
    whole = await run(engine, request)
    tokens, scores = tokens_of(whole), scores_of(whole)
    cuts = range(1, len(tokens), 2)
    resumed = [
        replace(request, id=f"from {cut}", output=tokens[:cut], cache_salt=str(cut) if cut % 3 else "") for cut in cuts
    ]
    noise = random.Random(3)
    others = [
        GenerateRequest(
            f"other {number}",
            [noise.randrange(1000, 40000) for _ in range(noise.randrange(1, 200))],
            replace(GREEDY, temperature=noise.choice([0, 1.0]), max_tokens=noise.randrange(1, 40)),
            seed=number,
        )
        for number in range(16)
    ]
    mixed = [*resumed, *others]
    noise.shuffle(mixed)
    answers = dict(
        zip([one.id for one in mixed], await asyncio.gather(*(run(engine, one) for one in mixed)), strict=True)
    )
    for cut in cuts:
        assert tokens_of(answers[f"from {cut}"]) == tokens[cut:], cut
        assert scores_of(answers[f"from {cut}"]) == scores[cut:], cut


@pytest.mark.parametrize("name", BESIDE)
def test_beside_others(llm: LLM, name: str) -> None:
    asyncio.run(check_beside_others(llm.engine, BESIDE[name]))


async def test_over_the_workers_socket() -> None:
    launcher = LocalLauncher(Start(DEFAULT_MODEL, EngineConfig(kv_memory_gib=0.1, max_model_len=256), LogConfig()))
    worker = await launcher.launch()
    try:
        for params in CASES.values():
            await check_resuming(worker.engine, params)
    finally:
        await worker.stop()
