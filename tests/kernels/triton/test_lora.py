"""LoRA kernels against their reference, through Triton's interpreter, on sizes that fill no tile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.engine.executor import NO_ADAPTER, AdapterWeights
from penstock.kernels.lora_reference import lora_reference
from penstock.kernels.triton import lora
from penstock.kernels.triton.lora import LowRank, add_and_shrink, expand, shrink, swiglu
from penstock.kernels.triton.norm import add_rms_norm_reference
from penstock.runner import device_adapters
from penstock.runner.device_adapters import AdapterShape, DeviceAdapters

CPU, EPS = torch.device("cpu"), 1e-5
SHAPE = AdapterShape(hidden=80, qkv=(96, 32, 32), inner=112)
RANKS = (3, 16, 24)


def some_adapters(draw: np.random.Generator, tokens: int) -> tuple[DeviceAdapters, list[int]]:
    """Some slots, each with an adapter of another rank, the last with a part of the modules; slots of the tokens."""
    adapters = DeviceAdapters(
        [SHAPE, SHAPE], slots=len(RANKS), max_rank=24, max_tokens=tokens, dtype=torch.float32, device=CPU
    )
    for slot, rank in enumerate(RANKS):
        modules = {
            name: (
                draw.standard_normal((rank, inputs), dtype=np.float32) / np.float32(9),
                draw.standard_normal((outputs, rank), dtype=np.float32),
            )
            for name, (inputs, outputs) in adapters.modules.items()
            if slot < 2 or "q_proj" in name or "down" in name
        }
        adapters.fill(slot, AdapterWeights(str(slot), rank, modules))
    return adapters, draw.integers(NO_ADAPTER, len(RANKS), tokens).tolist()


@pytest.mark.parametrize(("tokens", "few"), [(1, 256), (21, 256), (70, 16)])
def test_as_the_reference(tokens: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_adapters, "_FEW", few)
    monkeypatch.setattr(lora, "_COLUMNS", 32)
    monkeypatch.setattr(lora, "_INNER_ELEMENTS", 1 << 10)
    monkeypatch.setattr(lora, "_PARTIALS_AT_ONCE", 1 << 10)
    draw = np.random.default_rng(tokens)
    generator = torch.Generator().manual_seed(tokens)
    adapters, slots = some_adapters(draw, tokens)
    padded_ranks = [16, 16, 32]
    adapters.send(np.array(slots[: tokens - tokens // 4], dtype=np.int32), tokens)
    slots[tokens - tokens // 4 :] = [NO_ADAPTER] * (tokens // 4)
    tiles, layer = adapters.of_step(tokens).tiles, adapters.layers[1]
    assert layer.gate_up is not None
    assert layer.down is not None

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def of(x: torch.Tensor, low: LowRank) -> torch.Tensor:
        return lora_reference(x, low, slots, padded_ranks)

    x, mixed, gain, projected = random(tokens, 80), random(tokens, 96), random(80), random(tokens, 160)
    found = add_and_shrink(x.clone(), tiles, None, (layer.qkv, gain, EPS))
    assert found is not None
    deferred, shrunk = found
    normed = add_rms_norm_reference(x, gain, EPS)[0]
    torch.testing.assert_close(deferred.values, x * gain)
    torch.testing.assert_close(deferred.squares.sum(0), x.square().sum(1))
    out = projected.clone()
    expand(out, shrunk, layer.qkv, tiles)
    torch.testing.assert_close(out, projected + of(normed, layer.qkv), rtol=1e-4, atol=1e-4)

    added, summed = (shrink(mixed, layer.out, tiles), layer.out), x + of(mixed, layer.out)
    only_added = x.clone()
    assert add_and_shrink(only_added, tiles, added, None) is None
    torch.testing.assert_close(only_added, summed, rtol=1e-4, atol=1e-4)
    residual = x.clone()
    found = add_and_shrink(residual, tiles, added, (layer.gate_up, gain, EPS))
    assert found is not None
    torch.testing.assert_close(residual, summed, rtol=1e-4, atol=1e-4)

    normed = add_rms_norm_reference(summed, gain, EPS)[0]
    gate_up = random(tokens, 224)
    gate, up = (gate_up + of(normed, layer.gate_up)).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    inner, down = swiglu(gate_up, found[1], layer.gate_up, layer.down, tiles)
    torch.testing.assert_close(inner, expected, rtol=1e-3, atol=1e-3)
    last = x.clone()
    add_and_shrink(last, tiles, (down, layer.down), None)
    torch.testing.assert_close(last, x + of(expected, layer.down), rtol=1e-3, atol=1e-3)
