"""The tensor formats of GGUF: how a block of bytes becomes float32 values.

Each `unpack` gets a view of whole blocks and the array to fill. Shape suffixes: N blocks, G groups within a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Blocks unpacked at a time, so that the temporaries of a chunk stay in the processor's cache.
CHUNK_VALUES = 1 << 17


@dataclass(frozen=True, slots=True)
class BlockFormat:
    name: str
    values: int  # per block
    nbytes: int  # per block
    unpack: Callable[[Bytes, Floats], None]  # [N, nbytes] into [N, values]

    def dequantise(self, data: Bytes) -> Floats:
        """All values of a tensor, flat."""
        blocks = data.reshape(-1, self.nbytes)
        values = np.empty((len(blocks), self.values), dtype=np.float32)
        step = max(1, CHUNK_VALUES // self.values)
        for start in range(0, len(blocks), step):
            self.unpack(blocks[start : start + step], values[start : start + step])
        return values.reshape(-1)


def _half(blocks: Bytes, offset: int) -> Floats:
    """The float16 at a byte offset of every block, as [N, 1]."""
    return blocks[:, offset : offset + 2].view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, group: int) -> Bytes:
    """Low then high halves of each group of bytes: [N, n] into [N, 2n]."""
    grouped = np.ascontiguousarray(packed).reshape(len(packed), -1, group)
    halves = np.empty((len(packed), grouped.shape[1], 2, group), dtype=np.uint8)
    np.bitwise_and(grouped, 0x0F, out=halves[:, :, 0])
    np.right_shift(grouped, 4, out=halves[:, :, 1])
    return halves.reshape(len(packed), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """32 bits in 4 bytes, lowest first, each moved to the place of a fifth bit: [N, 4] into [N, 32]."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view(np.float32)


def _f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view(np.float16)


def _bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    np.subtract(_nibbles(blocks[:, 2:], 16), np.float32(8), out=out)
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    np.multiply(_nibbles(blocks[:, 4:], 16), _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    quants = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    np.subtract(quants, np.float32(16), out=out)
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    quants = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    np.multiply(quants, _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _scales_and_minimums(blocks: Bytes) -> tuple[Floats, Floats]:
    """Of the 8 groups of a K block, [N, 8] each: float16 factors at 0 and 2, then 8 + 8 six-bit numbers in 12 bytes.

    The first 4 of each are the low six bits of bytes 0-3 and 4-7. The other 4 have their low four bits in the
    halves of bytes 8-11 and their high two bits on top of bytes 0-3 and 4-7.
    """
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (rest & 15) | (first >> 6 << 4)), axis=1)
    minimums = np.concatenate((second & 63, (rest >> 4) | (second >> 6 << 4)), axis=1)
    return scales * _half(blocks, 0), minimums * _half(blocks, 2)


def _scale_groups(quants: Bytes, blocks: Bytes, out: Floats) -> None:
    scales, minimums = _scales_and_minimums(blocks)
    out_NG = out.reshape(len(blocks), 8, 32)
    np.multiply(quants.reshape(out_NG.shape), scales[:, :, None], out=out_NG)
    out_NG -= minimums[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    _scale_groups(_nibbles(blocks[:, 16:], 32), blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    # Bit g of byte i is the fifth bit of value i of group g.
    groups = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (blocks[:, None, 16:48] >> groups & np.uint8(1)) << np.uint8(4)
    _scale_groups(_nibbles(blocks[:, 48:], 32) | fifth.reshape(len(blocks), -1), blocks, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    # Two halves of 128 values; each byte of the high bits serves 4 values of its half, 32 apart.
    low = _nibbles(blocks[:, :128], 64)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    quants = (low | high.reshape(len(blocks), -1)).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    np.multiply(quants.reshape(-1, 16, 16), scales[:, :, None], out=out.reshape(-1, 16, 16))


# By the type number that a GGUF file stores.
FORMATS = {
    0: BlockFormat("F32", 1, 4, _f32),
    1: BlockFormat("F16", 1, 2, _f16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, _bf16),
}
