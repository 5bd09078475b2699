"""The interface of a causal language model, as the executor and the loader use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import nn

from penstock.kernels.base import AttentionBackend, AttentionSpec

Named = Iterator[tuple[str, torch.Tensor]]


class CausalLM(nn.Module, ABC):
    """Tokens of any number of sequences, one after the other, to the hidden states that predict what follows each."""

    attention_spec: AttentionSpec

    @abstractmethod
    def forward(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """Hidden states, [T, hidden size]."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 over the vocabulary, for any number of leading dimensions."""

    @abstractmethod
    def checkpoint_tensors(self) -> Named:
        """Each tensor of a checkpoint by its Hugging Face name, as the (part of a) parameter that it fills."""
