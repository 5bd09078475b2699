"""The parts of a decoder layer, and the names that checkpoints give them.

Projections that read the same input are one matrix: query, key and value; gate and up.
Shape suffixes: T tokens, H query heads, K key/value heads, D head size, C hidden size, I intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from penstock.kernels.base import AttentionBackend
from penstock.models.base import Named
from penstock.models.config import ModelConfig
from penstock.models.rope import rotate


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.shape = (size,)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class Linear(nn.Module):
    """y = x W^T + b, where W stacks the rows of several projections."""

    def __init__(self, inputs: int, *outputs: int, bias: bool) -> None:
        super().__init__()
        self.outputs = list(outputs)
        self.weight = nn.Parameter(torch.empty(sum(outputs), inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(outputs)), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def parts(self, *names: str) -> Named:
        """The rows of each projection under its checkpoint name."""
        for name, weight in zip(names, torch.split(self.weight, self.outputs), strict=True):
            yield f"{name}.weight", weight
        if self.bias is not None:
            for name, bias in zip(names, torch.split(self.bias, self.outputs), strict=True):
                yield f"{name}.bias", bias


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.layer = layer
        self.heads, self.kv_heads = heads, kv_heads
        self.shape = (-1, heads + 2 * kv_heads, dim)
        self.qkv = Linear(config.hidden_size, heads * dim, kv_heads * dim, kv_heads * dim, bias=config.attention_bias)
        self.q_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else None
        self.out = Linear(heads * dim, config.hidden_size, bias=config.output_bias)

    def forward(
        self, x_TC: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], attention: AttentionBackend
    ) -> torch.Tensor:
        qkv = self.qkv(x_TC).view(self.shape)
        qk, v_TKD = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm and self.k_norm:
            qk = torch.cat((self.q_norm(qk[:, : self.heads]), self.k_norm(qk[:, self.heads :])), dim=1)
        q_THD, k_TKD = torch.split(rotate(qk, cos_sin), [self.heads, self.kv_heads], dim=1)
        mixed_THD = attention.run(self.layer, q_THD, k_TKD, v_TKD)
        out_TC: torch.Tensor = self.out(mixed_THD.flatten(1))
        return out_TC

    def checkpoint_tensors(self, prefix: str) -> Named:
        yield from self.qkv.parts(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        yield from self.out.parts(f"{prefix}.o_proj")
        if self.q_norm and self.k_norm:
            yield f"{prefix}.q_norm.weight", self.q_norm.weight
            yield f"{prefix}.k_norm.weight", self.k_norm.weight


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(config.hidden_size, size, size, bias=bias)
        self.down = Linear(size, config.hidden_size, bias=bias)

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        out_TC: torch.Tensor = self.down(gated(self.gate_up(x_TC)))
        return out_TC

    def checkpoint_tensors(self, prefix: str) -> Named:
        yield from self.gate_up.parts(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj")
        yield from self.down.parts(f"{prefix}.mlp.down_proj")


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where the input holds one after the other."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
