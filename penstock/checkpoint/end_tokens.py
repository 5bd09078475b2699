"""The tokens that end an answer, beyond those that a model's own configuration names.

The engine stops at them and the gateway leaves them out of the text, so both must read the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONTROL = 3  # of tokenizer.ggml.token_type

# GGUF names one end token, but models end answers with any of these; they count where they are control tokens.
END_TOKENS = {
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
}


def gguf_end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Those of a GGUF file; the first one is the model's own."""
    stated = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens") or [], metadata.get("tokenizer.ggml.token_type") or []
    typed = zip(tokens, types, strict=False)
    known = [i for i, (token, kind) in enumerate(typed) if kind == CONTROL and token in END_TOKENS]
    return tuple(dict.fromkeys(i for i in (*stated, *known) if i is not None))


def tokenizer_end_id(folder: Path) -> int | None:
    """The `eos_token` of a folder's tokenizer_config.json, if its files say which token that is: a chat model's ends
    its turns, where config.json may still name the one that ended the documents of the base model."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
        end = config["eos_token"]
        text = end["content"] if isinstance(end, dict) else end
        added = config.get("added_tokens_decoder")
        if added is None:  # transformers 5 leaves them to tokenizer.json
            tokens = json.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
            added = {token["id"]: token for token in tokens}
        return next((int(id) for id, token in added.items() if token["content"] == text), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # whoever reads the tokenizer itself says what is wrong
