"""Builds a `tokenizers` tokenizer from the vocabulary in a GGUF file's metadata (`tokenizer.ggml.*`)."""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from penstock.checkpoint.end_tokens import CONTROL
from penstock.core.errors import StartupError

log = logging.getLogger(__name__)

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS_IN_THREES = _WORDS % r"\p{N}{1,3}"
SINGLE_DIGITS = _WORDS % r"\p{N}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
BEFORE_CAPITALS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tokenizer.ggml.pre
GPT2 = frozenset({"default", "gpt-2", "gpt2"})
LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"})
QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})
SMOLLM = frozenset({"smollm", "starcoder"})
TEKKEN = frozenset({"tekken"})  # Mistral's since Nemo
WHOLE_WORDS_FIRST = LLAMA3 | TEKKEN  # a word of the vocabulary is one token whatever its merges; these add BOS, too


def build_backend(metadata: dict[str, Any]) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise StartupError(
            f"the GGUF file's tokenizer.ggml.model is {kind!r}; supported: {', '.join(builders)}", param="model"
        )
    tokens = _required(metadata, "tokens")
    try:
        backend = builders[kind](metadata, {token: i for i, token in enumerate(tokens)})
    except StartupError:
        raise
    except Exception as error:  # the library raises the base class itself
        raise StartupError(f"the GGUF file's vocabulary is not usable: {error}", param="model") from error
    types = metadata.get("tokenizer.ggml.token_type", [])
    by_type = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, special=by_type[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in by_type
        ]
    )
    return backend


def adds_bos(metadata: dict[str, Any]) -> bool:
    by_default = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS_FIRST
    return bool(metadata.get("tokenizer.ggml.add_bos_token", by_default))


def _required(metadata: dict[str, Any], name: str) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise StartupError(f"the GGUF file has no tokenizer.ggml.{name}; convert the model again", param="model")
    return values


def _byte_level(metadata: dict[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in _required(metadata, "merges")]
    pre = metadata.get("tokenizer.ggml.pre", "default")
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS_FIRST))
    backend.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizers(pre))
    backend.decoder = decoders.ByteLevel()
    if pre in QWEN2:
        backend.normalizer = normalizers.NFC()
    return backend


def _pre_tokenizers(pre: str) -> list[Any]:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre in LLAMA3:
        return [pre_tokenizers.Split(Regex(DIGITS_IN_THREES), "isolated"), to_bytes]
    if pre in TEKKEN:
        return [pre_tokenizers.Split(Regex(BEFORE_CAPITALS), "isolated"), to_bytes]
    if pre in QWEN2:
        return [pre_tokenizers.Split(Regex(SINGLE_DIGITS), "isolated"), to_bytes]
    words_to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in SMOLLM:
        return [pre_tokenizers.Digits(individual_digits=True), words_to_bytes]
    if pre not in GPT2:
        log.warning("unknown tokenizer.ggml.pre %r: splitting text like gpt-2, some texts will get other tokens", pre)
    return [words_to_bytes]


def _sentencepiece(metadata: dict[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    typed = list(zip(tokens, _required(metadata, "token_type"), _required(metadata, "scores"), strict=True))
    unknown = next((token for token, kind, _ in typed if kind == UNKNOWN), None)
    merges = _merges_by_score({token: score for token, kind, score in typed if kind == NORMAL})
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend


def _merges_by_score(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours whose union scores best; as BPE: all ways to split each token, best first."""
    return [
        (token[:cut], token[cut:])
        for token in sorted(scores, key=lambda token: -scores[token])
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
