"""Channel scales and transforms for int8 weights, calibrated by running a checkpoint's own layers on some tokens.

The tokens are random, not read: no text is at hand where weights are packed, and the channels that stand out are much
the same for any. Low ids are drawn more often than high ones, because tokenizers number frequent tokens first.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.kernels.native.bindings import transform_blocks
from penstock.kernels.native.decoder_reference import Floats, LayerInputs, ReferenceDecoder, Tensors, Weights, stages
from penstock.quantization.rotation import (
    SEED,
    balanced_keys,
    balanced_mlp,
    balanced_values,
    behind_norm,
    hadamard_block,
)

TOKENS = 512
EXACT_NORM = "model.norm.exact"  # the final norm before it was balanced, for the rows that are not rounded
QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
QUERY = ("self_attn.q_proj.weight", "self_attn.q_proj.bias")
KEY = ("self_attn.k_proj.weight", "self_attn.k_proj.bias")
VALUE = ("self_attn.v_proj.weight", "self_attn.v_proj.bias")
UP = ("mlp.up_proj.weight", "mlp.up_proj.bias")


def balanced(weights: Weights, decoder: ReferenceDecoder, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """The same model under the same names, layer by layer, as the native kernels expect it for int8."""
    x_TC = np.empty(0, dtype=np.float32)
    for prefix, tensors in stages(weights, shapes):
        if "model.embed_tokens.weight" in tensors:
            embedding = tensors["model.embed_tokens.weight"]
            x_TC = embedding[drawn_tokens(len(embedding))]
        elif prefix:
            x_TC, inputs = decoder.layer(int(prefix.split(".")[2]), tensors, x_TC)
            tensors |= balanced_layer(tensors, inputs, decoder.shape.head_dim)
        else:
            head = {"lm_head.weight": tensors["lm_head.weight"]}
            numbers, head = behind_norm(tensors["model.norm.weight"], head, decoder.normed(x_TC), _transform)
            tensors = {"model.norm.weight": numbers, EXACT_NORM: tensors["model.norm.weight"], **head}
        yield from ((prefix + part, tensor) for part, tensor in tensors.items())


def balanced_layer(tensors: Tensors, inputs: LayerInputs, head_dim: int) -> dict[str, Floats]:
    """The tensors of a layer that change."""
    input_norm, post_norm = tensors["input_layernorm.weight"], tensors["post_attention_layernorm.weight"]
    input_norm, qkv = behind_norm(input_norm, {name: tensors[name] for name in QKV}, inputs.qkv_TC, _transform)
    changed = {**tensors, **qkv, "input_layernorm.weight": input_norm}
    if "self_attn.q_norm.weight" not in tensors:  # which would undo it
        query, key = [name for name in QUERY if name in tensors], [name for name in KEY if name in tensors]
        asked, keys = balanced_keys(
            [changed[name] for name in query], [changed[name] for name in key], inputs.q_HTD, inputs.k_KTD
        )
        changed.update(zip(query, asked, strict=True))
        changed.update(zip(key, keys, strict=True))
    value, output = [name for name in VALUE if name in tensors], "self_attn.o_proj.weight"
    rows, changed[output] = balanced_values(
        [changed[name] for name in value],
        changed[output],
        inputs.o_TC,
        head_dim,
        lambda rows: _transform(rows, head_dim),
    )
    changed.update(zip(value, rows, strict=True))

    post_norm, gate_up = behind_norm(
        post_norm, {name: tensors[name] for name in GATE_UP}, inputs.gate_up_TC, _transform
    )
    changed.update(gate_up, **{"post_attention_layernorm.weight": post_norm})
    up, down = [name for name in UP if name in tensors], "mlp.down_proj.weight"
    rows, changed[down] = balanced_mlp([changed[name] for name in up], changed[down], inputs.down_TI, _transform)
    changed.update(zip(up, rows, strict=True))
    return changed


def drawn_tokens(vocab: int) -> list[int]:
    """Ids whose logarithms are evenly distributed."""
    chosen = np.random.Generator(np.random.PCG64(SEED)).uniform(np.log(min(64, vocab)), np.log(vocab), TOKENS)
    return [min(int(token), vocab - 1) for token in np.exp(chosen)]


def _transform(rows: Floats, width: int | None = None) -> Floats:
    """Within runs of `width` values, the whole row if there is none given."""
    block = hadamard_block(width or rows.shape[1])
    return transform_blocks(rows, block) if block else rows
