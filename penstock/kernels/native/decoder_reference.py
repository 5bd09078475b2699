"""A dense decoder in plain numpy and float32, a layer at a time: the reference of model.cpp.

Comparing with it says what the rounding of the native kernels costs; the inputs of its matrices calibrate the rounding.
Shape suffixes: T tokens, H query heads, K key/value heads, D head size, C hidden size, I intermediate size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.kernels.native.shape import ModelShape
from penstock.quantization.rotation import split_name

Floats = npt.NDArray[np.float32]
Weights = Iterator[tuple[str, Floats]]
Tensors = Mapping[str, Floats]  # of one layer, by their names within it


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The GEMM inputs of a layer: those of its four matrices, before norm weights, and queries and keys."""

    qkv_TC: Floats
    q_HTD: Floats
    k_KTD: Floats
    o_TC: Floats
    gate_up_TC: Floats
    down_TI: Floats


class ReferenceDecoder:
    def __init__(self, shape: ModelShape, inverse_frequencies: Floats, rope_magnitude: float = 1.0) -> None:
        self.shape = shape
        self._frequencies, self._magnitude = inverse_frequencies, np.float32(rope_magnitude)

    def normed(self, x_TC: Floats) -> Floats:
        squares = np.square(x_TC).mean(axis=-1, keepdims=True)
        normed: Floats = x_TC / np.sqrt(squares + np.float32(self.shape.norm_eps))
        return normed

    def layer(self, number: int, tensors: Tensors, x_TC: Floats) -> tuple[Floats, LayerInputs]:
        """The hidden states of one sequence after a layer, from those before it."""
        qkv_TC = self.normed(x_TC)
        normed = qkv_TC * tensors["input_layernorm.weight"]
        q_HTD, k_KTD, v_KTD = (self._heads(tensors, name, normed) for name in "qkv")
        o_TC = self._attention(number, q_HTD, k_KTD, v_KTD)
        x_TC = x_TC + _linear(tensors, "self_attn.o_proj", o_TC)
        gate_up_TC = self.normed(x_TC)
        given = gate_up_TC * tensors["post_attention_layernorm.weight"]
        gate_TI, up_TI = _linear(tensors, "mlp.gate_proj", given), _linear(tensors, "mlp.up_proj", given)
        down_TI = gate_TI / (1 + np.exp(-gate_TI)) * up_TI
        x_TC = x_TC + _linear(tensors, "mlp.down_proj", down_TI)
        return x_TC, LayerInputs(qkv_TC, q_HTD, k_KTD, o_TC, gate_up_TC, down_TI)

    def _attention(self, number: int, q_HTD: Floats, k_KTD: Floats, v_KTD: Floats) -> Floats:
        group, tokens = len(q_HTD) // len(k_KTD), q_HTD.shape[1]
        age = np.arange(tokens)[:, None] - np.arange(tokens)
        hidden = (age < 0) | (age >= (self.shape.windows[number] or tokens))
        scores = q_HTD @ np.repeat(k_KTD, group, axis=0).swapaxes(1, 2) * np.float32(self.shape.head_dim**-0.5)
        scores[:, hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed: Floats = (weights @ np.repeat(v_KTD, group, axis=0)).swapaxes(0, 1).reshape(tokens, -1)
        return mixed

    def _heads(self, tensors: Tensors, name: str, x_TC: Floats) -> Floats:
        heads = _linear(tensors, f"self_attn.{name}_proj", x_TC).reshape(len(x_TC), -1, self.shape.head_dim)
        if (norm := tensors.get(f"self_attn.{name}_norm.weight")) is not None:
            heads = self.normed(heads) * norm
        return (heads if name == "v" else self._rotate(heads)).swapaxes(0, 1)

    def _rotate(self, x_THD: Floats) -> Floats:
        angles = np.arange(len(x_THD), dtype=np.float32)[:, None, None] * self._frequencies
        cos, sin = np.cos(angles) * self._magnitude, np.sin(angles) * self._magnitude
        first, second = np.split(x_THD, 2, axis=-1)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _linear(tensors: Tensors, name: str, x: Floats) -> Floats:
    y: Floats = x @ tensors[f"{name}.weight"].T
    bias = tensors.get(f"{name}.bias")
    return y if bias is None else y + bias


def untied(weights: Weights) -> Weights:
    """The embedding once more, as the output projection."""
    for name, tensor in weights:
        if name != "lm_head.weight":
            yield name, tensor
        if name == "model.embed_tokens.weight":
            yield "lm_head.weight", tensor


def stages(weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, dict[str, Floats]]]:
    """The embedding, each layer with its prefix, then norm and output projection, each as soon as it is complete."""
    layers = 1 + max(_layer_number(name) for name in shapes)

    def stage_of(name: str) -> int:
        number = _layer_number(name)
        return number + 1 if number >= 0 else 0 if name == "model.embed_tokens.weight" else layers + 1

    sizes = Counter(map(stage_of, shapes))
    held: dict[int, dict[str, Floats]] = {stage: {} for stage in sizes}
    following = 0
    for name, tensor in weights:
        _, part = split_name(name)
        held[stage_of(name)][part] = tensor
        while following in held and len(held[following]) == sizes[following]:
            inside = 0 < following <= layers
            yield f"model.layers.{following - 1}." if inside else "", held.pop(following)
            following += 1


def _layer_number(name: str) -> int:
    prefix, _ = split_name(name)
    return int(prefix.split(".")[2]) if prefix else -1
