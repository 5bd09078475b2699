from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from penstock.checkpoint.source import Checkpoint
from penstock.core.errors import InvalidRequest, StartupError
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.tiny_vocabulary import SENTENCEPIECE_WORDS, WriteGGUF, seeded, spellable

TEXTS = [
    "",
    " ",
    "Hello world",
    "it's we'll I'M don't",
    "In 2024, 1234567 items: 3.14159 and    7",
    "tabs\t\tand\n\n\nnewlines \r\n   end   ",
    "def f(x):\n        return x ** 2\n",
    "naïve café — “quotes” … ½ ² Ⅷ ٣",
    "日本語と中文 한국어 العربية हिन्दी",
    "👩‍👩‍👧‍👦 🇨🇭 👍🏽 \u200b\ufeff\x00\x7f",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_start|",
    "<|im_end|> <|im_end|>x<repo_name>",
]
NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
words = st.sampled_from([*TEXTS, "<|im_start|>", "  ", "12", "\n"])


@pytest.mark.parametrize("text", TEXTS)
def test_known_texts_get_the_ids_of_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    assert tokenizer.encode(text) == reference.encode(text)


@seeded
@given(text=st.lists(st.one_of(words, st.text(max_size=8))).map("".join))
def test_any_text_gets_the_ids_of_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    assert tokenizer.encode(text) == reference.encode(text)


@seeded
@given(text=st.lists(st.one_of(words, st.text(spellable, max_size=8))).map("".join))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


@seeded
@given(ids=st.lists(st.integers(0, 49151)))
def test_any_ids_decode_as_in_transformers(tokenizer: Tokenizer, reference: Any, ids: list[int]) -> None:
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_ids_of_the_built_in_models_system_prompt(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    ids = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]
    assert tokenizer.encode(text) == [*ids, 198]


def test_spaces_before_a_digit_stay_together(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_text(i) for i in tokenizer.encode("a   12")] == ["a", "   ", "1", "2"]


def test_special_tokens_of_the_built_in_model(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2, 0))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.decode([1, 19556, 2]) == "Hello"


def test_part_of_a_character_has_exact_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("你")
    assert len(ids) == 2
    assert b"".join(map(tokenizer.token_bytes, ids)) == "你".encode()
    assert "\ufffd" in tokenizer.token_text(ids[0])


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("a\ud83d")


def test_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([19556, 60000]) == "Hello"


NUMBERS = ["1", "2", "3", "4", "Ġ", "12", "123", "1234"]
NUMBER_MERGES = ["1 2", "12 3", "123 4"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234", "4"]),
        ("default", ["1234", "4"]),
        ("llama-bpe", ["123", "4", "4"]),
        ("qwen2", ["1", "2", "3", "4", "4"]),
        ("smollm", ["1", "2", "3", "4", "4"]),
        ("tekken", ["1", "2", "3", "4", "4"]),
    ],
)
def test_pre_tokenisers_split_digits_differently(write_gguf: WriteGGUF, pre: str, pieces: list[str]) -> None:
    tiny = write_gguf("gpt2", NUMBERS, [1] * len(NUMBERS), merges=NUMBER_MERGES, tokenizer_pre=pre)
    assert [tiny.token_text(i) for i in tiny.encode("12344")] == pieces


