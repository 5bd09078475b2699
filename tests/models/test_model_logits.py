"""Every family computes what transformers computes, from safetensors and from GGUF."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from penstock.checkpoint.source import Checkpoint, resolve
from penstock.models.base import CausalLM
from penstock.models.config import FrequencyFactors, read_config
from penstock.models.loader import load_model
from tests.models.tiny_models import FAMILIES, all_logits, make_model, reference_logits

Save = Callable[..., Path]

GGUF_KINDS = {"Llama": "llama", "Mixtral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Qwen3Moe": "qwen3moe"}


def load(checkpoint: Checkpoint) -> CausalLM:
    return load_model(checkpoint, read_config(checkpoint), dtype=torch.float32, device=torch.device("cpu"))


def assert_same(model: CausalLM, reference: Any, tokens: torch.Tensor) -> None:
    expected = reference_logits(reference, tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(all_logits(model, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_from_safetensors(family: str, save: Save, tokens: torch.Tensor) -> None:
    reference = make_model(family)
    assert_same(load(resolve(str(save(reference)))), reference, tokens)


def test_logits_from_shards(save: Save, tokens: torch.Tensor) -> None:
    reference = make_model("qwen3")
    folder = save(reference, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_same(load(resolve(str(folder))), reference, tokens)


def side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to queries and keys of Llama."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, family: str, model: Any) -> Path:
    kind, config = FAMILIES[family][0], model.config
    writer = gguf.GGUFWriter(path, GGUF_KINDS[kind])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if config.rope_parameters["rope_type"] == "llama3":
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    if hasattr(config, "num_local_experts"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for name, array in gguf_tensors(kind, model):
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(kind: str, model: Any) -> list[tuple[str, np.ndarray]]:
    config = model.config
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == GGUF_KINDS[kind])
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: list[tuple[str, np.ndarray]] = []
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):  # transformers keeps them stacked in memory
            prefix = name.removesuffix("gate_up_proj")
            gate, up = np.split(array, 2, axis=1)
            tensors += [
                (f"{names.get_name(prefix + part)}.weight", np.ascontiguousarray(half))
                for part, half in (("gate_proj", gate), ("up_proj", up))
            ]
            continue
        projection = name.split(".")[-2]
        if kind in ("Llama", "Mixtral") and projection in heads:
            array = side_by_side(array, heads[projection])
        suffix = name.rsplit(".", 1)[1]
        stem = name.removesuffix(".weight").removesuffix(".bias")
        suffix = suffix if suffix in ("weight", "bias") else "weight"
        tensors.append((f"{names.get_name(stem)}.{suffix}", np.ascontiguousarray(array)))
    return tensors


@pytest.mark.parametrize(
    "family",
    ["llama3-scaled", "llama-tied-biased", "qwen2", "qwen2-yarn", "qwen3", "mixtral", "qwen3-moe-normed"],
)
def test_logits_from_gguf(family: str, tmp_path: Path, tokens: torch.Tensor) -> None:
    reference = make_model(family)
    checkpoint = resolve(str(write_gguf(tmp_path / "model.gguf", family, reference)))
    assert_same(load(checkpoint), reference, tokens)


def test_gguf_keeps_llama3_scaling_as_factors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama3-scaled", make_model("llama3-scaled"))
    scaling = read_config(resolve(str(path))).rope_scaling
    assert isinstance(scaling, FrequencyFactors)
    assert min(scaling.factors) == pytest.approx(1.0)
    assert max(scaling.factors) == pytest.approx(8.0)


def test_built_in_model_agrees_with_transformers() -> None:
    checkpoint = resolve("smollm2-135m")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path.parent, gguf_file=checkpoint.path.name, dtype=torch.float32
        )
    tokens = torch.tensor([504, 3575, 282, 4649, 314, 216, 33, 28, 216, 34, 28])
    model = load(checkpoint)
    torch.testing.assert_close(all_logits(model, tokens), reference_logits(reference, tokens), atol=5e-4, rtol=1e-4)


def test_a_token_does_not_depend_on_its_batch(save: Save, tokens: torch.Tensor) -> None:
    """Experts get different numbers of tokens, which must not change what each token receives."""
    model = load(resolve(str(save(make_model("mixtral")))))
    together = all_logits(model, tokens)
    for length in (1, 2, 17):
        torch.testing.assert_close(all_logits(model, tokens[:length]), together[:length], atol=1e-5, rtol=1e-5)
