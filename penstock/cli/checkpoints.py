"""What a gateway reads of a model's checkpoint, whoever computes with it."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.source import HUB_ID, Checkpoint, resolve
from penstock.core.engine import EngineInfo, Task
from penstock.core.errors import StartupError

if TYPE_CHECKING:
    from penstock.engine.settings import EngineConfig
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


def for_others(model: str, config: ModelConfig) -> tuple[Tokenizer, EngineInfo | None]:
    """The tokenizer that a model's upstreams need, and what they and the workers of other machines are taken to be
    before they can be asked. None: nobody says how long the context is."""
    checkpoint, tokenizer = tokenizer_of(model)
    try:
        here = _as_computed_here(checkpoint, config.engine, tokenizer.vocab_size)
    except StartupError:  # of an architecture that runs elsewhere alone
        here = None
    given = [upstream.max_model_len for upstream in config.upstreams]
    if config.workers:
        given.append(config.engine.max_model_len)
    longest = max(length or (here.max_model_len if here else 0) for length in given)
    if here is None or not config.workers:
        here = EngineInfo(checkpoint.name, longest, tokenizer.vocab_size)
    return tokenizer, replace(here, max_model_len=longest) if longest else None


def _as_computed_here(checkpoint: Checkpoint, config: EngineConfig, vocab_size: int) -> EngineInfo:
    """Raises StartupError where Penstock cannot compute it."""
    from penstock.models.config import read_config, sampling_defaults
    from penstock.models.encoder_config import encoder_architecture, read_encoder_config
    from penstock.runner.encoder_startup import decoder_pooling

    revision = secrets.token_hex(8)  # until it is known, so that no stored answer passes for one of it
    info = EngineInfo(checkpoint.name, 0, vocab_size, revision)
    if encoder_architecture(checkpoint) is not None:
        encoder = read_encoder_config(checkpoint.path)
        task: Task = "score" if encoder.labels else "embed"
        return replace(info, max_model_len=encoder.max_position, task=task, width=encoder.labels or encoder.hidden_size)
    decoder = read_config(checkpoint)
    sampling = sampling_defaults(checkpoint.name, decoder, config.sampling_defaults)
    info = replace(info, max_model_len=decoder.max_position, sampling_defaults=sampling)
    pools = decoder_pooling(checkpoint, config) is not None
    return replace(info, task="embed", width=decoder.hidden_size) if pools else info
