"""LoRA adapters in plain torch, token by token."""

from __future__ import annotations

import torch

from penstock.kernels.triton.lora import LowRank


def lora_reference(x: torch.Tensor, low: LowRank, slots_T: list[int], ranks: list[int]) -> torch.Tensor:
    """What the adapters add to the outputs of a projection, float32 [T, outputs]. `ranks` are those of the slots."""
    out = torch.zeros((len(x), sum(low.outputs)), dtype=torch.float32, device=x.device)
    for token, slot in enumerate(slots_T):
        if slot >= 0:
            a, b = low.matrices(slot, ranks[slot])
            halves = torch.split(b.float(), list(low.outputs))
            out[token] = torch.cat(
                [half @ (one.float() @ x[token].float()) for one, half in zip(a, halves, strict=True)]
            )
    return out
