"""Random models of every dense architecture in transformers, the same in native memory, and steps over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import transformers

from penstock.kernels.native.bindings import KVFormat, Scheme
from penstock.kernels.native.model import NativeModel, NativeRows, NativeStep
from penstock.models.config import ModelConfig
from penstock.models.frequencies import inverse_frequencies
from penstock.quantization.scheme import int4_round_trip

BLOCK = 16
VOCAB = 211
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_biases": lambda: transformers.LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=40, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**{**SIZES, "num_attention_heads": 4}, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
}


def reference(kind: str, scheme: Scheme = "none") -> Any:
    """A random model whose weights the scheme can nearly hold: mostly activations and the cache are rounded."""
    torch.manual_seed(3)
    config = KINDS[kind]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.05
            parameter.copy_((parameter + noise).bfloat16().float())
            if scheme == "int4" and parameter.ndim == 2 and len(parameter) != VOCAB:
                parameter.copy_(torch.from_numpy(int4_round_trip(parameter.numpy())))
    return model


def shape(model: Any) -> ModelConfig:
    c, names = model.config, set(model.state_dict())
    return ModelConfig(
        architecture=type(model).__name__,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=32,
        norm_eps=c.rms_norm_eps,
        rope_theta=float(c.rope_parameters["rope_theta"]),
        rope_scaling=None,
        max_position=2048,
        tie_embeddings=c.tie_word_embeddings,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in names,
        output_bias="model.layers.0.self_attn.o_proj.bias" in names,
        mlp_bias="model.layers.0.mlp.up_proj.bias" in names,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in names,
        windows=(getattr(c, "sliding_window", None) or 0,) * c.num_hidden_layers,
        moe=None,
        eos_ids=(),
        bos_id=None,
        dtype="float32",
    )


def empty(config: ModelConfig, scheme: Scheme = "none", threads: int = 2, kv: KVFormat = "bf16") -> NativeModel:
    frequencies = inverse_frequencies(config)
    return NativeModel(config, frequencies, scheme=scheme, block_size=BLOCK, num_blocks=128, threads=threads, kv=kv)


def arrays_of(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    return ((name, tensor.numpy()) for name, tensor in model.state_dict().items())


def build(model: Any, scheme: Scheme = "none", threads: int = 2, kv: KVFormat = "bf16") -> NativeModel:
    native_model = empty(shape(model), scheme, threads, kv)
    native_model.load(arrays_of(model))
    return native_model


Given = tuple[NativeStep, NativeRows]


def logits_of(runner: NativeModel, given: Given) -> np.ndarray:
    """To keep: a model writes the logits of its next call into the same memory."""
    return runner.forward(*given)[0].copy()


def expected(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(torch.tensor(tokens)[None]).logits[0])


def step(parts: list[tuple[np.ndarray, int, list[int]]], last_only: bool = False) -> Given:
    """From (new tokens, their first position, block table) of each sequence."""
    counts = [len(tokens) for tokens, _, _ in parts]
    width = max(len(table) for _, _, table in parts)
    tables = np.array([table + [0] * (width - len(table)) for _, _, table in parts], dtype=np.int32)
    native_step = NativeStep(
        tokens=np.concatenate([tokens for tokens, _, _ in parts]).tolist(),
        rows=range(len(parts)),
        starts=[first for _, first, _ in parts],
        counts=counts,
        logit_rows=[end - 1 for end in accumulate(counts)] if last_only else range(sum(counts)),
    )
    return native_step, NativeRows(tables, np.zeros(len(parts), dtype=np.int32))
