"""Decoders that make embeddings, from a checkpoint to vectors, against transformers."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from penstock.core.errors import InvalidRequest, StartupError
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.local import LocalEngine
from penstock.engine.settings import EngineConfig
from penstock.kernels.native import bindings
from penstock.runner.startup import start
from tests.models.tiny_encoders import cosines, hidden_states, make_encoder, say_pooling

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
SMALL: dict[str, Any] = {"device": "cpu", "kv_memory_gib": 0.01, "max_seqs": 4, "max_step_tokens": 32}
NATIVE = pytest.mark.skipif(not bindings.available(), reason="not built")


def texts() -> list[list[int]]:
    draw = np.random.default_rng(4)
    shared = draw.integers(0, 128, 50).tolist()  # a prefix that is in the cache for the second one
    return [[*shared, 3, 4], [*shared, 5], *(draw.integers(0, 128, length).tolist() for length in (1, 16, 200))]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(5)
    return transformers.Qwen3Model(transformers.Qwen3Config(**SIZES)).eval()


async def collected(engine: LocalEngine, number: int, text: list[int], **fields: Any) -> Chunk:
    request = GenerateRequest(f"r{number}", text, SamplingParams(temperature=0, max_tokens=0), **fields)
    (chunk,) = [chunk async for chunk in engine.submit(request)]
    return chunk


def vectors(folder: Path, **config: Any) -> tuple[npt.NDArray[np.float32], list[Chunk]]:
    scheduler, executor, info = start(str(folder), EngineConfig(**{**SMALL, **config}))
    engine = LocalEngine(scheduler, executor, info)
    assert (info.task, info.width) == ("embed", SIZES["hidden_size"])

    async def all_of_them() -> list[Chunk]:
        first = await collected(engine, 0, texts()[0])
        return [first, *await asyncio.gather(*(collected(engine, i, t) for i, t in enumerate(texts()) if i))]

    chunks = asyncio.run(all_of_them())
    engine.close()
    return np.stack([np.frombuffer(chunk.vector or b"", "<f4") for chunk in chunks]), chunks


@pytest.mark.parametrize("kind", ["lasttoken", "mean_tokens"])
@pytest.mark.parametrize(
    ("settings", "nearness"),
    [
        ({"dtype": "float32"}, 0.999999),
        pytest.param({"quantization": "none"}, 0.999, marks=NATIVE),
        pytest.param({"quantization": "int8"}, 0.99, marks=NATIVE),
    ],
    ids=["torch", "native-bf16", "native-int8"],
)
def test_prompts_in_chunks_and_with_cached_prefixes_give_the_vectors_of_transformers(
    model: Any, tmp_path: Path, kind: str, settings: dict[str, str], nearness: float
) -> None:
    model.save_pretrained(tmp_path)
    say_pooling(tmp_path, kind)
    found, chunks = vectors(tmp_path, **settings)
    states = [hidden_states(model, text) for text in texts()]
    expected = np.stack([x[-1] if kind == "lasttoken" else x.mean(0) for x in states])
    assert cosines(found, expected).min() > nearness
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    # Of a cached prefix only keys and values are there, no hidden states that a mean would need.
    assert chunks[1].cached_tokens == (48 if kind == "lasttoken" else 0)
    assert all(chunk.finish_reason == "length" and chunk.token_ids == [] for chunk in chunks)


def test_a_vector_without_numbers_is_an_error(tmp_path: Path, model: Any) -> None:
    """And not NaN, which is no JSON."""
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.embed_tokens.weight[7] = torch.nan
    broken.save_pretrained(tmp_path)
    say_pooling(tmp_path)
    scheduler, executor, info = start(str(tmp_path), EngineConfig(**SMALL))
    engine = LocalEngine(scheduler, executor, info)

    async def both() -> list[Chunk]:
        return list(await asyncio.gather(collected(engine, 0, [7, 8]), collected(engine, 1, [8, 9])))

    failed, whole = asyncio.run(both())
    engine.close()
    assert failed.error is not None
    assert failed.error.error == "InvalidLogits"
    assert whole.error is None
    assert np.isfinite(np.frombuffer(whole.vector or b"", dtype="<f4")).all()


def test_settings_make_a_model_for_text_one_for_embeddings_and_back(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    found, _ = vectors(tmp_path, dtype="float32", pooling="last", normalize=False)
    np.testing.assert_allclose(found[2], hidden_states(model, texts()[2])[-1], atol=1e-4)
    say_pooling(tmp_path, "lasttoken")
    assert start(str(tmp_path), EngineConfig(**SMALL, pooling="none"))[2].task == "generate"
    with pytest.raises(StartupError, match="the first token of a decoder sees no other; use mean or last"):
        start(str(tmp_path), EngineConfig(**SMALL, pooling="cls"))


def test_an_encoder_generates_no_text(tmp_path: Path) -> None:
    make_encoder("Bert").save_pretrained(tmp_path)
    with pytest.raises(StartupError, match="is an encoder and generates no text"):
        start(str(tmp_path), EngineConfig(**SMALL, pooling="none"))
    scheduler, executor, info = start(str(tmp_path), EngineConfig(**SMALL))
    engine = LocalEngine(scheduler, executor, info)
    with pytest.raises(InvalidRequest, match="computes vectors and generates no text"):
        engine.start(GenerateRequest("r", [1, 2], SamplingParams(max_tokens=3)), lambda chunk: None)
    engine.close()


@NATIVE
def test_a_cross_encoder_gives_numbers_between_0_and_1_unless_it_says_otherwise(tmp_path: Path) -> None:
    model = make_encoder("Roberta", "ForSequenceClassification")
    model.save_pretrained(tmp_path)
    scheduler, executor, info = start(str(tmp_path), EngineConfig(**SMALL, dtype="float32", max_model_len=40))
    assert (info.task, info.width, info.max_model_len) == ("score", 1, 40)
    engine = LocalEngine(scheduler, executor, info)
    text = np.random.default_rng(1).integers(5, 90, 40).tolist()
    chunk = asyncio.run(collected(engine, 0, text, second_text=18))
    engine.close()
    types = torch.tensor([[0] * 18 + [1] * 22])
    with torch.inference_mode():
        expected = torch.sigmoid(model(torch.tensor([text]), token_type_ids=types).logits)[0].numpy()
    np.testing.assert_allclose(np.frombuffer(chunk.vector or b"", "<f4"), expected, atol=1e-5)
