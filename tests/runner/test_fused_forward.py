"""The fused Triton path against plain torch, through the real scheduler, on tiny models in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from penstock.checkpoint.source import resolve
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.kernels.attention_reference import ReferenceAttention
from penstock.models.config import ModelConfig, read_config
from penstock.models.llama import Llama
from penstock.models.loader import load_model
from penstock.runner.batch import Batch
from penstock.runner.forward import Forward, TorchForward
from penstock.runner.model_runner import ModelRunner
from penstock.runner.row_state import RowState, TorchRows

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels.triton.argmax import argmax_scratch
from penstock.kernels.triton.decode_inputs import gather_decode_inputs, gather_decode_inputs_reference
from penstock.runner import mixed_steps
from penstock.runner.device_adapters import no_adapters
from penstock.runner.device_stream import Pinned
from penstock.runner.fused_forward import FusedForward
from penstock.runner.mixed_steps import GreedyTokens, MixedSteps
from tests.runner.emulated_cuda import HostStream

CPU = torch.device("cpu")
MAX_SEQS, STEP_TOKENS = 4, 24
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral-window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9},
    "qwen2-biased": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 8},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "qwen3-tied": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
}


def load(family: str, folder: Path) -> tuple[Llama, ModelConfig]:
    (folder / "config.json").write_text(json.dumps({**SIZES, **FAMILIES[family]}))
    checkpoint = resolve(f"dummy:{folder}")
    config = read_config(checkpoint)
    model = load_model(checkpoint, config, dtype=torch.float32, device=CPU)
    assert isinstance(model, Llama)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.checkpoint_tensors():
        tensor.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return model, config


def generate(forward: Forward, block_size: int, num_blocks: int) -> dict[str, list[int]]:
    """Mixed lengths, chunks, a shared prefix, and prefill beside decoding."""
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_seqs=MAX_SEQS,
        max_step_tokens=STEP_TOKENS,
        max_model_len=128,
        vocab_size=64,
    )
    state = TorchRows(MAX_SEQS + 1, 128 // block_size, 64, CPU)
    outputs: dict[str, list[int]] = {}

    def take(chunks: list[Chunk]) -> None:
        for chunk in chunks:
            outputs.setdefault(chunk.request_id, []).extend(chunk.token_ids)

    loop = EngineLoop(
        Scheduler(limits), ModelRunner(forward, state, num_blocks=num_blocks, block_size=block_size), take
    )
    prefix = [(7 * i) % 61 + 1 for i in range(34)]
    prompts = [[*prefix, 5, 6], [*prefix, 9], [3], prefix[5:20]]
    for number, prompt in enumerate(prompts):
        loop.submit(GenerateRequest(str(number), prompt, SamplingParams(temperature=0, max_tokens=5)))
    while loop.step():
        pass
    return outputs


class GraphPath:
    """Steps go the way that CUDA graphs go: decodes gathered on the device, those with prompts padded to a bucket."""

    def __init__(self, forward: FusedForward, block_size: int) -> None:
        self._forward = forward
        self._block_size = block_size
        self._tables = torch.zeros((MAX_SEQS + 1, 128 // block_size), dtype=torch.int32)
        vocab = SIZES["vocab_size"]
        self._logits, self._tokens = torch.empty((MAX_SEQS, vocab)), torch.empty(MAX_SEQS, dtype=torch.int64)
        scratch = argmax_scratch(MAX_SEQS, vocab, CPU)
        greedy = GreedyTokens(forward, self._logits, self._tokens, scratch)
        self._mixed = MixedSteps(
            forward,
            self._tables,
            greedy,
            no_adapters(CPU),
            HostStream(CPU),
            most_sampled=MAX_SEQS,
            max_tokens=STEP_TOKENS,
        )
        self._staged = Pinned((self._mixed.size,), torch.int32, CPU)
        self.steps = self.mixed_steps = 0

    def __call__(
        self, batch: Batch, state: RowState, logit_rows: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if batch.num_decodes < len(batch.contexts_S):
            self.mixed_steps += 1
            self._tables.copy_(torch.from_numpy(state.tables_RM))
            self._mixed.run(batch, state, self._staged)
            return self._logits[: len(logit_rows)], self._tokens[: len(logit_rows)]
        self.steps += 1
        rows, contexts, tables = map(torch.from_numpy, (batch.rows_T, batch.contexts_S, state.tables_RM))
        tokens = torch.from_numpy(batch.tokens_T)
        inputs = gather_decode_inputs(
            rows, contexts, state.last_token_R, tokens, tables, self._forward.embedding, self._block_size
        )
        hidden = self._forward.hidden(inputs.x_SC, self._forward.attention.attend_decode(inputs, contexts))
        logits = self._forward.logits(hidden[torch.from_numpy(logit_rows)])
        return logits, logits.argmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_plain_torch(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = load(family, tmp_path)
    block_size, num_blocks = 16, 16
    reference = TorchForward(
        model, ReferenceAttention(model.attention_spec, num_blocks, block_size, torch.float32, CPU), CPU
    )
    expected = generate(reference, block_size, num_blocks)
    assert [len(tokens) for tokens in expected.values()] == [5] * 4
    fused = FusedForward(model, config, num_blocks=num_blocks, block_size=block_size, max_seqs=4, max_model_len=128)
    if family in ("llama", "mixtral"):  # without graph buckets; the same kernels as below, without padding
        assert generate(fused, block_size, num_blocks) == expected
    monkeypatch.setattr(mixed_steps, "_DECODES", (3,))
    monkeypatch.setattr(mixed_steps, "_TOKENS", (5, STEP_TOKENS))
    monkeypatch.setattr(mixed_steps, "_PROMPTS", (3,))
    graphs = GraphPath(fused, block_size)
    assert generate(graphs, block_size, num_blocks) == expected
    assert graphs.steps > 0
    assert graphs.mixed_steps > 0


def test_decode_inputs_match_their_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    tables = torch.randint(1, 99, (6, 5), dtype=torch.int32, generator=generator)
    last = torch.randint(0, 64, (6,), generator=generator)
    rows, contexts = torch.tensor([4, 0, 2, 5], dtype=torch.int32), torch.tensor([17, 1, 80, 0], dtype=torch.int32)
    tokens, embedding = torch.tensor([-1, 7, -1, -1], dtype=torch.int32), torch.randn(64, 1100, generator=generator)
    found = gather_decode_inputs(rows, contexts, last, tokens, tables, embedding, 16)
    expected = gather_decode_inputs_reference(rows, contexts, last, tokens, tables, embedding, 16)
    assert torch.equal(found.x_SC, expected.x_SC)
    assert torch.equal(found.positions_S, expected.positions_S)
    assert torch.equal(found.slots_S, expected.slots_S)
    for index, context in enumerate(contexts.tolist()):
        used = -(-context // 16)
        assert torch.equal(found.tables_SM[index, :used], expected.tables_SM[index, :used])
