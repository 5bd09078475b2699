"""What a profile makes of a model on a GPU and of its kernels."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.engine.executor import Step
from penstock.runner.cuda_probe import CudaProbe, kernels_of, part_of
from tests.runner.emulated_cuda import emulated_runner
from tests.runner.test_fused_forward import load


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("gemm", "gemm"),
        ("_skinny_kernel", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "gemm"),
        ("nvjet_hsh_128x64_NNT", "gemm"),
        ("persistent_gemm", "gemm"),
        ("decode", "attention"),
        ("_prefill_kernel", "attention"),
        ("layers", "gemm"),
        ("_add_rms_norm_kernel", "norm"),
        ("defer_norms", "norm"),
        ("rows_to_e4m3", "norm"),
        ("_silu_mul_kernel", "activation"),
        ("_argmax_kernel", "sampling"),
        ("choose_kernel", "sampling"),
        ("_choose_kernel", "experts"),
        ("_gather_kernel", "inputs"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("something_else", "other"),
    ],
)
def test_kernels_belong_to_parts_of_a_step(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_only_what_ran_on_the_device_counts_on_our_clock() -> None:
    types = torch._C._autograd.DeviceType

    def event(name: str, device: object, start: int) -> Any:
        values = {"name": name, "device_type": device, "start_ns": start, "duration_ns": 5, "device_resource_id": 7}
        return SimpleNamespace(**{key: (lambda value=value: value) for key, value in values.items()})

    found = list(kernels_of([event("cudaLaunchKernel", types.CPU, 1000), event("gemm", types.CUDA, 1010)], wall=900))
    assert found == [("gemm", "gemm", 110, 115, 7)]


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_work_and_what_is_said_without_cupti(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = load(kind, tmp_path)
    sizes = {"max_seqs": 2, "num_blocks": 4, "block_size": 16, "max_step_tokens": 16}
    runner, _ = emulated_runner(model, config, monkeypatch, **sizes)
    probe: CudaProbe = runner.kernel_probe
    work = probe.work.of(Step(rows=[0], starts=[9], counts=[1], samples=[1], tokens=[1]))
    matrices = [p for layer in model.layers for p in layer.parameters() if p.ndim > 1]
    head = config.vocab_size * config.hidden_size
    if config.moe is None:
        parameters = head + sum(matrix.numel() for matrix in matrices)
        assert work["gemm"] == (4 * parameters, 2 * parameters)
    else:
        experts, used = sum(m.numel() for m in matrices if m.ndim == 3), config.moe.experts_per_token
        assert work["experts"].bytes == pytest.approx(4 * experts * used / config.moe.num_experts)
        assert work["gemm"].bytes < 4 * (head + sum(m.numel() for m in matrices if m.ndim == 2))  # routers are no GEMM
    kv_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert work["attention"].bytes == 11 * kv_token
    stop = threading.Event()
    record = probe.record(stop.set, stop)
    assert record.kernels == []
    assert "CUPTI" in record.notes[0]
