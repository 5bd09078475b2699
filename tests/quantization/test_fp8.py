"""A model whose layers are quantised to fp8: which parameters change, and by how much."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from penstock.checkpoint.source import resolve
from penstock.models.config import read_config
from penstock.models.registry import build_model
from penstock.quantization.fp8 import quantize_model

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "eos_token_id": 0,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [0],
}
MATRICES = {
    *(f"layers.{layer}.attention.{name}.weight" for layer in range(2) for name in ("qkv", "out")),
    *(f"layers.0.mlp.{name}.weight" for name in ("gate_up", "down")),
    *(f"layers.1.mlp.{name}" for name in ("gate_up", "down")),
}


def test_matrices_of_layers_get_scales_and_all_else_stays(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = build_model(read_config(resolve(f"dummy:{tmp_path}")))
    generator = torch.Generator().manual_seed(1)
    original = {name: tensor.normal_(generator=generator).clone() for name, tensor in model.named_parameters()}
    quantize_model(model)
    scales = dict(model.named_buffers())
    for name, tensor in model.named_parameters():
        if name in MATRICES:
            restored = tensor.float() * scales[f"{name}_scales"][..., None]
            torch.testing.assert_close(restored, original[name], rtol=2**-4, atol=0.01)
        else:
            assert torch.equal(tensor, original[name]), name
