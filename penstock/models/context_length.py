"""How many tokens a request may have: by the model, and by the settings."""

from __future__ import annotations

from penstock.checkpoint.source import Checkpoint
from penstock.core.errors import StartupError
from penstock.models.config import read_config
from penstock.models.encoder_config import encoder_architecture, read_encoder_config


def longest_context(checkpoint: Checkpoint) -> int:
    """Tokens that the model was made for."""
    if encoder_architecture(checkpoint) is not None:
        return read_encoder_config(checkpoint.path).max_position
    return read_config(checkpoint).max_position


def max_model_len(wanted: int | None, longest: int) -> int:
    """Tokens of a request, of which the model takes at most so many."""
    if wanted is None:
        return longest
    if wanted > longest:
        raise StartupError(
            f"max_model_len is {wanted}, but the model was made for at most {longest} tokens; lower max_model_len",
            param="engine.max_model_len",
        )
    return wanted
