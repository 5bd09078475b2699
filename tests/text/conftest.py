from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

from penstock.checkpoint.source import Checkpoint, resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.tiny_vocabulary import SENTENCEPIECE_WORDS, WriteGGUF


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Of the built-in model."""
    return load_tokenizer(resolve("smollm2-135m"))


@pytest.fixture(scope="session")
def reference() -> Any:
    """The built-in model's tokenizer as transformers reads it, with the splitting of digits that it leaves out."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    path = resolve("smollm2-135m").path
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return reference


@pytest.fixture(scope="session")
def write_gguf(tmp_path_factory: pytest.TempPathFactory) -> WriteGGUF:
    """Write a GGUF file that holds a vocabulary and nothing else, and load it."""

    def write(
        model: str,
        tokens: Sequence[str],
        types: Sequence[int],
        *,
        scores: Sequence[float] | None = None,
        merges: Sequence[str] | None = None,
        **fields: Any,
    ) -> Tokenizer:
        path: Path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(types))
        if scores is not None:
            writer.add_token_scores(list(scores))
        if merges is not None:
            writer.add_token_merges(list(merges))
        for name, value in fields.items():
            getattr(writer, f"add_{name}")(value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return load_tokenizer(Checkpoint("tiny", "gguf", path))

    return write


@pytest.fixture(scope="session")
def sentencepiece(write_gguf: WriteGGUF) -> Tokenizer:
    """Three special tokens, the 256 bytes, and a few words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCEPIECE_WORDS]
    types = [2, 3, 3, *[6] * 256, *[1] * len(SENTENCEPIECE_WORDS)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(SENTENCEPIECE_WORDS))]
    return write_gguf("llama", tokens, types, scores=scores, bos_token_id=1, eos_token_id=2)
