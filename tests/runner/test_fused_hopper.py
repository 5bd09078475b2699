"""A whole model by the kernels for Hopper, emulated, against plain torch in float32 on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from penstock.checkpoint.source import resolve
from penstock.core.request import SamplingParams
from penstock.engine.executor import NO_ADAPTER, AdapterWeights, RowSetup, Step
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
from penstock.runner.device_adapters import Adapted, DeviceAdapters
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


def test_adapters_inside_gemms_give_what_merged_weights_give(
    launched: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "resident_ctas", lambda device: 8)
    narrow, _ = models(tmp_path)
    config = read_config(resolve(f"dummy:{tmp_path}"))
    fused = FusedForward(
        narrow, config, num_blocks=4 * TABLE, block_size=BLOCK, max_seqs=4, max_model_len=TABLE * BLOCK
    )
    adapters = DeviceAdapters(
        fused.adapter_shapes, slots=2, max_rank=32, max_tokens=4, dtype=torch.bfloat16, device=CPU
    )
    draw, packed = np.random.default_rng(5), []
    for slot, rank in enumerate((16, 20)):
        modules = {
            name: (
                draw.standard_normal((rank, inputs), dtype=np.float32) * np.float32(0.2),
                draw.standard_normal((outputs, rank), dtype=np.float32) * np.float32(0.2),
            )
            for name, (inputs, outputs) in adapters.modules.items()
        }
        packed.append(AdapterWeights(str(slot), rank, modules))
        adapters.fill(slot, packed[-1])
    adapters.send(np.array([1, NO_ADAPTER, 0, 1], dtype=np.int32), 4)
    context, rows = torch.tensor([37, 5, 20, 9], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    tables = rows[:, None] * TABLE + torch.arange(TABLE, dtype=torch.int32)
    slots = tables[rows.long(), (context.long() - 1) // BLOCK] * BLOCK + (context - 1) % BLOCK
    inputs = DecodeInputs(fused.embedding[torch.tensor([9, 5, 3, 2])], context - 1, slots, tables)
    fused.attention.keys.normal_()
    fused.attention.values.normal_()

    def hidden(adapted: Adapted | None) -> torch.Tensor:
        return fused.hidden(inputs.x_SC.clone(), fused.attention.attend_decode(inputs, context), adapted=adapted)

    found, without, weights = hidden(adapters.of_step(4)), hidden(None), dict(narrow.checkpoint_tensors())
    for slot, rows_of_slot in enumerate(([2], [0, 3])):
        before = {name: weights[f"{name}.weight"].clone() for name in adapters.modules}
        for name, (a, b) in packed[slot].modules.items():
            weights[f"{name}.weight"] += torch.from_numpy(b @ a).bfloat16()
        merged = hidden(None)[rows_of_slot].float()
        for name, weight in before.items():
            weights[f"{name}.weight"].copy_(weight)
        assert (found[rows_of_slot] - merged).norm() < 0.03 * merged.norm()
        assert (without[rows_of_slot] - merged).norm() > 0.3 * merged.norm()
    torch.testing.assert_close(found[1], without[1])
    assert "gemm.cu" in launched
