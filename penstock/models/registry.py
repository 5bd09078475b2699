"""Which class runs which architecture."""

from __future__ import annotations

from penstock.models.base import CausalLM
from penstock.models.config import ModelConfig
from penstock.models.llama import Llama
from penstock.models.moe import MixtureOfExperts

MODELS: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
    "Qwen3ForCausalLM": Llama,
    "MixtralForCausalLM": MixtureOfExperts,
    "Qwen3MoeForCausalLM": MixtureOfExperts,
}


def build_model(config: ModelConfig) -> CausalLM:
    return MODELS[config.architecture](config)
