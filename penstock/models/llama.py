"""The dense decoder: Llama 2 and 3, SmolLM2, Mistral, Qwen2 and Qwen3, which differ in biases, norms and windows."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from penstock.kernels.base import AttentionBackend, AttentionSpec
from penstock.models.base import CausalLM, Named
from penstock.models.config import ModelConfig
from penstock.models.layers import MLP, Attention, Linear, RMSNorm
from penstock.models.rope import Rotary


class FeedForward(Protocol):
    """The second half of a layer: dense, or a choice of experts."""

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor: ...

    def checkpoint_tensors(self, prefix: str) -> Named: ...


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, mlp: FeedForward) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp

    def forward(
        self, x_TC: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], attention: AttentionBackend
    ) -> torch.Tensor:
        x_TC = x_TC + self.attention(self.attention_norm(x_TC), cos_sin, attention)
        return x_TC + self.mlp(self.mlp_norm(x_TC))

    def checkpoint_tensors(self, prefix: str) -> Named:
        yield f"{prefix}.input_layernorm.weight", self.attention_norm.weight
        yield from self.attention.checkpoint_tensors(f"{prefix}.self_attn")
        yield f"{prefix}.post_attention_layernorm.weight", self.mlp_norm.weight
        yield from self.mlp.checkpoint_tensors(prefix)


class Llama(CausalLM):
    layers: list[DecoderLayer]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            windows=config.windows,
        )
        self.rotary = Rotary(config)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(config, layer, self.feed_forward(config, layer)) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False) if not config.tie_embeddings else None

    def feed_forward(self, config: ModelConfig, layer: int) -> FeedForward:
        return MLP(config)

    def forward(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        x_TC = F.embedding(tokens_T, self.embedding)
        cos_sin = self.rotary.at(positions_T, x_TC.dtype)
        for layer in self.layers:
            x_TC = layer(x_TC, cos_sin, attention)
        out_TC: torch.Tensor = self.norm(x_TC)
        return out_TC

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden) if self.head else F.linear(hidden, self.embedding)
        return logits.float()

    def checkpoint_tensors(self) -> Named:
        yield "model.embed_tokens.weight", self.embedding
        for number, layer in enumerate(self.layers):
            yield from layer.checkpoint_tensors(f"model.layers.{number}")
        yield "model.norm.weight", self.norm.weight
        if self.head:
            yield from self.head.parts("lm_head")
