"""Text to token ids and back, for a folder with tokenizer.json or the metadata of a GGUF file.

Decoding is defined on bytes: a token stands for fixed bytes, and a text is their concatenation read as UTF-8. Hence
streams, log-probabilities and whole texts can never disagree. The two vocabularies of language models fit this:
byte-level BPE (a character per byte) and sentencepiece (`▁` is a space, `<0xE4>` a byte). So does BERT's WordPiece
(`##` goes on with a word, all else is a word of its own), but for what its normaliser has lost of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, processors

from penstock.checkpoint.end_tokens import gguf_end_ids
from penstock.checkpoint.gguf import GGUFFile
from penstock.checkpoint.source import Checkpoint
from penstock.core.errors import ContextTooLong, InvalidRequest, StartupError
from penstock.text import gguf_vocabulary
from penstock.text.segments import UNBOUNDED, SegmentEncoder

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "▁"
CONTINUED = "##"
COMPOSED = 4  # bytes of text that a normaliser may turn into one


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves and the others as characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_level, self.strips_first_space = _decoding_rules(backend)
        verbatim = frozenset(added) if self._byte_level else frozenset()
        self._word_pieces = isinstance(backend.decoder, decoders.WordPiece)
        self._bytes = _BytesByToken(backend, self._byte_level, verbatim, self._word_pieces)
        self._segments = SegmentEncoder(backend, added) if self._byte_level and SegmentEncoder.applies(added) else None
        self._framing = _framing(backend)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = bos_id
        self.eos_ids = eos_ids  # every token that ends an answer; the first one is the model's own `eos_token`
        self.chat_template = chat_template
        self.tool_template = tool_template  # in place of the other one where a chat has tools
        self.bos_token = "" if bos_id is None else self.token_text(bos_id)
        self.eos_token = self.token_text(eos_ids[0]) if eos_ids else ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Serialise the tokenizer, to send it to another process."""
        make = partial(
            Tokenizer,
            bos_id=self.bos_id,
            eos_ids=self.eos_ids,
            chat_template=self.chat_template,
            tool_template=self.tool_template,
        )
        return make, (self._backend,)

    def encode(self, text: str, *, add_special_tokens: bool = True, at_most: int = UNBOUNDED) -> list[int]:
        """A rendered chat template already holds its special tokens: encode it with `add_special_tokens=False`. A text
        of more tokens than `at_most` is refused as soon as that is certain: by its size, or after so many."""
        if len(text) > at_most and len(text.encode(errors="replace")) > at_most * self.max_token_bytes:
            raise ContextTooLong(f"the text has more than {at_most} tokens", param=None)
        framing = self._framing if add_special_tokens else ([], [])
        try:
            if self._segments is not None and framing is not None:
                ids = [*framing[0], *self._segments.encode(text, at_most), *framing[1]]
            else:
                ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # what the library raises for a str that has no UTF-8 form
            raise InvalidRequest("the text holds half of a surrogate pair and is no valid Unicode") from error
        if len(ids) > at_most:
            raise ContextTooLong(f"the text has more than {at_most} tokens", param=None)
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Two texts as a cross-encoder reads them, and where the second one begins."""
        try:
            encoding = self._backend.encode(first, second)
        except TypeError as error:
            raise InvalidRequest("the text holds half of a surrogate pair and is no valid Unicode") from error
        return encoding.ids, encoding.sequence_ids.index(1) if 1 in encoding.sequence_ids else len(encoding.ids)

    def truncated(self, ids: list[int], keep: int) -> list[int]:
        """The first so many tokens of an encoded text; those that stand behind every text stay behind it."""
        last = self._framing[1] if self._framing is not None else []
        framed = 0 < len(last) < keep and ids[-len(last) :] == last
        return [*ids[: keep - len(last)], *last] if framed and len(ids) > keep else ids[:keep]

    @property
    def framing(self) -> tuple[int, int]:
        """How many tokens stand before every text, and how many behind it."""
        before, behind = self._framing or ([], [])
        return len(before), len(behind)

    @cached_property
    def max_token_bytes(self) -> int:
        """The largest number of bytes that one token stands for."""
        if self._word_pieces:
            return UNBOUNDED  # spaces stand for nothing, and a word that is not known is one token
        added = self._backend.get_added_tokens_decoder().values()
        spelled = self._backend.get_vocab(with_added_tokens=False)
        # A character of a byte-level token stands for one byte.
        longest = max(map(len, spelled) if self._byte_level else (len(token.encode()) for token in spelled))
        longest = max(longest, *(len(token.content.encode()) for token in added), 1)
        return longest if self._backend.normalizer is None else COMPOSED * longest

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        data = self.join_bytes(token_ids, skip_special_tokens=skip_special_tokens)
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def join_bytes(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> bytes:
        """The tokens' bytes one after another; ids without a token (padding of the embedding) have none."""
        return self.join_all_but(self._special_ids if skip_special_tokens else frozenset(), token_ids)

    def join_all_but(self, hidden: frozenset[int], token_ids: Iterable[int]) -> bytes:
        """The bytes of all tokens that are not hidden."""
        pieces = self._bytes
        return b"".join([pieces[i] for i in token_ids if i not in hidden])

    def save(self, folder: Path) -> None:
        """Write the files from which `load_tokenizer` makes the same tokenizer."""
        self._backend.save(str(folder / "tokenizer.json"))
        by_name = {"default": self.chat_template, "tool_use": self.tool_template}
        named = [{"name": name, "template": template} for name, template in by_name.items() if template]
        config: dict[str, Any] = {"chat_template": named}
        for name, ids in (("bos", [self.bos_id]), ("eos", self.eos_ids)):
            if ids and ids[0] is not None:
                config[f"{name}_token"] = self._backend.id_to_token(ids[0])
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(self.eos_ids)}))

    def token_id(self, text: str) -> int | None:
        """The token that the vocabulary spells like this, if there is one."""
        found: int | None = self._backend.token_to_id(text)
        return found

    @property
    def vocabulary(self) -> dict[str, int]:
        """All tokens by their spelling, as `token_spelling` gives it."""
        tokens: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return tokens

    def serialized(self) -> str:
        """As the text of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def token_spelling(self, token_id: int) -> str:
        """A token as the vocabulary spells it: `Ġthe`, `▁the`, `<0xE4>`; empty for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are part of no text."""
        return self._special_ids

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_text(self, token_id: int) -> str:
        """A token as text for display: bytes that are only part of a character show as U+FFFD."""
        return self._bytes[token_id].decode(errors="replace")


def _framing(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The tokens that the backend puts before and after any text; None: a sample does not show them."""
    framed, plain = (backend.encode("a", add_special_tokens=special).ids for special in (True, False))
    places = [at for at in range(len(framed)) if plain and framed[at : at + len(plain)] == plain]
    return (framed[: places[0]], framed[places[0] + len(plain) :]) if len(places) == 1 else None


