"""Decoders whose MLP is a choice of experts: Mixtral and Qwen3-MoE.

Shape suffixes as in layers.py; E experts, A choices per token, P = T * A pairs of a token and a chosen expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.base import Named
from penstock.models.config import ModelConfig, MoEConfig
from penstock.models.layers import MLP, Linear, gated
from penstock.models.llama import FeedForward, Llama


class Experts(nn.Module):
    def __init__(self, moe: MoEConfig, hidden_size: int, mixtral_names: bool) -> None:
        super().__init__()
        size, experts = moe.intermediate_size, moe.num_experts
        self.moe = moe
        self.mixtral_names = mixtral_names
        self.router = Linear(hidden_size, experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * size, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(experts, hidden_size, size), requires_grad=False)

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        weights_TA, experts_TA = self.choose(x_TC)
        order_P = experts_TA.flatten().argsort(stable=True)
        counts = experts_TA.flatten().bincount(minlength=self.moe.num_experts).tolist()
        out_PC = torch.empty(len(order_P), x_TC.shape[1], dtype=x_TC.dtype, device=x_TC.device)
        for expert, pairs in enumerate(torch.split(order_P, counts)):
            if len(pairs):
                x = x_TC[pairs // self.moe.experts_per_token]
                out_PC[pairs] = F.linear(gated(F.linear(x, self.gate_up[expert])), self.down[expert])
        # Summed in the order of choice, so that a token's result does not depend on its neighbours.
        return (weights_TA[:, :, None] * out_PC.view(*experts_TA.shape, -1)).sum(dim=1)

    def choose(self, x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores_TE = self.router(x_TC).float().softmax(dim=-1)
        weights_TA, experts_TA = scores_TE.topk(self.moe.experts_per_token, dim=-1)
        if self.moe.norm_topk_prob:
            weights_TA = weights_TA / weights_TA.sum(dim=-1, keepdim=True)
        return weights_TA.to(x_TC.dtype), experts_TA

    def checkpoint_tensors(self, prefix: str) -> Named:
        block, (gate, up, down) = ("mlp", ("gate_proj", "up_proj", "down_proj"))
        if self.mixtral_names:
            block, (gate, up, down) = ("block_sparse_moe", ("w1", "w3", "w2"))
        yield from self.router.parts(f"{prefix}.{block}.gate")
        for expert in range(self.moe.num_experts):
            name = f"{prefix}.{block}.experts.{expert}"
            gate_weight, up_weight = self.gate_up[expert].chunk(2)
            yield f"{name}.{gate}.weight", gate_weight
            yield f"{name}.{up}.weight", up_weight
            yield f"{name}.{down}.weight", self.down[expert]


class MixtureOfExperts(Llama):
    def feed_forward(self, config: ModelConfig, layer: int) -> FeedForward:
        assert config.moe is not None
        if layer not in config.moe.layers:
            return MLP(config)
        return Experts(config.moe, config.hidden_size, mixtral_names=config.architecture == "MixtralForCausalLM")
