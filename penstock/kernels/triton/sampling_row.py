"""What a row asks of the sampling kernels, as they read it, and the noise that its tokens are drawn with."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

IN_PROMPT = 0x4000  # in the table of seen tokens; the bits below count how often a token was sampled
MOST_COUNTED = tl.constexpr(IN_PROMPT - 1)

# The parameters of a row: 32-bit words in this order.
ROW = np.dtype(
    [
        ("needs", "i4"),
        ("temperature", "f4"),
        ("top_k", "i4"),  # 0: off
        ("top_p", "f4"),  # 1: off
        ("min_p", "f4"),  # 0: off
        ("seed", "u8"),
        ("repetition_penalty", "f4"),
        ("presence_penalty", "f4"),
        ("frequency_penalty", "f4"),
        ("min_end", "i4"),  # stop tokens may not stand at positions before this one
        ("alternatives", "i4"),  # to the token, with their log-probabilities
    ]
)
WORDS = tl.constexpr(ROW.itemsize // 4)
TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED = [tl.constexpr(i) for i in range(1, 6)]
REPETITION, PRESENCE, FREQUENCY, MIN_END, ALTERNATIVES = [tl.constexpr(i) for i in range(7, 12)]

# Bits of `needs`, as in `Needs` of runner/rows.py.
RANDOM, FILTER, PENALTIES, BIAS, MIN_TOKENS, LOGPROBS = [tl.constexpr(1 << i) for i in range(6)]
GRAMMAR = tl.constexpr(128)
ADJUST = tl.constexpr(4 + 8 + 16 + 128)  # whatever changes logits before temperature does

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
NOT_A_NUMBER, UNDECIDED = tl.constexpr(-2), tl.constexpr(-3)  # in place of a token, as in engine/executor.py
NO_MASK, CHECKED = -1, -2  # in place of the number of a mask: any token; any, of a sequence that has a grammar
LOWEST = tl.constexpr(-2147483648)


@triton.jit
def ordered(x):
    """int32 whose signed order is that of the float32. Both zeros have the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def read_float(words, at):
    return tl.load(words + at).to(tl.float32, bitcast=True)


@triton.jit
def read_seed(words):
    low, high = tl.load(words + SEED).to(tl.int64), tl.load(words + SEED + 1).to(tl.int64)
    return (high << 32) | (low & 0xFFFFFFFF)


@triton.jit
def _gumbel(random):
    uniform = ((random >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
    return -tl.log(-tl.log(uniform))


@triton.jit
def noise(seed, position, base, COUNT: tl.constexpr):
    """Of COUNT tokens from `base` on: each counter gives four tokens theirs."""
    groups = (base // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    zeros = groups * 0
    a, b, c, d = tl.philox(seed, groups, zeros + position, zeros, zeros)
    return _gumbel(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))


@triton.jit
def noise_of(seed, position, tokens):
    """Of any tokens; the same numbers."""
    groups = (tokens // 4).to(tl.uint32)
    zeros = groups * 0
    a, b, c, d = tl.philox(seed, groups, zeros + position, zeros, zeros)
    word = tokens % 4
    return _gumbel(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)))


@triton.jit
def bits_of(words, tokens, real):
    return (tl.load(words + tokens // 32, mask=real, other=0) >> (tokens % 32)) & 1


@triton.jit
def weights(x, peak, inverse):
    return tl.where(x > float("-inf"), tl.exp((x - peak) * inverse), 0.0)


@triton.jit
def mass_of(x, peak, inverse):
    return tl.sum(weights(x, tl.where(peak > float("-inf"), peak, 0.0), inverse), 0)
