"""A BERT-family encoder in plain torch: the reference of the native one, and what runs on a GPU.

T tokens, D hidden size, N sequences, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.core.errors import StartupError
from penstock.models.encoder_config import EncoderConfig, encoder_weights, tensor_shapes


def load_encoder(folder: Path, config: EncoderConfig, dtype: str, device: str) -> Encoder:
    tensors = {
        name: torch.from_numpy(array).to(device, getattr(torch, dtype))
        for name, array in encoder_weights(folder, config)
    }
    return Encoder(config, tensors)


class Encoder:
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
        """Sequences are computed without padding, each with attention of its own."""
        counts_N = torch.tensor(counts, device=self._device)
        ends = counts_N.cumsum(0)
        positions_T = torch.cat([torch.arange(count, device=self._device) for count in counts])
        x_TD = F.embedding(
            torch.tensor(tokens, device=self._device), self._tensors["embeddings.word_embeddings.weight"]
        )
        x_TD = x_TD + self._tensors["embeddings.position_embeddings.weight"][positions_T]
        starts_T = torch.repeat_interleave(torch.tensor(seconds or counts, device=self._device), counts_N)
        types_T = (positions_T >= starts_T).long() if self.config.types > 1 else torch.zeros_like(positions_T)
        x_TD = x_TD + self._tensors["embeddings.token_type_embeddings.weight"][types_T]
        x_TD = self._norm(x_TD, "embeddings.LayerNorm")
        for number in range(self.config.num_layers):
            x_TD = self._layer(x_TD, f"encoder.layer.{number}", list(counts))
        pooled_ND = self._pooled(x_TD, list(counts), ends)
        if self.config.labels:
            pooled_ND = self._linear(torch.tanh(self._linear(pooled_ND, "head.dense")), "head.out")
        vectors: npt.NDArray[np.float32] = pooled_ND.float().cpu().numpy()
        return vectors

    def _layer(self, x_TD: torch.Tensor, name: str, counts: list[int]) -> torch.Tensor:
        q, k, v = (self._linear(x_TD, f"{name}.attention.self.{part}") for part in ("query", "key", "value"))
        parts = zip(q.split(counts), k.split(counts), v.split(counts), strict=True)
        mixed_TD = torch.cat([self._attend(*part) for part in parts])
        x_TD = self._norm(
            x_TD + self._linear(mixed_TD, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm"
        )
        inner = F.gelu(self._linear(x_TD, f"{name}.intermediate.dense"))
        return self._norm(x_TD + self._linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def _attend(self, q_TD: torch.Tensor, k_TD: torch.Tensor, v_TD: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(len(x), self.config.num_heads, -1).transpose(0, 1)[None] for x in (q_TD, k_TD, v_TD))
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(q_TD.shape)

    def _pooled(self, x_TD: torch.Tensor, counts: list[int], ends: torch.Tensor) -> torch.Tensor:
        if self.config.pooling == "mean":
            return torch.stack([part.float().mean(0) for part in x_TD.split(counts)]).to(x_TD.dtype)
        if self.config.pooling == "last":
            return x_TD[ends - 1]
        return x_TD[torch.cat([ends.new_zeros(1), ends[:-1]])]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.config.norm_eps)
