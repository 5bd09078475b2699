"""Tiny models of every family with random weights, and an attention that needs no cache."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers

from penstock.kernels.base import AttentionBatch, AttentionSpec
from penstock.models.base import CausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / heads
    "max_position_embeddings": 256,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3-scaled": ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, **LLAMA3}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"head_dim": 8, "rope_parameters": YARN}),
    "qwen2-window": ("Qwen2", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen3-moe": (
        "Qwen3Moe",
        {**EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-normed": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True}),
}


def make_model(family: str) -> Any:
    """All weights random, norms and biases too, so that none of them can be mixed up unnoticed."""
    kind, options = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(sum(family.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model


class WholePrompt:
    """Attention over one sequence that is computed in a single step."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def plan(self, batch: AttentionBatch) -> None:
        raise AssertionError("one sequence in one step needs no plan")

    def run(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        assert q_THD.shape[1:] == (self.spec.num_heads, self.spec.head_dim)
        assert k_TKD.shape == v_TKD.shape == (len(q_THD), self.spec.num_kv_heads, self.spec.head_dim)
        rows = torch.arange(len(q_THD))
        distance = rows[:, None] - rows[None, :]
        mask = (distance >= 0) & (distance < (self.spec.windows[layer] or len(rows)))
        out = F.scaled_dot_product_attention(
            q_THD.transpose(0, 1),
            k_TKD.transpose(0, 1),
            v_TKD.transpose(0, 1),
            attn_mask=mask,
            scale=self.spec.scale,
            enable_gqa=True,
        )
        return out.transpose(0, 1)


def all_logits(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        hidden = model.forward(tokens, torch.arange(len(tokens)), WholePrompt(model.attention_spec))
        return model.logits(hidden)


def reference_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens[None]).logits[0]
        return logits
