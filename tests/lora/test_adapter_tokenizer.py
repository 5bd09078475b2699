"""A tokenizer beside an adapter: the model's passes, with whatever differs but its tokens; another is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest
from penstock.lora.tokenizer import check_tokenizer

KNOWN = {"a": 0, "b": 1, "ab": 2, "<|end|>": 3}


def write(folder: Path, vocab: Any, added: dict[str, int] | None = None, pad: Any = None) -> Path:
    tokens = [{"id": at, "content": token, "special": True} for token, at in (added or {"<|end|>": 3}).items()]
    saved = {"model": {"type": "BPE", "vocab": vocab, "merges": ["a b"]}, "added_tokens": tokens, "padding": None}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad, "chat_template": "{{ messages }}"}))
    return folder


@pytest.mark.parametrize("pad", ["<|pad|>", {"content": "<|pad|>", "lstrip": False}])
def test_the_models_own_passes(tmp_path: Path, pad: Any) -> None:
    check_tokenizer(tmp_path, dict)  # there is none beside the adapter
    check_tokenizer(write(tmp_path, {"a": 0, "b": 1, "ab": 2}), lambda: KNOWN)
    check_tokenizer(write(tmp_path, [["a", 0.0], ["b", -1.5], ["ab", -2]]), lambda: KNOWN)
    check_tokenizer(write(tmp_path, {"a": 0}, {"<|end|>": 3, "<|pad|>": 4}, pad), lambda: KNOWN)


@pytest.mark.parametrize(
    ("vocab", "added", "pad", "words"),
    [
        ({"a": 1, "b": 0}, None, None, "2 tokens differ, and 'b', which is 0, is 1 in the model's"),
        ({"a": 0}, {"<tool>": 4, "<|pad|>": 5}, "<|pad|>", "1 tokens differ, and '<tool>', which is 4, is not in"),
        ([["b", 0.0]], None, None, "'b', which is 0, is 1 in the model's"),
        ({"a": 0}, {"<|end|>": 4}, "<|end|>", "'<|end|>', which is 4, is 3 in the model's"),
        (7, None, None, "tokenizer.json is no tokenizer of Hugging Face: Expected `object | array`"),
    ],
)
def test_another_is_refused(tmp_path: Path, vocab: Any, added: Any, pad: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as caught:
        check_tokenizer(write(tmp_path, vocab, added, pad), lambda: KNOWN)
    assert caught.value.code == "invalid_adapter"
