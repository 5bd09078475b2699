"""What llguidance knows of a model's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.grammar.matcher import one_line
from penstock.text.tokenizer import Tokenizer


class UnreadableTokenizer(Exception):
    """The message says why."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: Any  # llguidance.LLTokenizer
    free: npt.NDArray[np.int32]  # mask of all tokens but those that end an output


def read_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], pausing: Callable[[], AbstractContextManager[None]]
) -> Vocabulary:
    """`vocab_size`: of the model, whose tokenizer may have fewer tokens or more. `pausing` is entered while libraries
    hold the GIL. Raises UnreadableTokenizer."""
    from llguidance import LLTokenizer

    try:
        with pausing():
            # What a grammar forces follows other text: no space comes before it.
            text = tokenizer.serialized().replace('"add_prefix_space":true', '"add_prefix_space":false')
            if tokenizer.vocab_size > vocab_size:
                text = _without_tokens_from(vocab_size, text)
            tokens = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids))
    except BaseException as error:  # a panic of the library is one
        problem = one_line(str(error)) if eos_ids else "the model has no token that ends an output"
        raise UnreadableTokenizer(f"llguidance cannot read the tokenizer of this model: {problem}") from error
    free = np.full(-(-vocab_size // 32), -1, np.int32)
    return Vocabulary(tokens, without(eos_ids, free))


def without(tokens: Sequence[int], mask: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """A mask that allows none of these tokens, and else what this one allows."""
    left = mask.copy()
    for token in tokens:
        left.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    return left


def _without_tokens_from(vocab_size: int, tokenizer: str) -> str:
    """A tokenizer.json without the tokens for which the model has no logits, such as `<image_soft_token>` of Gemma 3 in
    its text-only sizes. What llguidance does not know it neither allows nor forces; text that one of them would stand
    for is split into others."""
    parsed = json.loads(tokenizer)
    model = parsed["model"]
    if isinstance(model["vocab"], dict):
        known, kept = model["vocab"], {token: i for token, i in model["vocab"].items() if i < vocab_size}
        model["vocab"] = kept
        if "merges" in model and len(kept) < len(known):
            model["merges"] = [(a, b) for a, b in model["merges"] if a in kept and b in kept and a + b in kept]
    else:  # Unigram: tokens with their scores, in the order of their ids
        model["vocab"] = model["vocab"][:vocab_size]
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if token["id"] < vocab_size]
    return json.dumps(parsed)
