"""Make weights and activations easy to round to int8, without changing what the model computes.

A few channels of a language model carry values a hundred times the rest, and one int8 scale per token then leaves the
rest only a few levels. Two things are done to the input x of a matrix W, and undone in its columns:

- Each channel is multiplied by a number. The rounding of W and that of x each add an error in proportion to |W| |x|
  (norms over channels), which is least where channel j's number is (|W_j| / |x_j|)^(1/2): then a channel that is large
  in x and hardly read by W takes no precision from the others.
- An orthogonal Hadamard transform, with random signs, spreads what is left over blocks of channels.

The numbers are the weights of the norm in front, or are multiplied into the rows of the value and up projections, so
they cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Rows = Callable[[Floats], Floats]  # a linear map of each row of a matrix, its own inverse; may overwrite its argument

SEED = 1  # of signs and tokens: the best of eight by `penstock quantize --check` on the built-in model
LEAST = np.float32(
    1e-6
)  # of a channel's energy, relative to the mean: also one that is never used gets a finite number


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


def transform_blocks(rows: Floats, block: int) -> Floats:
    """The Hadamard transform of each run of `block` values in each row; it is its own inverse."""
    return (rows.reshape(-1, block) @ hadamard(block)).reshape(rows.shape)


def balance(matrices: Sequence[Floats], inputs: Floats) -> Floats:
    """What to multiply each channel by that these matrices read; `inputs` are examples, a row each."""
    read = np.square(inputs).mean(axis=0)
    weight = np.sum([np.square(matrix).sum(axis=0) for matrix in matrices], axis=0)
    numbers = ((weight + LEAST * weight.mean()) / (read + LEAST * read.mean())) ** 0.25
    signs = np.random.Generator(np.random.PCG64(SEED)).integers(0, 2, len(numbers)) * 2 - 1
    balanced: Floats = (signs * numbers / numbers.mean()).astype(np.float32)
    return balanced


def behind_norm(
    norm: Floats, matrices: Mapping[str, Floats], inputs: Floats, transform: Rows
) -> tuple[Floats, dict[str, Floats]]:
    """The weights of a norm and the matrices that read it; `inputs` are what the norm gives before its weights."""
    folded = {name: matrix * norm for name, matrix in matrices.items()}
    numbers = balance(list(folded.values()), inputs)
    return numbers, {name: transform(np.divide(matrix, numbers, out=matrix)) for name, matrix in folded.items()}


def scaled_rows(rows: Floats, numbers: Floats) -> Floats:
    return (rows.T * numbers).T


def mixed_rows(rows: Floats, numbers: Floats, transform: Rows) -> Floats:
    """What comes out of a value projection with these rows, multiplied by these numbers and transformed."""
    scaled = scaled_rows(rows, numbers).reshape(len(rows), -1)
    return transform(np.ascontiguousarray(scaled.T)).T.reshape(rows.shape)


def for_query_heads(numbers: Floats, width: int, head_dim: int) -> Floats:
    """Numbers of the channels of key/value heads, for those of all the query heads that read them."""
    return np.repeat(numbers.reshape(-1, 1, head_dim), width // len(numbers), axis=1).reshape(-1)


def balanced_mlp(
    up: Sequence[Floats], down: Floats, inputs: Floats, transform: Rows
) -> tuple[Floats, list[Floats], Floats]:
    """Numbers, rows (weight, and bias where there is one) of the up projection, and the down projection; `inputs` are
    its."""
    numbers = balance([down], inputs)
    return numbers, [scaled_rows(rows, numbers) for rows in up], transform(down / numbers)


def balanced_keys(
    query: Sequence[Floats], key: Sequence[Floats], q_HTD: Floats, k_KTD: Floats
) -> tuple[Floats, list[Floats], list[Floats]]:
    """Numbers, and rows (weight, and bias where there is one) of the query and key projections, by examples of what
    they give.

    Rotary embedding mixes the values of a pair, half a head apart, so they share a number.
    """
    kv_heads, _, dim = k_KTD.shape

    def by_pair(heads: Floats) -> Floats:
        """What belongs to the same pair of keys in the same column."""
        return heads.reshape(kv_heads, -1, dim // 2).swapaxes(0, 1).reshape(-1, kv_heads * dim // 2)

    pairs = balance([by_pair(q_HTD)], by_pair(k_KTD)).reshape(kv_heads, 1, dim // 2)
    numbers = np.tile(pairs, (1, 2, 1)).reshape(-1)
    asked = for_query_heads(numbers, len(q_HTD) * dim, dim)
    return numbers, [(rows.T / asked).T for rows in query], [scaled_rows(rows, numbers) for rows in key]


def balanced_values(
    value: Sequence[Floats], output: Floats, inputs: Floats, head_dim: int, transform: Rows
) -> tuple[Floats, list[Floats], Floats]:
    """Numbers, rows (weight, and bias where there is one) of the value projection, and the output projection; `inputs`
    are its.

    Attention is linear in the values, so what is done to those of a head can be undone behind all the query heads that
    read them.
    """
    width = len(value[0])

    def by_value(rows: Floats) -> Floats:
        """What belongs to the same value in the same column."""
        heads = rows.reshape(len(rows), width // head_dim, -1, head_dim)
        return heads.swapaxes(1, 2).reshape(-1, width)

    numbers = balance([by_value(output)], by_value(inputs))
    mixed = [mixed_rows(rows, numbers, transform) for rows in value]
    return numbers, mixed, transform(output / for_query_heads(numbers, output.shape[1], head_dim))


def split_name(name: str) -> tuple[str, str]:
    """`model.layers.3.mlp.up_proj.weight` is ("model.layers.3.", "mlp.up_proj.weight"); others have no layer."""
    if not name.startswith("model.layers."):
        return "", name
    number, _, part = name.removeprefix("model.layers.").partition(".")
    return f"model.layers.{number}.", part
