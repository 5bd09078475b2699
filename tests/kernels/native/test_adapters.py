"""LoRA in native memory: adapters, mixed in one step, against the same model with each merged into its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.kernels.native import bindings
from penstock.kernels.native.adapters import NativeAdapter
from penstock.kernels.native.bindings import KVFormat, Scheme
from penstock.kernels.native.model import NativeModel, NativeRows, NativeStep
from penstock.kernels.native.shape import adapter_modules
from tests.kernels.native.random_models import BLOCK, build, expected, reference, shape, step

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Modules = dict[str, tuple[np.ndarray, np.ndarray]]


def drawn_adapter(model: Any, seed: int, rank: int = 5, kinds: tuple[str, ...] = KINDS) -> Modules:
    """Large enough to change the logits a lot."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            rng.normal(0, 0.15 / np.sqrt(inputs), (rank, inputs)).astype(np.float32),
            rng.normal(0, 1.0, (outputs, rank)).astype(np.float32),
        )
        for name, (inputs, outputs) in adapter_modules(shape(model)).items()
        if name.endswith(kinds)
    }


def merged(kind: str, scheme: Scheme, modules: Modules) -> Any:
    model = reference(kind, scheme)
    with torch.no_grad():
        for name, (a, b) in modules.items():
            model.get_submodule(name).weight += torch.from_numpy(b @ a)
    return model


def fill(runner: NativeModel, slot: int, modules: Modules) -> None:
    NativeAdapter(runner, max((len(a) for a, _ in modules.values()), default=1), modules).use(slot)


Part = tuple[np.ndarray, int, list[int], int]  # tokens, first position, block table, slot


def adapted(parts: list[Part], last_only: bool = False) -> tuple[NativeStep, NativeRows]:
    native, rows = step([part[:3] for part in parts], last_only)
    slots = np.array([slot for *_, slot in parts], dtype=np.int32)
    return native, NativeRows(rows.tables_RM, rows.last_token_R, None, slots)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


@pytest.mark.parametrize(
    ("kind", "scheme", "kv", "least"),
    [
        ("llama", "none", "bf16", 0.9995),
        ("llama", "int8", "bf16", 0.997),
        ("llama_biases", "int8", "int8", 0.997),
        ("qwen3", "int8", "int8", 0.997),
        ("qwen2", "int4", "int8", 0.99),
        ("llama_biases", "none", "bf16", 0.9995),
    ],
)
def test_adapters_mixed_in_a_step_give_what_merged_ones_give(
    isa: str, kind: str, scheme: Scheme, kv: KVFormat, least: float
) -> None:
    model, rng = reference(kind, scheme), np.random.default_rng(1)
    adapters = [drawn_adapter(model, 1), drawn_adapter(model, 2, 20, ("q_proj", "v_proj")), drawn_adapter(model, 3, 33)]
    runner = build(model, scheme, 2, kv)
    for slot, modules in enumerate(adapters):
        fill(runner, slot, modules)
    references = [merged(kind, scheme, modules) for modules in adapters] + [model]
    slots = [2, -1, 0, 1, 0]
    tokens = [rng.integers(0, runner.config.vocab_size, 30) for _ in slots]
    given = [(t, 0, [2 * i, 2 * i + 1], slot) for i, (t, slot) in enumerate(zip(tokens, slots, strict=True))]
    got = runner.forward(*adapted(given))[0].reshape(len(slots), 30, -1)
    base = expected(model, tokens[0])
    for i, slot in enumerate(slots):
        want = expected(references[slot], tokens[i])
        assert correlation(got[i], want) > least, (i, slot)
    assert correlation(base, expected(references[2], tokens[0])) < 0.9, "the adapter changes hardly anything"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("scheme", ["int8", "none"])
def test_each_module_by_itself(name: str, scheme: Scheme) -> None:
    model = reference("llama", scheme)
    modules = drawn_adapter(model, 4, 16, (name,))
    runner, tokens = build(model, scheme), np.random.default_rng(2).integers(0, 211, 40)
    fill(runner, 3, modules)
    plain = runner.forward(*adapted([(tokens, 0, [0, 1, 2], -1)]))[0].copy()
    got = runner.forward(*adapted([(tokens, 0, [0, 1, 2], 3)]))[0]
    want, base = expected(merged("llama", scheme, modules), tokens), expected(model, tokens)
    assert correlation(got - plain, want - base) > (0.97 if scheme == "int8" else 0.995)


@pytest.mark.parametrize(("scheme", "kv"), [("int8", "int8"), ("int4", "int8"), ("none", "bf16")])
def test_numbers_do_not_depend_on_the_batch(isa: str, scheme: Scheme, kv: KVFormat) -> None:
    """Of a sequence with an adapter, and of one without beside it."""
    if isa == "amx" and scheme == "none":
        pytest.skip("tiles sum bfloat16 products in another order than vectors")
    model, rng = reference("llama", scheme), np.random.default_rng(3)
    runner = build(model, scheme, 2, kv)
    for slot in range(3):
        fill(runner, slot, drawn_adapter(model, slot, 7 + 9 * slot))
    tokens = rng.integers(0, runner.config.vocab_size, 70)
    for slot in (1, -1):
        table = [0, 1, 2, 3, 4]
        alone = [runner.forward(*adapted([(tokens[i : i + 1], i, table, slot)]))[0].copy() for i in range(70)]
        at, found = 0, []
        while at < 70:
            count = min(70 - at, int(rng.choice([1, 2, 5, 20])))
            others: list[Part] = [
                (rng.integers(0, 211, n), 0, [10 + 2 * i, 11 + 2 * i], int(rng.integers(-1, 3)))
                for i, n in enumerate(rng.choice([1, 1, 3, 17], int(rng.integers(0, 9))))
            ]
            place = int(rng.integers(0, len(others) + 1))
            parts = [*others[:place], (tokens[at : at + count], at, table, slot), *others[place:]]
            first = sum(len(part[0]) for part in parts[:place])
            found.append(runner.forward(*adapted(parts))[0][first : first + count].copy())
            at += count
        assert np.array_equal(np.concatenate(found).view(np.int32), np.concatenate(alone).view(np.int32)), slot


def test_a_slot_is_filled_anew() -> None:
    model = reference("llama", "int8")
    runner, tokens = build(model, "int8"), np.arange(2 * BLOCK)
    first, second = drawn_adapter(model, 5, 40), drawn_adapter(model, 6, 3, ("o_proj",))
    fill(runner, 0, second)
    want = runner.forward(*adapted([(tokens, 0, [0, 1], 0)]))[0].copy()
    fill(runner, 0, first)
    assert not np.array_equal(runner.forward(*adapted([(tokens, 0, [0, 1], 0)]))[0], want)
    fill(runner, 0, second)
    assert np.array_equal(runner.forward(*adapted([(tokens, 0, [0, 1], 0)]))[0], want)
