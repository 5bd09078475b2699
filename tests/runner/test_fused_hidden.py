"""Decoders that make embeddings on a GPU, against transformers: the fused kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from penstock.checkpoint.source import resolve
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.models.config import read_config
from penstock.models.llama import Llama
from penstock.models.loader import load_model
from penstock.models.pooling import Pooling, PoolingKind
from penstock.runner.pooled_runner import PooledRunner
from penstock.runner.row_state import RowState
from tests.models.tiny_encoders import cosines, hidden_states

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.runner import mixed_steps
from penstock.runner.fused_forward import FusedForward
from penstock.runner.fused_hidden import FusedHidden
from tests.runner.emulated_cuda import HostStream

CPU = torch.device("cpu")
BLOCK, SEQS, STEP_TOKENS = 16, 4, 40
CONFIG = transformers.Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)


def texts() -> list[list[int]]:
    draw = np.random.default_rng(4)
    shared = draw.integers(0, 64, 34).tolist()  # a prefix that is in the cache for the second one
    return [[*shared, 3, 4], [*shared, 5], *(draw.integers(0, 64, length).tolist() for length in (1, 16, 70))]


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_prompts_in_chunks_and_with_cached_prefixes_give_the_vectors_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: PoolingKind
) -> None:
    monkeypatch.setattr(mixed_steps, "_DECODES", (3,))
    monkeypatch.setattr(mixed_steps, "_TOKENS", (20, STEP_TOKENS))
    monkeypatch.setattr(mixed_steps, "_PROMPTS", (3,))
    torch.manual_seed(5)
    reference = transformers.Qwen3Model(CONFIG).eval()
    with torch.no_grad():
        reference.norm.weight.normal_(1.0, 0.3)  # so that the last norm cannot be left out unnoticed
    reference.save_pretrained(tmp_path)
    checkpoint = resolve(str(tmp_path))
    config = read_config(checkpoint)
    model = load_model(checkpoint, config, dtype=torch.float32, device=CPU)
    assert isinstance(model, Llama)
    forward = FusedForward(model, config, num_blocks=40, block_size=BLOCK, max_seqs=SEQS, max_model_len=128)
    state = RowState(SEQS + 1, 128 // BLOCK, config.vocab_size, CPU)
    runner = PooledRunner(
        FusedHidden(forward, state, HostStream(CPU), block_size=BLOCK, max_step_tokens=STEP_TOKENS),
        Pooling(kind, normalize=False),
    )
    limits = SchedulerLimits(
        num_blocks=runner.num_blocks,
        block_size=BLOCK,
        max_seqs=SEQS,
        max_step_tokens=STEP_TOKENS,
        max_model_len=128,
        vocab_size=config.vocab_size,
        prefix_caching=kind == "last",
        pools=True,
    )
    chunks: dict[str, Chunk] = {}
    loop = EngineLoop(Scheduler(limits), runner, lambda got: chunks.update({chunk.request_id: chunk for chunk in got}))
    for first, last in ((0, 1), (1, len(texts()))):
        for number, text in enumerate(texts()[first:last], first):
            loop.submit(GenerateRequest(f"r{number}", text, SamplingParams(temperature=0, max_tokens=0)))
        while loop.step():
            pass
    found = np.stack([np.frombuffer(chunks[f"r{number}"].vector or b"", "<f4") for number in range(len(texts()))])
    states = [hidden_states(reference, text) for text in texts()]
    expected = np.stack([x[-1] if kind == "last" else x.mean(0) for x in states])
    assert cosines(found, expected).min() > 0.999999
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert chunks["r1"].cached_tokens == (32 if kind == "last" else 0)
