"""The configuration that stands beside packed weights, as `penstock quantize --output` writes it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.core.errors import StartupError
from penstock.models.config import FrequencyFactors, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling

FILE = "penstock.json"
_SCALINGS = {kind.__name__: kind for kind in (LinearScaling, Llama3Scaling, YarnScaling, FrequencyFactors)}


def write_packed_config(folder: Path, config: ModelConfig) -> None:
    values = asdict(config)
    if config.rope_scaling is not None:
        values["rope_scaling"] = {"kind": type(config.rope_scaling).__name__, **asdict(config.rope_scaling)}
    (folder / FILE).write_text(json.dumps(values, indent=2) + "\n")


def read_packed_config(folder: Path) -> ModelConfig:
    path = folder / FILE
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        scaling = values.pop("rope_scaling")
        if scaling is not None:
            scaling = _SCALINGS[scaling.pop("kind")](**{name: _tuple(value) for name, value in scaling.items()})
        return ModelConfig(rope_scaling=scaling, **{name: _tuple(value) for name, value in values.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"cannot read {path}: {error!r}; write it again with `penstock quantize`") from error


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
