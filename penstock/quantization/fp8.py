"""Weights in fp8 (e4m3) with one scale per output channel: of a single matrix, and of all layers of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    weight: torch.Tensor  # float8_e4m3fn [..., N, K]
    scales: torch.Tensor  # float32 [..., N]: weight * scales[..., None] is close to the original


def quantize_channels(weight: torch.Tensor) -> Fp8Weight:
    scales = weight.abs().amax(-1).float().clamp_min(1e-12) / E4M3_MAX
    return Fp8Weight((weight / scales[..., None].to(weight.dtype)).to(torch.float8_e4m3fn), scales)


def quantize_model(model: nn.Module) -> None:
    """Replace the matrices of a model's `layers` by fp8, one by one.

    The module that holds a matrix `weight` gets a buffer `weight_scales`, and so on by the matrix's name. Routers of
    experts stay as they are, and so do the embedding and the output projection, which are outside the layers.
    """
    layers = model.get_submodule("layers")
    matrices = [name for name, parameter in layers.named_parameters() if parameter.dim() > 1]
    for path in matrices:
        if path.endswith("router.weight"):
            continue
        owner, _, name = path.rpartition(".")
        module = layers.get_submodule(owner)
        quantized = quantize_channels(module.get_parameter(name))
        setattr(module, name, nn.Parameter(quantized.weight, requires_grad=False))
        module.register_buffer(f"{name}_scales", quantized.scales)