def test_an_unknown_pre_tokeniser_falls_back_with_a_warning(
    write_gguf: WriteGGUF, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tiny = write_gguf("gpt2", NUMBERS, [1] * len(NUMBERS), merges=NUMBER_MERGES, tokenizer_pre="novel")
    assert "'novel'" in caplog.text
    assert [tiny.token_text(i) for i in tiny.encode("1234")] == ["1234"]


def test_tekken_splits_words_before_capitals_and_behind_one_sign(write_gguf: WriteGGUF) -> None:
    tokens = ["a", "B", "(", "/", "aB", "(a", "//", "a/"]
    merges = ["a B", "( a", "/ /", "a /"]
    for pre, pieces in (("tekken", ["(a", "B", "//"]), ("gpt-2", ["(", "aB", "//"])):
        tiny = write_gguf("gpt2", tokens, [1] * len(tokens), merges=merges, tokenizer_pre=pre)
        assert [tiny.token_text(i) for i in tiny.encode("(aB//", add_special_tokens=False)] == pieces


def test_llama3_adds_bos_and_takes_whole_words_before_merges(write_gguf: WriteGGUF) -> None:
    tokens, types = ["1", "2", "22", "<|begin|>", "<|eot_id|>", "<tool>", "11"], [1, 1, 1, 3, 3, 4, 1]
    tiny = write_gguf("gpt2", tokens, types, merges=["1 1"], tokenizer_pre="llama-bpe", bos_token_id=3, eos_token_id=0)
    assert tiny.encode("22<tool>1<|eot_id|>") == [3, 2, 5, 0, 4]
    assert tiny.encode("22", add_special_tokens=False) == [2]
    assert tiny.decode([3, 2, 5, 4]) == "22<tool>"  # a user-defined token is shown, a control token is not
    assert tiny.eos_ids == (0, 4)


def test_added_tokens_are_spelled_verbatim_in_a_byte_level_vocabulary(write_gguf: WriteGGUF) -> None:
    tiny = write_gguf("gpt2", ["Ã", "©", "é", "Ã©"], [1, 1, 4, 1], merges=["Ã ©"])
    assert tiny.decode(tiny.encode("éé")) == "éé"
    assert tiny.token_bytes(2) == "é".encode()
    assert tiny.decode([0, 1]) == "é"


@pytest.mark.parametrize(("field", "fields"), [("merges", {"merges": None}), ("'bert'", {"model": "bert"})])
def test_an_unusable_gguf_vocabulary_names_the_field(write_gguf: WriteGGUF, field: str, fields: dict[str, Any]) -> None:
    arguments = {"model": "gpt2", "tokens": ["a"], "types": [1], "merges": ["a a"]} | fields
    with pytest.raises(StartupError, match=field):
        write_gguf(**arguments)


def test_merges_outside_the_vocabulary_are_a_startup_error(write_gguf: WriteGGUF) -> None:
    with pytest.raises(StartupError, match="vocabulary"):
        write_gguf("gpt2", ["a"], [1], merges=["a b"])


def merge_by_score(text: str) -> list[str]:
    """Sentencepiece's rule, read literally: join the neighbours whose union has the best score, leftmost first."""
    pieces = list(text)
    while True:
        unions = [(SENTENCEPIECE_WORDS.index(u), i) for i in range(len(pieces) - 1)
                  if (u := pieces[i] + pieces[i + 1]) in SENTENCEPIECE_WORDS]  # fmt: skip
        if not unions:
            return pieces
        _, i = min(unions)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@seeded
@given(text=st.text("helowrd ", min_size=1))
def test_sentencepiece_merges_by_score(sentencepiece: Tokenizer, text: str) -> None:
    pieces = merge_by_score("▁" + text.replace(" ", "▁"))
    first_word = 259
    expected = [first_word + SENTENCEPIECE_WORDS.index(piece) for piece in pieces]
    assert sentencepiece.encode(text, add_special_tokens=False) == expected


@seeded
@given(text=st.text())
def test_sentencepiece_falls_back_to_bytes_and_comes_back(sentencepiece: Tokenizer, text: str) -> None:
    text = text.replace("▁", "")  # sentencepiece cannot tell it from a space
    ids = sentencepiece.encode(text)
    assert ids[0] == sentencepiece.bos_id
    assert sentencepiece.decode(ids) == text


def test_sentencepiece_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello é", add_special_tokens=False)
    assert [sentencepiece.token_bytes(i) for i in ids] == [b" hello", b" ", b"\xc3", b"\xa9"]
    assert sentencepiece.decode(ids) == "hello é"


def folder_with(reference: Any, folder: Path, files: dict[str, Any]) -> Checkpoint:
    reference.backend_tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return Checkpoint("folder", "folder", folder)


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, (None, None)),
        ({"tokenizer_config.json": {"chat_template": "inline"}}, ("inline", None)),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "rag", "template": "other"},
                        {"name": "default", "template": "named"},
                    ]
                }
            },
            ("named", None),
        ),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, ("plain", "tools")),
        ({"tokenizer_config.json": {"chat_template": "inline"}, "chat_template.jinja": "file"}, ("file", None)),
        ({"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "tools"}, ("file", "tools")),
    ],
)
def test_where_a_folder_keeps_its_templates(
    reference: Any, tmp_path: Path, files: dict[str, Any], template: tuple[str | None, str | None]
) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    loaded = load_tokenizer(folder_with(reference, tmp_path, files))
    assert (loaded.chat_template, loaded.tool_template) == template
    copied: Tokenizer = pickle.loads(pickle.dumps(loaded))
    assert (copied.chat_template, copied.tool_template) == template
    saved = tmp_path / "saved"
    saved.mkdir()
    loaded.save(saved)
    again = load_tokenizer(Checkpoint("saved", "folder", saved))
    assert (again.chat_template, again.tool_template) == template


def test_a_folder_gives_the_same_ids_as_the_gguf_file(tokenizer: Tokenizer, reference: Any, tmp_path: Path) -> None:
    loaded = load_tokenizer(folder_with(reference, tmp_path, {}))
    for text in TEXTS:
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_a_folders_special_tokens(reference: Any, tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "pad_token": "Hello",
        "add_bos_token": True,
    }
    files = {"tokenizer_config.json": config, "generation_config.json": {"eos_token_id": [0, 2]}}
    loaded = load_tokenizer(folder_with(reference, tmp_path, files))
    assert (loaded.bos_id, loaded.eos_ids) == (1, (2, 0))
    assert loaded.encode("a")[0] == 1
    assert loaded.encode("a", add_special_tokens=False)[0] != 1
    assert loaded.decode(loaded.encode("Hello you")) == " you"  # what the config calls special is skipped


@pytest.mark.parametrize("stated", [{}, {"add_eos_token": False}, {"add_bos_token": None}])
def test_a_folder_that_says_nothing_of_bos_adds_what_tokenizer_json_adds(
    reference: Any, tmp_path: Path, stated: dict[str, Any]
) -> None:
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    checkpoint = folder_with(reference, tmp_path, {"tokenizer_config.json": {**names, **stated}})
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(checkpoint).encode("a")[0] == 1


def test_truncation_left_in_tokenizer_json_does_not_cut_prompts(reference: Any, tmp_path: Path) -> None:
    checkpoint = folder_with(reference, tmp_path, {})
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(load_tokenizer(checkpoint).encode("one two three four five")) == 5


def test_errors_of_folders(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        load_tokenizer(Checkpoint("x", "folder", tmp_path))
    with pytest.raises(StartupError, match="random weights"):
        load_tokenizer(Checkpoint("x", "dummy", tmp_path / "config.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(Checkpoint("x", "folder", tmp_path))


def test_a_dummy_checkpoint_uses_the_tokenizer_beside_its_config(reference: Any, tmp_path: Path) -> None:
    folder_with(reference, tmp_path, {})
    assert load_tokenizer(Checkpoint("x", "dummy", tmp_path / "config.json")).vocab_size == 49152
