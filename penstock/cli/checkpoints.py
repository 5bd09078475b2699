"""What a gateway reads of a model's checkpoint, whoever computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.source import HUB_ID, Checkpoint, resolve
from penstock.core.errors import StartupError

if TYPE_CHECKING:
    from penstock.core.engine import EngineInfo
    from penstock.fleet.settings import ModelConfig
    from penstock.text.tokenizer import Tokenizer


def label_of(name: str, config: ModelConfig) -> str:
    """What a fleet is called before its checkpoint has been found."""
    found = HUB_ID.fullmatch(config.model or "")
    path = Path(found[1] if found else config.model or "")
    return name or (path.stem if path.suffix in (".gguf", ".json") else path.name)


def tokenizer_of(model: str) -> tuple[Checkpoint, Tokenizer]:
    from penstock.text.tokenizer import load_tokenizer

    checkpoint = resolve(model, weights=False)
    return checkpoint, load_tokenizer(checkpoint)


def for_upstreams(model: str, config: ModelConfig) -> tuple[Tokenizer, EngineInfo | None]:
    """The tokenizer that a model's upstreams need, and what they are taken to be before they can be asked."""
    from penstock.fleet.build import expected_of_upstreams
    from penstock.models.config import read_config

    checkpoint, tokenizer = tokenizer_of(model)
    try:
        longest = read_config(checkpoint).max_position
    except StartupError:  # of an architecture that runs elsewhere alone
        longest = None
    return tokenizer, expected_of_upstreams(checkpoint.name, config, tokenizer.vocab_size, longest)
