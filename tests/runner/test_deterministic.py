"""`engine.deterministic` on a GPU, emulated: a position of a model has the same bits, however it is computed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.checkpoint.source import resolve
from penstock.core.errors import StartupError
from penstock.core.request import SamplingParams
from penstock.engine.executor import RowSetup, Step
from penstock.engine.settings import EngineConfig
from penstock.models.config import ModelConfig, read_config
from penstock.models.llama import Llama
from penstock.models.loader import load_model
from penstock.runner.batch import build_batch
from penstock.runner.row_state import RowState

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels import batch_invariant
from penstock.kernels.hopper import attention, gemm, gemm_configs, persistent_gemm, program, tensor_map
from penstock.kernels.triton import norm as norms
from penstock.kernels.triton import prefill
from penstock.kernels.triton.argmax import argmax_scratch
from penstock.kernels.triton.decode_inputs import gather_decode_inputs
from penstock.runner import fused_forward, mixed_steps
from penstock.runner.cuda_startup import fused_executor
from penstock.runner.device_adapters import no_adapters
from penstock.runner.device_stream import Pinned
from penstock.runner.fused_forward import FusedForward, deterministic_problem
from penstock.runner.mixed_steps import GreedyTokens, MixedSteps
from tests.kernels.hopper.emulated_gpu import available, emulated_kernel, emulated_tensor_map
from tests.runner.emulated_cuda import HostStream

CPU, BLOCK, TABLE, SEQS, VOCAB = torch.device("cpu"), 16, 4, 3, 64
LENGTH, PROMPT = 40, 38  # tokens of the sequence that is compared, and how many of them come as a prompt
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not available:
        pytest.skip("needs g++")
    kernel = emulated_kernel(tmp_path / "kernels", resident=8)
    for module in (program, gemm, persistent_gemm):
        monkeypatch.setattr(module, "kernel", kernel)
    for module in (tensor_map, gemm, persistent_gemm):
        monkeypatch.setattr(module, "tensor_map", emulated_tensor_map)
    monkeypatch.setattr(norms, "is_hopper", lambda device: True)
    scratch = attention.new_scratch(CPU)
    monkeypatch.setattr(attention, "_scratch", lambda: scratch)
    monkeypatch.setattr(attention, "_sm_count", lambda: 2)
    monkeypatch.setattr(prefill, "suits_hopper", lambda q, cache, window: cache.dtype == torch.bfloat16 and not window)
    monkeypatch.setattr(gemm_configs, "_SMS", 8)
    monkeypatch.setattr(persistent_gemm, "_PAIRS", 2)
    monkeypatch.setattr(batch_invariant, "MOST_STREAMED", 16)
    monkeypatch.setattr(mixed_steps, "_DECODES", (2,))
    monkeypatch.setattr(mixed_steps, "_PROMPTS", (2,))
    monkeypatch.setattr(mixed_steps, "_TOKENS", (16, 48))


def load(folder: Path, changes: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> tuple[Llama, ModelConfig]:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    checkpoint = resolve(f"dummy:{folder}")
    config, generator = read_config(checkpoint), torch.Generator().manual_seed(1)
    model = load_model(checkpoint, config, dtype=dtype, device=CPU)
    for name, tensor in model.checkpoint_tensors():
        tensor.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
    assert isinstance(model, Llama)
    return model, config


class Steps:
    """Steps as the runner makes them: with prompts in buckets, all others as decode steps. Rows are sequences."""

    def __init__(self, forward: FusedForward) -> None:
        generator = torch.Generator().manual_seed(2)
        self.tokens = [torch.randint(1, VOCAB, (LENGTH,), generator=generator).tolist() for _ in range(SEQS)]
        self._forward = forward
        self._state = RowState(SEQS + 1, TABLE, VOCAB, CPU)
        self._tables = torch.zeros((SEQS + 1, TABLE), dtype=torch.int32)
        self._logits, tokens = torch.empty((SEQS, VOCAB)), torch.empty(SEQS, dtype=torch.int64)
        scratch = argmax_scratch(SEQS, VOCAB, CPU)
        finish, most = GreedyTokens(forward, self._logits, tokens, scratch), len(self._logits)
        given = finish, no_adapters(CPU), HostStream(CPU)
        self._mixed = MixedSteps(forward, self._tables, *given, most_sampled=most, max_tokens=48)
        self._staged = Pinned((self._mixed.size,), torch.int32, CPU)
        greedy = SamplingParams(temperature=0)
        places = [(row, 0, list(range(row * TABLE, (row + 1) * TABLE))) for row in range(SEQS)]
        setups = [RowSetup(row, greedy, 0, self.tokens[row], LENGTH, ()) for row in range(SEQS)]
        self._begun: dict[str, Any] = {"setups": setups, "blocks": places}

    @torch.inference_mode()
    def __call__(self, *chunks: tuple[int, int, int]) -> list[torch.Tensor]:
        """The logits after each chunk (row, first position, end)."""
        step = Step(
            rows=[row for row, _, _ in chunks],
            starts=[first for _, first, _ in chunks],
            counts=[end - first for _, first, end in chunks],
            samples=[1] * len(chunks),
            tokens=[token for row, first, end in chunks for token in self.tokens[row][first:end]],
            **self._begun,
        )
        self._begun = {}
        self._state.apply(step)
        batch = build_batch(step, self._state, BLOCK)
        self._tables.copy_(torch.from_numpy(self._state.tables_RM))
        if batch.num_decodes < len(chunks):
            self._mixed.run(batch, self._state, self._staged)
            return list(self._logits[: len(chunks)].clone())
        tokens = torch.tensor([*(self.tokens[row][first] for row, first, _ in chunks), -1], dtype=torch.int32)
        rows = torch.from_numpy(np.append(batch.rows_T, SEQS).astype(np.int32))  # and one of padding
        contexts = torch.from_numpy(np.append(batch.contexts_S, 0).astype(np.int32))
        forward, last = self._forward, self._state.last_token_R
        inputs = gather_decode_inputs(rows, contexts, last, tokens, self._tables, forward.embedding, BLOCK)
        hidden = forward.hidden(inputs.x_SC, forward.attention.attend_decode(inputs, contexts))
        assert hidden.isfinite().all()
        return list(forward.logits(hidden)[: len(chunks)])


@pytest.mark.usefixtures("emulated")
def test_logits_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    model, config = load(tmp_path, {})

    def steps() -> Steps:
        return Steps(
            FusedForward(
                model, config, num_blocks=TABLE * SEQS, block_size=BLOCK, max_seqs=SEQS, max_model_len=TABLE * BLOCK,
                deterministic=True,
            )
        )  # fmt: skip

    alone = steps()
    expected = alone((0, 0, PROMPT))
    expected += [alone((0, position, position + 1))[0] for position in range(PROMPT, LENGTH)]

    beside = steps()
    beside((1, 0, 4), (0, 0, 7))
    found = [beside((1, 4, 5), (0, 7, PROMPT))[1]]
    for i, position in enumerate(range(PROMPT, LENGTH)):
        found.append(beside((0, position, position + 1), (1, 5 + i, 6 + i))[0])
    for position, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"after {PROMPT + position} tokens"

    assert torch.equal(steps()((2, 0, 4), (0, 0, LENGTH))[1], expected[-1])  # resumed, beside another prompt


SIZES = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 512}
MOE = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "dtype", "hopper", "message"),
    [
        ({}, torch.bfloat16, True, None),
        ({}, torch.bfloat16, False, "needs a Hopper GPU"),
        ({}, torch.float16, True, "needs dtype bfloat16, not float16"),
        ({"intermediate_size": 520}, torch.bfloat16, True, "multiples of 16"),
        ({"vocab_size": 256}, torch.bfloat16, True, "at least 512"),
        (MOE, torch.bfloat16, True, "models with experts"),
    ],
    ids=["supported", "another GPU", "float16", "odd sizes", "small sizes", "experts"],
)
def test_what_is_refused(
    changes: dict[str, Any],
    dtype: torch.dtype,
    hopper: bool,
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, config = load(tmp_path, {**SIZES, **changes}, dtype)
    monkeypatch.setattr(fused_forward, "is_hopper", lambda device: hopper)
    if message is None:
        assert deterministic_problem(model, config) is None
        return
    plan = SimpleNamespace(engine=EngineConfig(deterministic=True), model=config)
    with pytest.raises(StartupError, match=message) as refused:
        fused_executor(plan, model)  # type: ignore[arg-type]
    assert refused.value.param == "engine.deterministic"
