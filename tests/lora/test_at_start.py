"""Adapters of a folder that several models share, as they are found when a server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.checkpoint.source import resolve
from penstock.cli.served_adapters import adapters_at_start
from penstock.lora.fit import projections
from penstock.models.config import read_config
from penstock.settings import settings_from_mapping
from tests.lora.peft_folder import write_adapter


async def test_only_what_fits_no_model_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = projections(read_config(resolve("smollm2-135m")))
    write_adapter(tmp_path / "good", base, 1, rank=8)
    write_adapter(tmp_path / "large", base, 2, rank=65)
    models = {"chat": {"model": "smollm2-135m"}, "encoder": {"model": "all-minilm-l6-v2"}}
    found = await adapters_at_start(settings_from_mapping({"models": models, "adapter_folder": str(tmp_path)}))
    assert [(adapter.name, adapter.model) for adapter in found] == [("good", "chat")]
    (warning,) = [record.getMessage() for record in caplog.records if "is not served" in record.getMessage()]
    assert warning.startswith("adapter_folder: large is not served: ")
