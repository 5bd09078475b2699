"""Whether the tokenizer that training scripts save beside an adapter is the model's.

An adapter has no embeddings, so it can only have been trained on tokens that the model knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.lora.checkpoint import open_file
from penstock.lora.config import invalid_adapter

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
MOST_BYTES = 2**26

T = TypeVar("T")


class _Token(msgspec.Struct):
    content: str
    id: int = -1


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]  # a list (Unigram): the place of a token in it is its id


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Token] = []


class _Config(msgspec.Struct):
    pad_token: str | _Token | None = None


def check_tokenizer(folder: Path, vocabulary: Callable[[], Mapping[str, int]]) -> None:
    """Raises the tokens that are not those of the model; `vocabulary` has the model's ids by their spelling. A padding
    token of the adapter's own is none of them: it stands in no prompt and no answer."""
    if not (folder / TOKENIZER).exists():
        return
    saved = _read(folder / TOKENIZER, _Tokenizer)
    listed = saved.model.vocab
    ids = listed if isinstance(listed, dict) else {token: at for at, (token, _) in enumerate(listed)}
    ids |= {token.content: token.id for token in saved.added_tokens}
    known = vocabulary()
    differing = ids.items() - known.items()
    if differing and (folder / TOKENIZER_CONFIG).exists():
        pad = _read(folder / TOKENIZER_CONFIG, _Config).pad_token
        spelled = pad.content if isinstance(pad, _Token) else pad
        differing = {(token, at) for token, at in differing if token != spelled or token in known}
    if differing:
        token, at = min(differing, key=lambda each: each[1])
        there = f"is {known[token]} in the model's" if token in known else "is not in the model's"
        raise invalid_adapter(
            f"{folder / TOKENIZER} is another tokenizer than the model's: {len(differing):,} tokens differ, and "
            f"{token[:100]!r}, which is {at}, {there}; supported: the model's tokens, and a padding token"
        )


def _read(path: Path, kind: type[T]) -> T:
    with open_file(path, MOST_BYTES) as file:
        try:
            return msgspec.json.decode(file.read(MOST_BYTES), type=kind)
        except msgspec.MsgspecError as error:
            raise invalid_adapter(f"{path} is no {path.stem} of Hugging Face: {error}") from error
