"""Channel scales and transforms for int8 weights, calibrated by running a checkpoint's own layers on some tokens.

The tokens are random, not read: no text is at hand where weights are packed, and the channels that stand out are much
the same for any. Low ids are drawn more often than high ones, because tokenizers number frequent tokens first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.kernels.native.bindings import transform_blocks
from penstock.kernels.native.decoder_reference import Floats, LayerInputs, ReferenceDecoder, Tensors, Weights, stages
from penstock.kernels.native.shape import ModelShape
from penstock.quantization.rotation import (
    SEED,
    balanced_keys,
    balanced_mlp,
    balanced_values,
    behind_norm,
    for_query_heads,
    hadamard_block,
    mixed_rows,
    scaled_rows,
)

TOKENS = 512
EXACT_NORM = "model.norm.exact"  # the final norm before it was balanced, for the rows that are not rounded
# What channels were multiplied by: LoRA adapters, which are added to the balanced matrices, are changed alike.
CHANNELS = ("qkv.channels", "key.channels", "value.channels", "gate_up.channels", "down.channels")
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
    norm, post_norm = tensors["input_layernorm.weight"], tensors["post_attention_layernorm.weight"]
    input_norm, qkv = behind_norm(norm, {name: tensors[name] for name in QKV}, inputs.qkv_TC, _transform)
    changed = {**tensors, **qkv, "input_layernorm.weight": input_norm, "qkv.channels": norm / input_norm}
    changed["key.channels"] = np.ones(tensors["self_attn.k_proj.weight"].shape[0], dtype=np.float32)
    if "self_attn.q_norm.weight" not in tensors:  # which would undo it
        query, key = [name for name in QUERY if name in tensors], [name for name in KEY if name in tensors]
        changed["key.channels"], asked, keys = balanced_keys(
            [changed[name] for name in query], [changed[name] for name in key], inputs.q_HTD, inputs.k_KTD
        )
        changed.update(zip(query, asked, strict=True))
        changed.update(zip(key, keys, strict=True))
    value, output = [name for name in VALUE if name in tensors], "self_attn.o_proj.weight"
    changed["value.channels"], rows, changed[output] = balanced_values(
        [changed[name] for name in value],
        changed[output],
        inputs.o_TC,
        head_dim,
        lambda rows: _transform(rows, head_dim),
    )
    changed.update(zip(value, rows, strict=True))

    numbers, gate_up = behind_norm(post_norm, {name: tensors[name] for name in GATE_UP}, inputs.gate_up_TC, _transform)
    changed.update(gate_up, **{"post_attention_layernorm.weight": numbers, "gate_up.channels": post_norm / numbers})
    up, down = [name for name in UP if name in tensors], "mlp.down_proj.weight"
    changed["down.channels"], rows, changed[down] = balanced_mlp(
        [changed[name] for name in up], changed[down], inputs.down_TI, _transform
    )
    changed.update(zip(up, rows, strict=True))
    return changed


@dataclass(frozen=True, slots=True)
class Channels:
    """What a layer's channels were multiplied by: `CHANNELS`."""

    qkv: Floats
    key: Floats
    value: Floats
    gate_up: Floats
    down: Floats


def channel_counts(shape: ModelShape) -> dict[str, int]:
    kv = shape.num_kv_heads * shape.head_dim
    sizes = (shape.hidden_size, kv, kv, shape.hidden_size, shape.intermediate_size)
    return dict(zip(CHANNELS, sizes, strict=True))


def balanced_adapter(name: str, a: Floats, b: Floats, of: Channels, head_dim: int) -> tuple[Floats, Floats]:
    """A and B of a LoRA module, by its name in a layer, as the balanced layer expects them: A reads what the matrix
    reads, and what B gives is added to what the matrix gives."""

    def by_head(rows: Floats) -> Floats:
        return _transform(rows, head_dim)

    match name:
        case "self_attn.q_proj":
            return _transform(a * of.qkv), (b.T / for_query_heads(of.key, len(b), head_dim)).T
        case "self_attn.k_proj":
            return _transform(a * of.qkv), scaled_rows(b, of.key)
        case "self_attn.v_proj":
            return _transform(a * of.qkv), mixed_rows(b, of.value, by_head)
        case "self_attn.o_proj":
            return by_head(a / for_query_heads(of.value, a.shape[1], head_dim)), b
        case "mlp.gate_proj":
            return _transform(a * of.gate_up), b
        case "mlp.up_proj":
            return _transform(a * of.gate_up), scaled_rows(b, of.down)
        case _:
            return _transform(a / of.down), b


def drawn_tokens(vocab: int) -> list[int]:
    """Ids whose logarithms are evenly distributed."""
    chosen = np.random.Generator(np.random.PCG64(SEED)).uniform(np.log(min(64, vocab)), np.log(vocab), TOKENS)
    return [min(int(token), vocab - 1) for token in np.exp(chosen)]


def _transform(rows: Floats, width: int | None = None) -> Floats:
    """Within runs of `width` values, the whole row if there is none given."""
    block = hadamard_block(width or rows.shape[1])
    return transform_blocks(rows, block) if block else rows
