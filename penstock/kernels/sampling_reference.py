"""Sampling as a pure function of (seed, position, logits), in plain torch: what the fast kernels must reproduce.

The noise of a token is word `token % 4` of Philox4x32-10 with the 64-bit seed as key and (token // 4, position, 0, 0)
as counter. Word x gives u = (x // 512 + 0.5) / 2**23 and the noise -log(-log(u)); the sample is the kept token with the
largest logit / temperature + noise. Kept are the tokens whose logit reaches a threshold: the top-k-th largest, the
smallest that makes the larger ones (within top-k) sum to top-p, and max + temperature * log(min_p). Ties are kept.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def _mul_hi_lo(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of the 64-bit product of 32-bit values held in int64, which has no unsigned product."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(seed: int, c0: torch.Tensor, c1: torch.Tensor) -> torch.Tensor:
    """Ten rounds over counters (c0, c1, 0, 0). Returns int64 [..., 4] with 32-bit words."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1 = torch.broadcast_tensors(c0.long() & _MASK, c1.long() & _MASK)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(10):
        high0, low0 = _mul_hi_lo(0xD2511F53, c0)
        high1, low1 = _mul_hi_lo(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack([c0, c1, c2, c3], -1)


def gumbel_reference(seed: int, position: int, vocab: int) -> torch.Tensor:
    """Noise of every token, float64 [vocab]. With 23 bits and a half even a float32 u is exact, never 0 and never 1."""
    groups = torch.arange((vocab + 3) // 4)
    words = philox4x32(seed, groups, torch.tensor(position)).flatten()[:vocab]
    return -torch.log(-torch.log(((words >> 9).double() + 0.5) * 2.0**-23))


def sample_reference(
    logits: torch.Tensor, seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> int:
    """One row. `top_k` 0, `top_p` 1 and `min_p` 0 are off; temperature 0 is greedy."""
    values = logits.double()
    if temperature == 0:
        return int(values.argmax())
    kept = torch.ones_like(values, dtype=torch.bool)
    if 0 < top_k < values.numel():
        kept &= values >= values.topk(top_k).values[-1]
    if top_p < 1:
        ranked, order = (values / temperature).masked_fill(~kept, -torch.inf).softmax(-1).sort(descending=True)
        first = int((ranked.cumsum(-1) < top_p).sum().clamp(max=values.numel() - 1))
        kept &= values >= values[order[first]]
    if min_p > 0:
        kept &= values >= values.max() + temperature * torch.log(torch.tensor(min_p, dtype=torch.float64))
    scores = values / temperature + gumbel_reference(seed, position, values.numel()).to(values.device)
    return int(scores.masked_fill(~kept, -torch.inf).argmax())
