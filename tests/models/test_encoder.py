"""Encoders of the BERT family, in plain torch and on the native kernels, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import StartupError
from penstock.kernels.native import bindings
from penstock.kernels.native.encoder import NativeEncoder
from penstock.models.encoder import Encoder, load_encoder
from penstock.models.encoder_config import EncoderConfig, encoder_weights, read_encoder_config
from tests.models.conftest import Save
from tests.models.tiny_encoders import ENCODERS, cosines, hidden_states, make_encoder, say_pooling

LENGTHS = (1, 2, 17, 33, 70, 5)
SECONDS = (1, 1, 9, 20, 30, 2)  # where the second text of each begins
COMPUTED = ["torch", pytest.param("native", marks=pytest.mark.skipif(not bindings.available(), reason="not built"))]


def texts() -> list[list[int]]:
    draw = np.random.default_rng(11)
    return [draw.integers(5, 90, length).tolist() for length in LENGTHS]  # 0 to 4 are special, as padding is


def built(folder: Path, how: str, scheme: bindings.EncoderScheme = "float32") -> tuple[Encoder | NativeEncoder, Any]:
    config = read_encoder_config(folder)
    if how == "torch":
        return load_encoder(folder, config, "float32", "cpu"), config
    encoder = NativeEncoder(config, scheme, threads=2)
    encoder.load(encoder_weights(folder, config))
    return encoder, config


@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("kind", ["mean_tokens", "cls_token", "lasttoken"])
def test_vectors_are_those_of_transformers(save: Save, family: str, kind: str, how: str) -> None:
    model = make_encoder(family)
    folder = save(model)
    say_pooling(folder, kind)
    encoder, config = built(folder, how)
    states = [hidden_states(model, text) for text in texts()]
    expected = [x.mean(0) if kind == "mean_tokens" else x[0 if kind == "cls_token" else -1] for x in states]
    found = encoder.encode([token for text in texts() for token in text], LENGTHS)
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-4)
    assert config.max_position == 80 - config.first_position


@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.parametrize("family", ENCODERS)
def test_scores_of_a_cross_encoder_are_those_of_transformers(save: Save, family: str, how: str) -> None:
    model = make_encoder(family, "ForSequenceClassification")
    encoder, config = built(save(model), how)
    assert (config.labels, config.sigmoid) == (1, True)
    found = encoder.encode([token for text in texts() for token in text], LENGTHS, SECONDS)
    for text, second, score in zip(texts(), SECONDS, found, strict=True):
        types = torch.tensor([[int(position >= second) for position in range(len(text))]])
        with torch.inference_mode():
            expected = model(torch.tensor([text]), token_type_ids=types).logits[0].numpy()
        np.testing.assert_allclose(score, expected, atol=1e-4)


@pytest.mark.skipif(not bindings.available(), reason="not built")
@pytest.mark.parametrize("scheme", ["float32", "none", "int8"])
def test_precisions_are_near_and_a_text_has_the_same_bits_in_any_batch(
    save: Save, scheme: bindings.EncoderScheme
) -> None:
    folder = save(make_encoder("Bert"))
    (exact, _), (encoder, _) = built(folder, "torch"), built(folder, "native", scheme)
    tokens = [token for text in texts() for token in text]
    found = encoder.encode(tokens, LENGTHS)
    assert (
        cosines(found, exact.encode(tokens, LENGTHS)).min()
        > {"float32": 0.999999, "none": 0.999, "int8": 0.995}[scheme]
    )
    for text, vector in zip(texts(), found, strict=True):
        assert np.array_equal(encoder.encode(text, [len(text)])[0], vector)


def test_a_checkpoint_for_masked_language_models_is_its_encoder(save: Save) -> None:
    model = make_encoder("Bert", "ForMaskedLM")
    encoder, config = built(save(model), "torch")
    (text,) = texts()[3:4]
    assert (config.pooling, config.normalize) == ("mean", True)  # where nothing is written down
    np.testing.assert_allclose(encoder.encode(text, [len(text)])[0], hidden_states(model.bert, text).mean(0), atol=1e-4)


def changed(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["ModernBertModel"]}, "ModernBertModel is no encoder; supported: BertModel"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supported"),
        ({"num_attention_heads": 5}, "5 attention heads cannot share a hidden_size of 64"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "2 labels are not"),
        ({"vocab_size": "many"}, "vocab_size must be a positive whole number, not 'many'"),
    ],
)
def test_what_is_not_supported_is_named(save: Save, fields: dict[str, Any], message: str) -> None:
    folder = save(make_encoder("Bert"))
    with pytest.raises(StartupError, match=message):
        read_encoder_config(changed(folder, **fields))


@pytest.mark.parametrize("how", COMPUTED)
def test_tensors_that_do_not_fit_are_named(save: Save, how: str) -> None:
    folder = save(make_encoder("Bert"))
    with pytest.raises(StartupError, match=r"encoder\.layer\.2\."):
        built(changed(folder, num_hidden_layers=3), how)
    with pytest.raises(StartupError, match=r"intermediate\.dense"):
        built(changed(folder, num_hidden_layers=2, intermediate_size=192), how)


def test_a_head_that_returns_logits_stays_so(save: Save) -> None:
    folder = save(make_encoder("Bert", "ForSequenceClassification"))
    changed(folder, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    config: EncoderConfig = read_encoder_config(folder)
    assert not config.sigmoid
