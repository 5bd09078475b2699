"""How a checkpoint makes one vector of a text, as sentence-transformers writes it down: modules.json names the steps,
1_Pooling/config.json says which tokens count, sentence_bert_config.json how long a text may be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.core.errors import StartupError

PoolingKind = Literal["cls", "mean", "last"]

_MODES: dict[str, PoolingKind] = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
_STEPS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    kind: PoolingKind
    normalize: bool  # whether vectors have length 1
    window: int | None = None  # tokens that the authors let a text have; None: as many as the model takes


def read_pooling(folder: Path) -> Pooling | None:
    """None: the checkpoint does not say that it is for embeddings."""
    modules = _read(folder / "modules.json", list)
    if not modules:
        return None
    steps = [(str(step.get("type", "")).rpartition(".")[2], str(step.get("path", ""))) for step in modules]
    for name, _ in steps:
        if name not in _STEPS:
            raise StartupError(f"{folder}/modules.json: {name} is not supported; supported: {', '.join(_STEPS)}")
    path = next((folder / path / "config.json" for name, path in steps if name == "Pooling"), None)
    if path is None:
        return None
    window = _read(folder / "sentence_bert_config.json", dict).get("max_seq_length")
    normalize = any(name == "Normalize" for name, _ in steps)
    return Pooling(_kind(path), normalize, window if isinstance(window, int) else None)


def _kind(path: Path) -> PoolingKind:
    config = _read(path, dict)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    named = [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []  # from version 5 on
    found = named or [_MODES.get(mode.removeprefix("pooling_mode_"), mode) for mode in modes]
    for kind in _MODES.values():
        if found == [kind]:
            return kind
    raise StartupError(f"{path}: pooling {' and '.join(found) or 'mode is missing'} is not supported; {SUPPORTED}")


SUPPORTED = "supported: one of cls, mean (mean_tokens) and last (lasttoken)"


def _read(path: Path, kind: type) -> Any:
    """What the file holds; empty where there is none."""
    if not path.is_file():
        return kind()
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(values, kind):
        raise StartupError(f"{path} must hold a JSON {'object' if kind is dict else 'list'}")
    return values
