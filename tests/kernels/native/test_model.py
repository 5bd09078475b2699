"""Whole steps of the native model against transformers, for each architecture it covers."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers

from penstock.core.errors import EngineFailure, StartupError
from penstock.kernels.native import bindings
from penstock.kernels.native.bindings import KVFormat, Scheme
from penstock.kernels.native.decoder_reference import ReferenceDecoder, stages, untied
from penstock.kernels.native.model import ALIGNMENT, NativeModel, NativeRows, NativeStep
from penstock.kernels.native.shape import tensor_shapes
from penstock.models.config import ModelConfig
from penstock.models.frequencies import inverse_frequencies
from penstock.quantization.scheme import int4_round_trip

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))

BLOCK = 16
VOCAB = 211
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_biases": lambda: transformers.LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=40, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**{**SIZES, "num_attention_heads": 4}, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
}


def reference(kind: str, scheme: Scheme = "none") -> Any:
    """A random model whose weights the scheme can nearly hold: mostly activations and the cache are rounded."""
    torch.manual_seed(3)
    config = KINDS[kind]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.05
            parameter.copy_((parameter + noise).bfloat16().float())
            if scheme == "int4" and parameter.ndim == 2 and len(parameter) != VOCAB:
                parameter.copy_(torch.from_numpy(int4_round_trip(parameter.numpy())))
    return model


def shape(model: Any) -> ModelConfig:
    c, names = model.config, set(model.state_dict())
    return ModelConfig(
        architecture=type(model).__name__,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=32,
        norm_eps=c.rms_norm_eps,
        rope_theta=float(c.rope_parameters["rope_theta"]),
        rope_scaling=None,
        max_position=2048,
        tie_embeddings=c.tie_word_embeddings,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in names,
        output_bias="model.layers.0.self_attn.o_proj.bias" in names,
        mlp_bias="model.layers.0.mlp.up_proj.bias" in names,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in names,
        windows=(getattr(c, "sliding_window", None) or 0,) * c.num_hidden_layers,
        moe=None,
        eos_ids=(),
        bos_id=None,
        dtype="float32",
    )


def empty(config: ModelConfig, scheme: Scheme = "none", threads: int = 2, kv: KVFormat = "bf16") -> NativeModel:
    frequencies = inverse_frequencies(config)
    return NativeModel(config, frequencies, scheme=scheme, block_size=BLOCK, num_blocks=128, threads=threads, kv=kv)


def arrays_of(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    return ((name, tensor.numpy()) for name, tensor in model.state_dict().items())


def build(model: Any, scheme: Scheme = "none", threads: int = 2, kv: KVFormat = "bf16") -> NativeModel:
    native_model = empty(shape(model), scheme, threads, kv)
    native_model.load(arrays_of(model))
    return native_model


Given = tuple[NativeStep, NativeRows]


def logits_of(runner: NativeModel, given: Given) -> np.ndarray:
    """To keep: a model writes the logits of its next call into the same memory."""
    return runner.forward(*given)[0].copy()


def expected(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(torch.tensor(tokens)[None]).logits[0])


def step(parts: list[tuple[np.ndarray, int, list[int]]], last_only: bool = False) -> Given:
    """From (new tokens, their first position, block table) of each sequence."""
    counts = [len(tokens) for tokens, _, _ in parts]
    width = max(len(table) for _, _, table in parts)
    tables = np.array([table + [0] * (width - len(table)) for _, _, table in parts], dtype=np.int32)
    native_step = NativeStep(
        tokens=np.concatenate([tokens for tokens, _, _ in parts]).tolist(),
        rows=range(len(parts)),
        starts=[first for _, first, _ in parts],
        counts=counts,
        logit_rows=[end - 1 for end in accumulate(counts)] if last_only else range(sum(counts)),
    )
    return native_step, NativeRows(tables, np.zeros(len(parts), dtype=np.int32))


def limit(kv: KVFormat = "bf16") -> float:
    """Of the error of a model in bfloat16, by what else is rounded: activations with some instructions, the cache."""
    return 0.05 if bindings.isa() in ("avx512bf16", "amx") else {"bf16": 0.01, "int8": 0.05}[kv]


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2)) / want.std())


@pytest.fixture(params=get_args(bindings.Isa))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    best = bindings.isa()
    try:
        bindings.set_isa(request.param)
    except StartupError:
        pytest.skip(f"no {request.param} here")
    yield request.param
    bindings.set_isa(best)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", get_args(Scheme))
def test_logits_match_transformers(kind: str, scheme: Scheme) -> None:
    model = reference(kind, scheme)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 75)
    logits, argmax = build(model, scheme).forward(*step([(tokens, 0, [9, 3, 7, 1, 4])]))
    assert relative_error(logits, expected(model, tokens)) < (limit() if scheme == "none" else 0.06)
    assert (argmax == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_decoder_matches_transformers(kind: str) -> None:
    """Whatever the order in which a checkpoint holds its tensors."""
    model = reference(kind)
    config, tokens = shape(model), np.random.default_rng(7).integers(0, VOCAB, 75)
    decoder = ReferenceDecoder(config, inverse_frequencies(config))
    weights = sorted(arrays_of(model), key=lambda named: named[0], reverse=True)
    found = stages(untied(iter(weights)) if config.tie_embeddings else iter(weights), tensor_shapes(config))
    x = next(found)[1]["model.embed_tokens.weight"][tokens]
    for number in range(config.num_layers):
        prefix, tensors = next(found)
        assert prefix == f"model.layers.{number}."
        x, _ = decoder.layer(number, tensors, x)
    _, output = next(found)
    logits = decoder.normed(x) * output["model.norm.weight"] @ output["lm_head.weight"].T
    assert relative_error(logits, expected(model, tokens)) < 1e-5


@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
def test_every_isa_computes_the_same(isa: str, scheme: Scheme) -> None:
    model = reference("llama")
    tokens = np.random.default_rng(2).integers(0, VOCAB, 40)
    logits, _ = build(model, scheme).forward(*step([(tokens, 0, [2, 5, 8])]))
    bindings.set_isa("portable")
    plain, _ = build(model, scheme).forward(*step([(tokens, 0, [2, 5, 8])]))
    # A rounding may fall the other way, and grow: 12 prompts gave 0.005 to 0.03.
    assert relative_error(logits, plain) < 0.06


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kv", get_args(KVFormat))
def test_chunks_decodes_and_shared_blocks_in_one_step(isa: str, kind: str, threads: int, kv: KVFormat) -> None:
    """Two sequences share their first two blocks; one is filled in chunks while the other decodes."""
    model = reference(kind)
    rng = np.random.default_rng(4)
    shared, a_tail, b_tail = rng.integers(0, VOCAB, 32), rng.integers(0, VOCAB, 9), rng.integers(0, VOCAB, 21)
    a, b = np.concatenate((shared, a_tail)), np.concatenate((shared, b_tail))
    a_table, b_table = [6, 2, 11], [6, 2, 40, 12]
    runner = build(model, threads=threads, kv=kv)
    both = logits_of(
        runner, step([(a[:34], 0, a_table), (b[32:37], 32, b_table)])
    )  # b reads what a writes in this step
    more = logits_of(
        runner, step([(a[34:35], 34, a_table), (b[37:38], 37, b_table), (rng.integers(0, VOCAB, 3), 0, [50])])
    )
    rest = logits_of(runner, step([(b[38:], 38, b_table), (a[35:36], 35, a_table)]))
    want_a, want_b = expected(model, a), expected(model, b)
    got = np.concatenate((both, more[:2], rest))
    want = np.concatenate((want_a[:34], want_b[32:37], want_a[34:35], want_b[37:38], want_b[38:], want_a[35:36]))
    assert relative_error(got, want) < limit(kv)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("kv", get_args(KVFormat))
def test_a_long_decode_is_split_over_keys(isa: str, kind: str, kv: KVFormat) -> None:
    model = reference(kind)
    tokens = np.random.default_rng(5).integers(0, VOCAB, 701)
    table = list(range(100, 100 - 44, -1))
    runner = build(model, kv=kv)
    runner.forward(*step([(tokens[:700], 0, table)], last_only=True))
    logits, _ = runner.forward(*step([(tokens[700:], 700, table)]))
    assert relative_error(logits, expected(model, tokens)[700:]) < limit(kv)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kv", get_args(KVFormat))
def test_sequences_that_begin_alike_decode_together(isa: str, kind: str, threads: int, kv: KVFormat) -> None:
    """Runs of them, one interrupted by a stranger; tails from one token to several blocks; one shares less."""
    model, rng = reference(kind), np.random.default_rng(8)
    beginning, free = rng.integers(0, VOCAB, 19 * BLOCK), iter(range(19, 128))

    def sequence(shared_blocks: int, tail: int) -> tuple[np.ndarray, list[int]]:
        tokens = np.concatenate((beginning[: shared_blocks * BLOCK], rng.integers(0, VOCAB, tail)))
        return tokens, [*range(shared_blocks), *(next(free) for _ in range(-(-tail // BLOCK)))]

    shapes = [(19, 1), (19, 30), (19, 2), (0, 40), (19, 17), (19, 150), (10, 5), (10, 33), (19, 16), (19, 3)]
    sequences = [sequence(*shape) for shape in shapes]
    runner = build(model, threads=threads, kv=kv)
    runner.forward(*step([(tokens[:-1], 0, table) for tokens, table in sequences], last_only=True))
    want = np.stack([expected(model, tokens)[-1] for tokens, _ in sequences])
    for together in (len(sequences), 2):
        newest = [(tokens[-1:], len(tokens) - 1, table) for tokens, table in sequences[:together]]
        decoded = logits_of(runner, step(newest))
        for row in range(together):
            assert relative_error(decoded[row], want[row]) < 1.5 * limit(kv), shapes[row]


def test_an_outlier_among_the_keys_leaves_int8_precise() -> None:
    """Qwen2's biases make some channels of every key many times larger than the rest."""
    model, tokens = reference("qwen2"), np.random.default_rng(9).integers(0, VOCAB, 120)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[::32] = 40.0
    logits, _ = build(model, kv="int8").forward(*step([(tokens, 0, list(range(8)))]))
    assert relative_error(logits, expected(model, tokens)) < 0.1  # 0.18 if they are not spread, 0.03 in bf16


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_what_lies_in_unwritten_slots_never_matters(isa: str, count: int, kv: KVFormat) -> None:
    runner = build(reference("llama"), kv=kv)
    tokens = np.random.default_rng(6).integers(0, VOCAB, count)
    clean = logits_of(runner, step([(tokens, 0, [3, 4, 5])]))
    assert runner.block_bytes == runner._library.penstock_model_block_bytes(runner._handle)
    ctypes.memset(runner._library.penstock_model_cache(runner._handle), 0xFF, runner.cache_bytes)  # bfloat16 NaNs
    poisoned = logits_of(runner, step([(tokens, 0, [3, 4, 5])]))
    np.testing.assert_array_equal(poisoned, clean)


