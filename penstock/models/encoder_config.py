"""The shape of a BERT-family encoder, read from config.json, and its tensors under one set of names. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.safetensors_file import read_tensors
from penstock.checkpoint.source import Checkpoint, safetensors_files
from penstock.core.errors import StartupError
from penstock.models.pooling import Pooling, PoolingKind, read_pooling

Floats = npt.NDArray[np.float32]

FAMILIES = ("Bert", "Roberta", "XLMRoberta")
KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification")
ENCODERS = tuple(f"{family}{kind}" for family in FAMILIES for kind in KINDS)

_PREFIX = re.compile(r"^(?:bert|roberta)\.")
_UNUSED = re.compile(r"^(?:cls|lm_head|pooler)\.|\.(?:position|token_type)_ids$")
# Of the classification head, by the checkpoint's name: BERT's is a pooler and a classifier, RoBERTa's one module.
_HEAD = {
    "pooler.dense": "head.dense",
    "classifier": "head.out",
    "classifier.dense": "head.dense",
    "classifier.out_proj": "head.out",
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    max_position: int  # tokens of a text, at most
    first_position: int  # the row of the table of positions that the first token has
    types: int  # kinds of tokens: those of a second text have a kind of their own where there are two
    labels: int  # of the classification head; 0: there is none
    sigmoid: bool  # whether the head's score is made a number between 0 and 1
    pooling: PoolingKind
    normalize: bool


def encoder_architecture(checkpoint: Checkpoint) -> str | None:
    """What config.json calls it, if that is an encoder."""
    if checkpoint.kind != "folder":
        return None
    architecture = str((_read_json(checkpoint.path / "config.json").get("architectures") or ["none"])[0])
    return architecture if architecture in ENCODERS else None


def read_encoder_config(folder: Path, pooling: PoolingKind | None = None) -> EncoderConfig:
    """`pooling` as the settings want it, if they say."""
    path = folder / "config.json"
    raw = _read_json(path)
    architecture = str((raw.get("architectures") or ["none"])[0])
    if architecture not in ENCODERS:
        raise StartupError(f"{path}: architecture {architecture} is no encoder; supported: {', '.join(ENCODERS)}")
    for key, accepted in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if raw.get(key, accepted) != accepted:
            raise StartupError(f"{path}: {key} {raw[key]!r} is not supported; supported: {accepted}")
    classifies = architecture.endswith("ForSequenceClassification")
    found = Pooling("cls", normalize=False) if classifies else read_pooling(folder) or Pooling("mean", normalize=True)
    labels = _count(path, raw, "num_labels", len(raw.get("id2label") or (0, 1))) if classifies else 0
    if labels > 1:
        raise StartupError(f"{path}: {labels} labels are not supported; supported: cross-encoders, which have one")
    offset = 0 if architecture.startswith("Bert") else int(raw.get("pad_token_id", 1)) + 1
    positions = _count(path, raw, "max_position_embeddings") - offset
    hidden, heads = _count(path, raw, "hidden_size"), _count(path, raw, "num_attention_heads")
    if hidden % heads:
        raise StartupError(f"{path}: {heads} attention heads cannot share a hidden_size of {hidden}")
    return EncoderConfig(
        architecture=architecture,
        vocab_size=_count(path, raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(path, raw, "intermediate_size"),
        num_layers=_count(path, raw, "num_hidden_layers"),
        num_heads=heads,
        norm_eps=float(raw.get("layer_norm_eps", 1e-12)),
        max_position=min(found.window or positions, positions),
        first_position=offset,
        types=_count(path, raw, "type_vocab_size", 2),
        labels=labels,
        sigmoid=labels == 1 and not _identity(raw),
        pooling="cls" if classifies else pooling or found.kind,
        normalize=found.normalize,
    )


def _identity(raw: dict[str, Any]) -> bool:
    """Whether sentence-transformers leaves the scores of a cross-encoder as they are."""
    named = (raw.get("sentence_transformers") or {}).get(
        "activation_fn", raw.get("sbert_ce_default_activation_function")
    )
    return str(named or "").endswith("Identity")


def encoder_weights(folder: Path, config: EncoderConfig) -> Iterator[tuple[str, Floats]]:
    """Every tensor that the model computes with: `embeddings.…`, `encoder.layer.N.…`, `head.dense.…`, `head.out.…`."""

    def wanted(stored: str) -> bool:
        name = _PREFIX.sub("", stored)
        return bool(config.labels and name.rpartition(".")[0] in _HEAD) or not _UNUSED.search(name)

    for path in safetensors_files(folder):
        try:
            for stored, tensor in read_tensors(path, wanted=wanted):
                name = _PREFIX.sub("", stored)
                module, _, part = name.rpartition(".")
                if module in _HEAD:
                    yield f"{_HEAD[module]}.{part}", tensor
                elif name == "embeddings.position_embeddings.weight":
                    yield name, tensor[config.first_position :]
                else:
                    yield name, tensor
        except (OSError, ValueError) as error:
            raise StartupError(f"cannot read {path}: {error}. Download it again.") from error


def tensor_shapes(config: EncoderConfig, positions: int) -> dict[str, tuple[int, ...]]:
    """Of all tensors that `encoder_weights` gives."""
    hidden, inner = config.hidden_size, config.intermediate_size

    def pair(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}

    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (positions, hidden),
        "embeddings.token_type_embeddings.weight": (config.types, hidden),
        **norm("embeddings.LayerNorm"),
    }
    for number in range(config.num_layers):
        layer = f"encoder.layer.{number}"
        for name in ("query", "key", "value"):
            shapes |= pair(f"{layer}.attention.self.{name}", hidden, hidden)
        shapes |= pair(f"{layer}.attention.output.dense", hidden, hidden) | norm(f"{layer}.attention.output.LayerNorm")
        shapes |= pair(f"{layer}.intermediate.dense", inner, hidden)
        shapes |= pair(f"{layer}.output.dense", hidden, inner) | norm(f"{layer}.output.LayerNorm")
    if config.labels:
        shapes |= pair("head.dense", hidden, hidden) | pair("head.out", config.labels, hidden)
    return shapes


def _count(path: Path, raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StartupError(f"{path}: {key} must be a positive whole number, not {value!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return values
