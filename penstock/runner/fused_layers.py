"""The weights of decoder layers as the fused forward pass on CUDA reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.kernels.triton.moe import ExpertWeights
from penstock.models.layers import MLP, Linear
from penstock.models.llama import DecoderLayer, FeedForward
from penstock.models.moe import Experts


@dataclass(frozen=True, slots=True)
class Projection:
    weight: torch.Tensor
    scales: torch.Tensor | None  # of the channels, for fp8
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Dense:
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class Routed:
    router: torch.Tensor
    experts: ExpertWeights


@dataclass(frozen=True, slots=True)
class FusedLayer:
    attention_norm: torch.Tensor
    qkv: Projection
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    out: Projection
    mlp_norm: torch.Tensor
    mlp: Dense | Routed


def _projection(module: Linear) -> Projection:
    return Projection(module.weight, getattr(module, "weight_scales", None), module.bias)


def fused_layer(layer: DecoderLayer) -> FusedLayer:
    attention = layer.attention
    norms = (attention.q_norm.weight, attention.k_norm.weight) if attention.q_norm and attention.k_norm else None
    return FusedLayer(
        attention_norm=layer.attention_norm.weight,
        qkv=_projection(attention.qkv),
        head_norms=norms,
        out=_projection(attention.out),
        mlp_norm=layer.mlp_norm.weight,
        mlp=_feed_forward(layer.mlp),
    )


def _feed_forward(mlp: FeedForward) -> Dense | Routed:
    if isinstance(mlp, MLP):
        return Dense(_projection(mlp.gate_up), _projection(mlp.down))
    assert isinstance(mlp, Experts), "a feed-forward that the kernels do not know"
    moe, fp8 = mlp.moe, hasattr(mlp, "gate_up_scales")
    scales = (mlp.get_buffer("gate_up_scales"), mlp.get_buffer("down_scales")) if fp8 else None
    experts = ExpertWeights(mlp.gate_up, mlp.down, scales, moe.experts_per_token, moe.norm_topk_prob)
    return Routed(mlp.router.weight, experts)
