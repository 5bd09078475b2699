"""A BERT-family encoder in plain torch: the reference of the native one, and what runs on a GPU.

T tokens, D hidden size, N sequences, H heads, L tokens of the longest sequence of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.core.errors import StartupError
from penstock.models.encoder_config import EncoderConfig, encoder_weights, tensor_shapes

Ints: TypeAlias = npt.NDArray[np.int64]


def load_encoder(folder: Path, config: EncoderConfig, dtype: str, device: str) -> Encoder:
    tensors = {
        name: torch.from_numpy(array).to(device, getattr(torch, dtype))
        for name, array in encoder_weights(folder, config)
    }
    return Encoder(config, tensors)


class Encoder:
    device = "plain torch"

    def __init__(self, config: EncoderConfig, tensors: dict[str, torch.Tensor]) -> None:
        """`tensors` by the names of `encoder_weights`."""
        self.config = config
        places = tensors.get("embeddings.position_embeddings.weight", torch.empty(0))
        for name, shape in tensor_shapes(config, len(places)).items():
            found = tuple(tensors[name].shape) if name in tensors else "nothing"
            if found != shape:
                raise StartupError(f"tensor {name} should have shape {shape}, and the checkpoint has {found}")
        self._tensors = tensors
        self._device = places.device

    @torch.inference_mode()
    def encode(
        self, tokens: Sequence[int], counts: Sequence[int], seconds: Sequence[int] = ()
    ) -> npt.NDArray[np.float32]:
        """Without padding, except for attention among sequences of similar length."""
        counts_N = np.array(counts)
        starts_N = counts_N.cumsum() - counts_N
        positions_T = np.arange(len(tokens)) - starts_N.repeat(counts_N)
        types_T = positions_T >= np.array(seconds or counts).repeat(counts_N)
        if self.config.types == 1:
            types_T[:] = False
        groups = [_Group.of(starts_N[i], counts_N[i], self._device) for i in _of_similar_length(counts_N)]
        x_TD = self._embedded("word", np.array(tokens)) + self._embedded("position", positions_T)
        x_TD = self._norm(x_TD + self._embedded("token_type", types_T), "embeddings.LayerNorm")
        for number in range(self.config.num_layers):
            x_TD = self._layer(x_TD, f"encoder.layer.{number}", groups)
        pooled_ND = self._pooled(x_TD, starts_N, counts_N)
        if self.config.labels:
            pooled_ND = self._linear(torch.tanh(self._linear(pooled_ND, "head.dense")), "head.out")
        vectors: npt.NDArray[np.float32] = pooled_ND.float().cpu().numpy()
        return vectors

    def _embedded(self, kind: str, ids_T: Ints) -> torch.Tensor:
        ids = torch.from_numpy(ids_T.astype(np.int64)).to(self._device)
        return F.embedding(ids, self._tensors[f"embeddings.{kind}_embeddings.weight"])

    def _layer(self, x_TD: torch.Tensor, name: str, groups: Sequence[_Group]) -> torch.Tensor:
        parts = [self._linear(x_TD, f"{name}.attention.self.{part}") for part in ("query", "key", "value")]
        q, k, v = (x.view(len(x), self.config.num_heads, -1) for x in parts)
        mixed_TD = torch.empty_like(x_TD)
        for group in groups:
            group.attend(q, k, v, mixed_TD)
        x_TD = self._norm(
            x_TD + self._linear(mixed_TD, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm"
        )
        inner = F.gelu(self._linear(x_TD, f"{name}.intermediate.dense"))
        return self._norm(x_TD + self._linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def _pooled(self, x_TD: torch.Tensor, starts_N: Ints, counts_N: Ints) -> torch.Tensor:
        if self.config.pooling == "mean":
            lengths = torch.from_numpy(counts_N).to(self._device)
            return torch.segment_reduce(x_TD.float(), "mean", lengths=lengths).to(x_TD.dtype)
        chosen_N = starts_N if self.config.pooling == "cls" else starts_N + counts_N - 1
        return x_TD[torch.from_numpy(chosen_N).to(self._device)]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.config.norm_eps)


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that attend in one call, padded to the longest of them, L tokens."""

    rows_NL: torch.Tensor  # which token of the step; any, where there is none
    mask: torch.Tensor | None  # of the keys that there are; None: all
    inside: torch.Tensor  # of all N * L places those with a token
    tokens: torch.Tensor  # and which

    @classmethod
    def of(cls, starts_N: Ints, counts_N: Ints, device: torch.device) -> _Group:
        places_L = np.arange(counts_N.max())
        there_NL = places_L < counts_N[:, None]
        rows_NL = np.where(there_NL, starts_N[:, None] + places_L, 0)
        rows, there, inside, tokens = (
            torch.from_numpy(array).to(device)
            for array in (rows_NL, there_NL, np.flatnonzero(there_NL), rows_NL[there_NL])
        )
        return cls(rows, None if there_NL.all() else there[:, None, None, :], inside, tokens)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixed_TD: torch.Tensor) -> None:
        """[T, H, head size] each. Writes the rows of its tokens."""
        q, k, v = (x[self.rows_NL].transpose(1, 2) for x in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2)
        mixed_TD[self.tokens] = found.reshape(-1, mixed_TD.shape[1])[self.inside]


def _of_similar_length(counts_N: Ints) -> list[Ints]:
    """Which sequences to pad together: those of no more than twice the length of others."""
    sizes_N = np.frexp(counts_N)[1]
    return [np.flatnonzero(sizes_N == size) for size in np.unique(sizes_N)]
