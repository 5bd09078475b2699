from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny_models import SIZES

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def save_model(model: Any, **options: Any) -> Path:
        model.save_pretrained(tmp_path / "model", **options)
        return tmp_path / "model"

    return save_model


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (100,), generator=torch.Generator().manual_seed(3))