class _BytesByToken(dict[int, bytes]):
    """Filled on demand: a text uses a small part of a vocabulary of 10^5 tokens."""

    def __init__(
        self, backend: tokenizers.Tokenizer, byte_level: bool, verbatim: frozenset[int], word_pieces: bool
    ) -> None:
        super().__init__()
        self._word_pieces = word_pieces
        self._backend = backend
        self._byte_level = byte_level
        self._verbatim = verbatim

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = data = self._look_up(token_id)
        return data

    def _look_up(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            spelled = token_id not in self._verbatim and all(character in BYTE_OF for character in token)
            return bytes(BYTE_OF[character] for character in token) if spelled else token.encode()
        if self._word_pieces:
            return (token.removeprefix(CONTINUED) if token.startswith(CONTINUED) else f" {token}").encode()
        byte = BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()


def _decoding_rules(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether tokens are spelled in byte-level characters, and whether a text loses the space put before it."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    steps = {step["type"]: step for step in state.get("decoders", [state])}
    if "ByteLevel" in steps:
        return True, False
    if "WordPiece" in steps:
        return False, True
    if not steps.keys() & {"ByteFallback", "Metaspace", "Replace"}:
        found = ", ".join(steps)
        raise StartupError(
            f"the tokenizer's decoder is {found}; supported: byte-level BPE, sentencepiece and WordPiece"
        )
    metaspace = steps.get("Metaspace")
    prefixed = metaspace is not None and metaspace.get("prepend_scheme", "always") != "never"
    return False, prefixed or steps.get("Strip", {}).get("start", 0) > 0


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.kind == "gguf":
        return _from_gguf(GGUFFile(checkpoint.path).metadata)
    if checkpoint.kind == "dummy" and not (checkpoint.folder / "tokenizer.json").is_file():
        raise StartupError(
            f"{checkpoint.name} has random weights and no tokenizer: put a tokenizer.json into {checkpoint.folder} "
            "or send token ids instead of text",
            param="model",
        )
    return _from_folder(checkpoint.folder)


def _from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    backend = gguf_vocabulary.build_backend(metadata)
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    eos_ids = gguf_end_ids(metadata)
    adds_bos = bos_id is not None and gguf_vocabulary.adds_bos(metadata)
    adds_eos = bool(eos_ids) and bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    _frame(backend, bos_id if adds_bos else None, eos_ids[0] if adds_eos else None)
    plain, for_tools = (metadata.get(f"tokenizer.chat_template{name}") or None for name in ("", ".tool_use"))
    return Tokenizer(backend, bos_id=bos_id, eos_ids=eos_ids, chat_template=plain, tool_template=for_tools)


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise StartupError(
            f"{folder} has no tokenizer.json; save one there with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            param="model",
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the base class itself
        raise StartupError(f"cannot read {path}: {error}", param="model") from error
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    named = {name: _token_content(config.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")}
    known = {name: token for name, token in named.items() if token and backend.token_to_id(token) is not None}
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in known.values() if t not in special])
    bos_id, eos_id = (backend.token_to_id(known[name]) if name in known else None for name in ("bos", "eos"))
    adds_bos, adds_eos = config.get("add_bos_token"), config.get("add_eos_token")
    if adds_bos is not None or adds_eos is not None:  # of one that is not named tokenizer.json says whether to add it
        before, behind = _framing(backend) or ([], [])
        adds_bos = bos_id in before if adds_bos is None else adds_bos
        adds_eos = eos_id in behind if adds_eos is None else adds_eos
        _frame(backend, bos_id if adds_bos else None, eos_id if adds_eos else None)
    plain, for_tools = _templates(folder, config)
    return Tokenizer(
        backend, bos_id=bos_id, eos_ids=_end_ids(folder, eos_id), chat_template=plain, tool_template=for_tools
    )


def _frame(backend: tokenizers.Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    """Make `encode` put these tokens around a text."""
    bos, eos = ([] if i is None else [(backend.id_to_token(i), i)] for i in (bos_id, eos_id))
    names = [token for token, _ in bos] + ["$A"] + [token for token, _ in eos]
    backend.post_processor = processors.TemplateProcessing(single=names, special_tokens=bos + eos)


def _end_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    """The tokenizer's own end token first, then those the model was told to stop at."""
    generation = _read_json(folder / "generation_config.json")
    stated = generation.get("eos_token_id", _read_json(folder / "config.json").get("eos_token_id"))
    more = stated if isinstance(stated, list) else [stated]
    return tuple(dict.fromkeys(i for i in (eos_id, *more) if isinstance(i, int)))


def _templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """For chats, and for chats with tools where they have one of their own."""
    files = (folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja")
    if files[0].is_file():
        plain, for_tools = (file.read_text(encoding="utf-8") if file.is_file() else None for file in files)
        return plain, for_tools
    template = config.get("chat_template")
    if not isinstance(template, list):
        return template or None, None
    by_name = {entry["name"]: entry["template"] for entry in template}
    return by_name.get("default", next(iter(by_name.values()), None)), by_name.get("tool_use")


def _token_content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON: {error}", param="model") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} must hold a JSON object", param="model")
    return content
