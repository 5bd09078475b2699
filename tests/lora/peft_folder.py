"""Adapters with random weights in the layout that PEFT writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from penstock.core.model_sizes import DecoderSizes
from penstock.lora.fit import Projections, projections

PREFIX = "base_model.model."
MODEL: DecoderSizes = SimpleNamespace(
    hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, moe=None
)
BASE = projections(MODEL)


def write_adapter(
    folder: Path,
    base: Projections,
    seed: int = 0,
    rank: int = 4,
    size: float = 0.1,
    kinds: tuple[str, ...] = ("q_proj", "v_proj", "down_proj"),
    dtype: str = "float32",
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> Path:
    """`size` is the standard deviation of both matrices; `ranks` are those of modules that differ in it."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, (inputs, outputs) in base.items():
        if name.endswith(kinds):
            of_module = (ranks or {}).get(name, rank)
            for part, shape in (("A", (of_module, inputs)), ("B", (outputs, of_module))):
                values = generator.standard_normal(shape).astype(np.float32) * size
                tensors[f"{PREFIX}{name}.lora_{part}.weight"] = values.astype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(kinds), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"task_type": "CAUSAL_LM"} | config))
    return folder
