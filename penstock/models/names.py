"""Names and layouts of tensors in checkpoints, translated to those of Hugging Face's language models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from penstock.models.config import ModelConfig

Array = npt.NDArray[np.float32]

GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
NOT_WEIGHTS = {"rope_freqs.weight"}  # part of the configuration

LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
GLOBAL_NAME = re.compile(r"(\w+)\.(weight|bias)")


def layer_number(name: str) -> int:
    """Of a tensor in either naming; -1 for those of no layer. Files are sorted by letters: 1, 10, 11, 2."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1


def full_name(name: str) -> str:
    """Of a tensor of a safetensors file. Checkpoints without an output projection leave "model." out."""
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


def from_gguf(name: str, read: Callable[[], Array], config: ModelConfig) -> Iterator[tuple[str, Array]]:
    """The Hugging Face tensors that one GGUF tensor holds; a name unknown here is passed on as it is."""
    if name in NOT_WEIGHTS:
        return
    if (found := GLOBAL_NAME.fullmatch(name)) and found[1] in GLOBAL:
        yield f"{GLOBAL[found[1]]}.{found[2]}", read()
        return
    found = LAYER_NAME.fullmatch(name)
    names = IN_LAYER | MIXTRAL if config.architecture == "MixtralForCausalLM" else IN_LAYER
    if found is None or found[2] not in names:
        yield name, read()
        return
    full = f"model.layers.{found[1]}.{names[found[2]]}.{found[3]}"
    if "{}" in full:
        for expert, array in enumerate(read()):
            yield full.format(expert), array
    elif config.architecture in ("LlamaForCausalLM", "MixtralForCausalLM") and found[2] in ("attn_q", "attn_k"):
        heads = config.num_heads if found[2] == "attn_q" else config.num_kv_heads
        yield full, _halves_apart(read(), heads)
    else:
        yield full, read()


def _halves_apart(rows: Array, heads: int) -> Array:
    """In this family llama.cpp stores the values of a rotary pair side by side; here they are half a head apart."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