def test_greedy_choice_prefers_the_first_of_equals() -> None:
    model = reference("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[100:] = model.model.embed_tokens.weight[99]
    logits, argmax = build(model).forward(*step([(np.arange(20), 0, [1, 2])]))
    assert (argmax == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_near_equals_of_an_output_projection_in_int8_are_told_apart(isa: str, scheme: Scheme) -> None:
    """Half of the vocabulary differs by less than int8 does from it; the embedding, which is exact, decides."""
    model, tokens = reference("llama", scheme), np.random.default_rng(3).integers(0, 100, 60)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[100:] = (4 * embedding[100] + 0.003 * torch.randn(VOCAB - 100, embedding.shape[1])).bfloat16().float()
    runner, arrays = build(model, scheme), step([(tokens, 0, [1, 2, 3, 4])])
    logits, argmax = runner.forward(*arrays)
    assert (argmax == logits.argmax(axis=1)).all()
    wanted = expected(model, tokens)
    clear = wanted.argmax(axis=1) >= 100
    assert clear.sum() > 5
    assert (np.array(argmax)[clear] == wanted.argmax(axis=1)[clear]).mean() > 0.8


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_argmax_needs_no_logits(isa: str, rows: int) -> None:
    """The argmax of each thread's columns, put together, over a vocabulary that is no multiple of a panel."""
    runner = build(reference("llama"), "int8")
    arrays = step([(np.arange(rows), 0, [1, 2, 3])])
    logits, with_logits = runner.forward(*arrays)
    expected = logits.argmax(axis=1)
    none, without = runner.forward(*arrays, logits=False)
    assert len(none) == 0
    np.testing.assert_array_equal(with_logits, expected)
    np.testing.assert_array_equal(without, expected)


def test_a_packed_file_brings_the_same_weights_back(tmp_path: Path) -> None:
    model = reference("qwen3")
    tokens = step([(np.arange(30), 0, [1, 2])])
    first = build(model, "int8")
    first.save_packed(tmp_path / "weights", "checkpoint-1")
    second = empty(shape(model), "int8")
    assert second.load_packed(tmp_path / "weights", "checkpoint-1")
    np.testing.assert_array_equal(first.forward(*tokens)[0], second.forward(*tokens)[0])


def test_a_packed_file_of_something_else_is_not_used(tmp_path: Path) -> None:
    model = reference("llama")
    path = tmp_path / "weights"
    build(model, "int8").save_packed(path, "checkpoint-1")
    assert not empty(shape(model), "int8").load_packed(path, "checkpoint-2")
    assert not empty(shape(model), "int4").load_packed(path, "checkpoint-1")
    assert not empty(shape(model), "int8").load_packed(tmp_path / "absent", "checkpoint-1")


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_damaged_packed_file_is_not_used(tmp_path: Path, scheme: Scheme) -> None:
    path = tmp_path / "weights"
    written = build(reference("llama"), scheme)
    written.save_packed(path, "checkpoint-1")
    whole = path.read_bytes()
    begin, end = ALIGNMENT, ALIGNMENT + written.weight_bytes
    everywhere = bytearray(whole)
    everywhere[begin:end] = bytes(byte ^ 0xFF for byte in whole[begin:end])
    flips = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (begin, (begin + end) // 2, end - 1, end)]
    for damaged in (whole[:-1], whole[:begin], bytes(everywhere), *flips):
        path.write_bytes(damaged)
        loaded = empty(shape(reference("llama")), scheme)
        with pytest.raises(StartupError, match="damaged: the checksums do not match"):
            loaded.load_packed(path, "checkpoint-1")
        loaded.load(arrays_of(reference("llama")))  # which leaves nothing of the damaged file, not even in padding
        loaded.save_packed(path, "checkpoint-1")
        assert path.read_bytes() == whole


def test_what_killed_processes_left_behind_is_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    path = tmp_path / "weights"
    ours, theirs = (tmp_path / f"weights.{pid}.partial" for pid in (os.getppid(), dead.pid))
    for partial in (ours, theirs):
        partial.touch()
    build(reference("llama"), "int8").save_packed(path, "checkpoint-1")
    assert set(tmp_path.iterdir()) == {path, ours}


def test_incomplete_or_wrong_checkpoints_are_named() -> None:
    model = reference("llama")
    weights = dict(arrays_of(model))
    with pytest.raises(
        StartupError, match="lacks 1 tensors, such as model.layers.1.mlp.up_proj.weight".replace(".", r"\.")
    ):
        empty(shape(model)).load((n, t) for n, t in weights.items() if n != "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(StartupError, match=r"q_proj.weight has shape \[5, 96\], expected \[192, 96\]"):
        empty(shape(model)).load(
            iter([("model.layers.0.self_attn.q_proj.weight", np.zeros((5, 96), dtype=np.float32))])
        )
    with pytest.raises(StartupError, match=r"q_proj.bias is not part of a model with this configuration"):
        empty(shape(model)).load(iter([("model.layers.0.self_attn.q_proj.bias", np.zeros(192, dtype=np.float32))]))
    with pytest.raises(StartupError, match=r"layers.9.* is not part of a model"):
        empty(shape(model)).load(iter([("model.layers.9.mlp.up_proj.weight", np.zeros((136, 96), dtype=np.float32))]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", [VOCAB, 1], "outside the vocabulary"),
        ("tokens", [-2, 1], "outside the vocabulary"),
        ("tokens", [-1, 1], "outside the vocabulary"),
        ("tokens", [1, 2, 3], "make up all tokens"),
        ("rows", [2], "rows of the tables"),
        ("rows", [-1], "rows of the tables"),
        ("rows", [1], "unknown blocks"),
        ("starts", [15], "fit its table"),
        ("starts", [-1], "starts must not be negative"),
        ("starts", [0, 1], "the same sequences"),
        ("counts", [3], "make up all tokens"),
        ("counts", [0], "make up all tokens"),
        ("logit_rows", [2], "indices of tokens"),
    ],
)
def test_a_step_that_would_leave_its_memory_is_refused(field: str, value: list[int], message: str) -> None:
    runner = empty(shape(reference("llama")))
    rows = NativeRows(np.array([[1], [128]], dtype=np.int32), np.array([VOCAB, 0], dtype=np.int32))
    good = NativeStep([1, 2], rows=[0], starts=[0], counts=[2], logit_rows=[1])
    with pytest.raises(EngineFailure, match=message):
        runner.forward(replace(good, **{field: value}), rows)


def test_a_step_takes_the_token_its_row_chose_last() -> None:
    """As a step does that is described before the one before it has been computed."""
    runner = build(reference("llama"))
    tables, tokens = [[3, 4], [1, 2]], np.random.default_rng(6).integers(0, VOCAB, (2, 20))
    first, rows = step([(row, 0, table) for row, table in zip(tokens, tables, strict=True)], last_only=True)
    _, chosen = runner.forward(first, rows)
    assert rows.last_token_R.tolist() == chosen
    swapped = NativeStep([-1, -1], rows=[1, 0], starts=[20, 20], counts=[1, 1], logit_rows=[0, 1])
    got = logits_of(runner, (swapped, rows))
    spelled_out = [(np.array([chosen[row]]), 20, tables[row]) for row in (1, 0)]
    np.testing.assert_array_equal(got, logits_of(runner, step(spelled_out)))
