"""Whole steps of the native model against transformers, for each architecture it covers."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from penstock.core.errors import EngineFailure
from penstock.engine.executor import NOT_A_NUMBER
from penstock.kernels.native import bindings
from penstock.kernels.native.bindings import KVFormat, Scheme
from penstock.kernels.native.decoder_reference import ReferenceDecoder, stages, untied
from penstock.kernels.native.model import NativeRows, NativeStep
from penstock.kernels.native.shape import tensor_shapes
from penstock.models.frequencies import inverse_frequencies
from tests.kernels.native.random_models import (
    BLOCK,
    KINDS,
    VOCAB,
    arrays_of,
    build,
    empty,
    expected,
    logits_of,
    reference,
    shape,
    step,
)

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))


def limit(kv: KVFormat = "bf16") -> float:
    """Of the error of a model in bfloat16, by what else is rounded: activations with some instructions, the cache."""
    return 0.05 if bindings.isa() in ("avx512bf16", "amx") else {"bf16": 0.01, "int8": 0.05}[kv]


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2)) / want.std())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", get_args(Scheme))
def test_logits_match_transformers(kind: str, scheme: Scheme) -> None:
    model = reference(kind, scheme)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 75)
    logits, argmax = build(model, scheme).forward(*step([(tokens, 0, [9, 3, 7, 1, 4])]))
    assert relative_error(logits, expected(model, tokens)) < (limit() if scheme == "none" else 0.06)
    assert (argmax == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("scheme", get_args(Scheme))
def test_the_first_layers_alone(scheme: Scheme) -> None:
    """After a prompt that all layers have computed, a token that stops after two of three."""
    model = reference("llama", scheme)
    tokens, table = np.random.default_rng(1).integers(0, VOCAB, 40), [9, 3, 7]
    native = build(model, scheme)
    native.forward(*step([(tokens[:-1], 0, table)]))
    last, rows = step([(tokens[-1:], 39, table)])
    logits, _ = native.forward(replace(last, layers=2), rows)
    model.model.layers = model.model.layers[:2]
    assert relative_error(logits, expected(model, tokens)[-1:]) < (limit() if scheme == "none" else 0.06)
    with pytest.raises(EngineFailure, match="layers"):
        native.forward(replace(last, layers=4), rows)


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
    assert runner.block_bytes == runner.library.penstock_model_block_bytes(runner.handle)
    ctypes.memset(runner.library.penstock_model_cache(runner.handle), 0xFF, runner.cache_bytes)  # bfloat16 NaNs
    poisoned = logits_of(runner, step([(tokens, 0, [3, 4, 5])]))
    np.testing.assert_array_equal(poisoned, clean)


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_a_block_lies_in_one_piece(kv: KVFormat) -> None:
    """So the first request takes memory for its own blocks, not for a part of every layer's."""
    runner = build(reference("llama"), kv=kv)
    cache = (ctypes.c_uint8 * runner.cache_bytes).from_address(runner.library.penstock_model_cache(runner.handle))
    runner.forward(*step([(np.arange(20), 0, [3, 4])]))
    written = np.flatnonzero(np.ctypeslib.as_array(cache)) // runner.block_bytes
    assert set(written) == {3, 4}


def test_greedy_choice_prefers_the_first_of_equals() -> None:
    model = reference("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[100:] = model.model.embed_tokens.weight[99]
    logits, argmax = build(model).forward(*step([(np.arange(20), 0, [1, 2])]))
    assert (argmax == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("scheme", get_args(Scheme))
def test_a_row_without_numbers_has_no_token(isa: str, scheme: Scheme) -> None:
    """And its neighbours have theirs."""
    model = reference("llama", scheme)
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
    runner, healthy = build(model, scheme), step([(np.array([9, 8]), 0, [2])], last_only=True)
    _, alone = runner.forward(*healthy)
    _, tokens = runner.forward(*step([(np.array([5]), 0, [1]), (np.array([9, 8]), 0, [2])], last_only=True))
    assert tokens == [NOT_A_NUMBER, *alone]


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
        ("targets", [VOCAB], "outside the vocabulary"),
        ("targets", [1, 2], "all logit rows"),
    ],
)
def test_a_step_that_would_leave_its_memory_is_refused(field: str, value: list[int], message: str) -> None:
    runner = empty(shape(reference("llama")))
    rows = NativeRows(np.array([[1], [128]], dtype=np.int32), np.array([VOCAB, 0], dtype=np.int32))
    good = NativeStep([1, 2], rows=[0], starts=[0], counts=[2], logit_rows=[1])
    changed: dict[str, Any] = {field: value}
    with pytest.raises(EngineFailure, match=message):
        runner.forward(replace(good, **changed), rows)


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
