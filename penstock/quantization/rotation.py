"""Turn a model's hidden space so that no channel stands out, without changing what the model computes.

A few channels of a language model carry values a hundred times the rest, and one int8 scale per token then leaves the
rest only a few levels. An orthogonal matrix R spreads them out: RMSNorm commutes with R once its weights are
multiplied into the matrices behind it, so R is folded into the checkpoint and costs nothing at run time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

# The norm in front of each matrix that reads the hidden space.
NORM_OF = {
    "lm_head.weight": "model.norm.weight",
    "self_attn.q_proj.weight": "input_layernorm.weight",
    "self_attn.k_proj.weight": "input_layernorm.weight",
    "self_attn.v_proj.weight": "input_layernorm.weight",
    "mlp.gate_proj.weight": "post_attention_layernorm.weight",
    "mlp.up_proj.weight": "post_attention_layernorm.weight",
}


Rows = Callable[[Floats], Floats]  # a linear map of each row of a matrix; may overwrite its argument


def hadamard_block(size: int) -> int:
    """The largest power of two in a size, or 0 where it is too small to be worth transforming."""
    block = size & -size
    return min(block, 1024) if block >= 16 else 0


def hadamard(n: int) -> Floats:
    """Orthonormal and symmetric, n a power of two."""
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(n))


def hartley(n: int) -> Floats:
    """Orthonormal and symmetric for any n, and no entry much above the others: a random rotation has some."""
    angles = 2 * np.pi * np.outer(np.arange(n), np.arange(n)) / n
    return ((np.cos(angles) + np.sin(angles)) / math.sqrt(n)).astype(np.float32)


class Rotation:
    """R of size m * block: random signs, a Hadamard transform within each block, a Hartley transform across blocks."""

    def __init__(self, size: int) -> None:
        self.block = hadamard_block(size) or 1
        random = np.random.Generator(np.random.PCG64(0))
        self.signs: Floats = random.integers(0, 2, size).astype(np.float32) * 2 - 1
        self.mix = hartley(size // self.block)

    def __call__(self, rows: Floats) -> Floats:
        """x R for each row x; the plain reference of the native one."""
        spread = transform_blocks(rows * self.signs, self.block)
        blocks = spread.reshape(len(rows), len(self.mix), self.block)
        turned: Floats = np.matmul(self.mix, blocks).reshape(rows.shape)
        return turned


def transform_blocks(rows: Floats, block: int) -> Floats:
    """The Hadamard transform of each run of `block` values in each row; it is its own inverse."""
    return (rows.reshape(-1, block) @ hadamard(block)).reshape(rows.shape)


def rotated(
    weights: Iterator[tuple[str, Floats]], turn: Rows, transform: Rows, spread_heads: Rows
) -> Iterator[tuple[str, Floats]]:
    """The same model in a hidden space turned by R, under the same names; its norms have weights of one.

    `turn` multiplies rows by R. `transform` is its own inverse, and what the inputs of the down projections will have
    undergone at run time. `spread_heads`, also its own inverse, mixes the values within each head: attention is linear
    in them, so what the value projection does the output projection undoes. The head must be given as such: once the
    norm is folded in, it differs from the embedding.
    """

    def folded(part: str, weight: Floats, norm: Floats) -> Floats:
        matrix = turn(weight * norm)
        return spread_heads(np.ascontiguousarray(matrix.T)).T if part == "self_attn.v_proj.weight" else matrix

    norms: dict[str, Floats] = {}
    waiting: dict[str, list[tuple[str, Floats]]] = {}  # by the norm in front of them, which is yet to come
    for name, tensor in weights:
        layer, part = split_name(name)
        if part in NORM_OF:
            norm = layer + NORM_OF[part]
            if norm in norms:
                yield name, folded(part, tensor, norms[norm])
            else:
                waiting.setdefault(norm, []).append((name, tensor))
        elif part in NORM_OF.values():
            norms[name] = tensor
            yield name, np.ones_like(tensor)
            for reader, weight in waiting.pop(name, ()):
                yield reader, folded(split_name(reader)[1], weight, tensor)
        elif part == "model.embed_tokens.weight":
            yield name, turn(tensor.copy())
        elif part == "self_attn.o_proj.weight":
            yield name, turn(np.ascontiguousarray(spread_heads(tensor.copy()).T)).T
        elif part == "self_attn.v_proj.bias":
            yield name, spread_heads(tensor[None].copy())[0]
        elif part == "mlp.down_proj.weight":
            yield name, turn(np.ascontiguousarray(transform(tensor.copy()).T)).T
        elif part in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
            yield name, turn(tensor[None].copy())[0]
        else:
            yield name, tensor


def split_name(name: str) -> tuple[str, str]:
    """`model.layers.3.mlp.up_proj.weight` is ("model.layers.3.", "mlp.up_proj.weight"); others have no layer."""
    if not name.startswith("model.layers."):
        return "", name
    number, _, part = name.removeprefix("model.layers.").partition(".")
    return f"model.layers.{number}.", part
