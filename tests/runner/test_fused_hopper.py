"""A whole model by the kernels for Hopper, emulated, against plain torch in float32 on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.checkpoint.source import resolve
from penstock.core.request import SamplingParams
from penstock.engine.executor import RowSetup, Step
from penstock.kernels.attention_reference import ReferenceAttention
from penstock.models.config import read_config
from penstock.models.llama import Llama
from penstock.models.loader import load_model
from penstock.runner.batch import Batch, build_batch
from penstock.runner.forward import Forward, TorchForward
from penstock.runner.row_state import RowState

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels.hopper import attention, decode, gemm, gemm_configs, layers, program, tensor_map
from penstock.kernels.triton import activation, prefill
from penstock.kernels.triton.decode_inputs import DecodeInputs
from penstock.runner import fused_forward
from penstock.runner.fused_forward import FusedForward
from tests.kernels.hopper.emulated_gpu import available, emulated_kernel, emulated_tensor_map

pytestmark = pytest.mark.skipif(not available, reason="needs g++")

CPU, BLOCK, TABLE = torch.device("cpu"), 16, 4
LENGTHS, DECODES = (3, 20, 37, 1, 9, 18), 2
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files of kernels that have run."""
    used: set[str] = set()
    compiled = emulated_kernel(tmp_path / "kernels", resident=8)

    def kernel(file: str, name: str, **defines: int) -> object:
        used.add(file)
        return compiled(file, name, **defines)

    for module in (program, gemm, decode, layers):
        monkeypatch.setattr(module, "kernel", kernel)
    for module in (tensor_map, gemm, decode):
        monkeypatch.setattr(module, "tensor_map", emulated_tensor_map)
    for module in (program, gemm_configs, decode, activation):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)
    scratch = attention.new_scratch(CPU)
    monkeypatch.setattr(attention, "_scratch", lambda: scratch)
    monkeypatch.setattr(attention, "_sm_count", lambda: 3)
    monkeypatch.setattr(prefill, "suits_hopper", lambda *_: True)
    return used


def models(folder: Path) -> tuple[Llama, Llama]:
    """In bfloat16, and the same numbers in float32."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = resolve(f"dummy:{folder}")
    config, generator = read_config(checkpoint), torch.Generator().manual_seed(1)
    narrow, wide = (
        load_model(checkpoint, config, dtype=dtype, device=CPU) for dtype in (torch.bfloat16, torch.float32)
    )
    for (name, target), (_, source) in zip(narrow.checkpoint_tensors(), wide.checkpoint_tensors(), strict=True):
        source.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
        target.copy_(source)
        source.copy_(target)
    assert isinstance(narrow, Llama)
    assert isinstance(wide, Llama)
    return narrow, wide


def logits_of(forward: Forward) -> torch.Tensor:
    """Teacher-forced: all prompts in one step, then two known tokens of each."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 64, (length + DECODES,), generator=generator).tolist() for length in LENGTHS]
    state, rows = RowState(len(prompts), TABLE, 64, CPU), list(range(len(prompts)))
    step = Step(
        rows=rows,
        starts=[0] * len(rows),
        counts=list(LENGTHS),
        samples=[1] * len(rows),
        tokens=[token for row in rows for token in prompts[row][: LENGTHS[row]]],
        setups=[RowSetup(row, SamplingParams(temperature=0), 0, prompts[row], LENGTHS[row], ()) for row in rows],
        blocks=[(row, 0, list(range(row * TABLE, (row + 1) * TABLE))) for row in rows],
    )
    found = []
    for decoded in range(DECODES + 1):
        state.apply(step)
        batch = build_batch(step, state, BLOCK)
        found.append(forward(batch, state, batch.last_N)[0].float())
        step = Step(
            rows=rows,
            starts=[length + decoded for length in LENGTHS],
            counts=[1] * len(rows),
            samples=[1] * len(rows),
            tokens=[prompts[row][min(LENGTHS[row] + decoded, len(prompts[row]) - 1)] for row in rows],
        )
    return torch.cat(found)


class BothWays:
    """The first decoding step goes as those with prompts do, the second as CUDA graphs do: attention applies RoPE."""

    def __init__(self, forward: FusedForward) -> None:
        self._forward = forward
        self._decoded = False

    def __call__(self, batch: Batch, state: RowState, logit_rows: object) -> tuple[torch.Tensor, torch.Tensor]:
        forward = self._forward
        if not self._decoded:
            self._decoded = batch.num_decodes == len(batch.contexts_S)
            return forward(batch, state, batch.last_N)
        arrays = (batch.tokens_T, batch.positions_T, batch.slots_T, batch.tables_SM, batch.contexts_S)
        tokens, positions, slots, tables, contexts = (torch.from_numpy(array).int() for array in arrays)
        inputs = DecodeInputs(forward.embedding[tokens.long()], positions, slots, tables)
        logits = forward.logits(forward.hidden(inputs.x_SC, forward.attention.attend_decode(inputs, contexts)))
        return logits, logits.argmax(-1)


def test_same_logits_as_plain_torch(launched: set[str], tmp_path: Path) -> None:
    narrow, wide = models(tmp_path)
    config = read_config(resolve(f"dummy:{tmp_path}"))
    blocks = TABLE * len(LENGTHS)
    plain = ReferenceAttention(wide.attention_spec, blocks, BLOCK, torch.float32, CPU)
    expected = logits_of(TorchForward(wide, plain, CPU))
    fused = FusedForward(
        narrow, config, num_blocks=blocks, block_size=BLOCK, max_seqs=len(LENGTHS), max_model_len=TABLE * BLOCK
    )
    found = logits_of(BothWays(fused))
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 0.03  # bfloat16's rounding
    assert launched == {"gemm.cu", "prefill.cu", "decode.cu"}


def test_a_step_in_one_launch(launched: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_forward, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
    narrow, _ = models(tmp_path)
    config = read_config(resolve(f"dummy:{tmp_path}"))
    fused = FusedForward(narrow, config, num_blocks=TABLE, block_size=BLOCK, max_seqs=1, max_model_len=TABLE * BLOCK)
    assert fused.stacks(1, TABLE * BLOCK)
    assert not fused.stacks(2, 1)
    fused.attention.keys.normal_()
    fused.attention.values.normal_()
    row, context = torch.tensor([1, 37], dtype=torch.int32).split(1)
    last_token, tables = torch.tensor([9, 5]), torch.arange(2 * TABLE, dtype=torch.int32).view(2, TABLE) - TABLE
    slots = tables[1:, 36 // BLOCK] * BLOCK + 36 % BLOCK
    inputs = DecodeInputs(fused.embedding[last_token[1:]], context - 1, slots, tables[1:])
    expected = fused.logits(fused.hidden(inputs.x_SC, fused.attention.attend_decode(inputs, context)))
    logits, chosen = torch.empty(1, 64), torch.empty(1, dtype=torch.int64)
    fused.decode_stacked(row, context, last_token, tables, logits, chosen)
    assert (logits - expected).norm() < 0.02 * expected.norm()
    assert chosen.tolist() == last_token[1:].tolist() == logits.argmax(-1).tolist()
    assert "layers.cu" in launched
