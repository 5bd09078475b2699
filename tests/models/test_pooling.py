"""How a checkpoint says which of its tokens make the vector of a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.core.errors import StartupError
from penstock.models.pooling import Pooling, read_pooling
from tests.models.tiny_encoders import say_pooling


def test_as_sentence_transformers_writes_it_down(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None  # a model for text
    say_pooling(tmp_path, "lasttoken", normalize=False)
    assert read_pooling(tmp_path) == Pooling("last", normalize=False)
    say_pooling(tmp_path, "cls_token", max_seq_length=128)
    assert read_pooling(tmp_path) == Pooling("cls", normalize=True, window=128)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    assert read_pooling(tmp_path) == Pooling("mean", normalize=True, window=128)


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    say_pooling(tmp_path, "max_tokens")
    with pytest.raises(StartupError, match=r"pooling pooling_mode_max_tokens is not supported; supported: one of cls"):
        read_pooling(tmp_path)
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}, {"path": "1_Dense", "type": "x.Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(StartupError, match="Dense is not supported; supported: Transformer, Pooling, Normalize"):
        read_pooling(tmp_path)
