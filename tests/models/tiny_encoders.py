"""Tiny encoders of every family with random weights, as checkpoints in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "type_vocab_size": 2,
}
ENCODERS = ("Bert", "Roberta", "XLMRoberta")


def make_encoder(family: str, kind: str = "Model", **options: Any) -> Any:
    """All weights random, norms and biases too, so that none of them can be mixed up unnoticed."""
    if kind == "ForSequenceClassification":
        options = {"num_labels": 1, **options}
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    generator = torch.Generator().manual_seed(sum(f"{family}{kind}".encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "LayerNorm.weight" in name else 0.0, 0.2, generator=generator)
    return model


def say_pooling(folder: Path, kind: str = "mean_tokens", *, normalize: bool = True, **window: int) -> None:
    """As sentence-transformers writes it down."""
    steps = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}_{step}", "type": f"sentence_transformers.{step}"}
        for i, step in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{kind}": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps(window))


def hidden_states(model: Any, tokens: list[int]) -> npt.NDArray[np.float32]:
    """What transformers says, [T, D]."""
    with torch.inference_mode():
        states: npt.NDArray[np.float32] = model(torch.tensor([tokens])).last_hidden_state[0].numpy()
        return states


def cosines(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
    found: npt.NDArray[np.float32] = (one * other).sum(-1) / lengths
    return found
