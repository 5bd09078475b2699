"""Adapter folders: what is read of them, what they are known by, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.errors import InvalidRequest
from penstock.lora.checkpoint import adapter_digest, read_adapter, summarize_adapter
from penstock.lora.fit import check_fit, modules_of, projections
from tests.lora.peft_folder import BASE, MODEL, PREFIX, write_adapter

Q0, DOWN0 = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
WEIGHTS = "adapter_model.safetensors"


def refused(folder: Path, message: str) -> None:
    for read in (summarize_adapter, read_adapter):
        with pytest.raises(InvalidRequest, match=re.escape(message)) as caught:
            read(folder)
        assert caught.value.code == "invalid_adapter"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_read_exactly_and_scaled(tmp_path: Path, dtype: torch.dtype) -> None:
    write_adapter(tmp_path, BASE)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    save_file(tensors, tmp_path / WEIGHTS)
    weights = read_adapter(tmp_path)
    assert weights.rank == 4
    assert len(weights.modules) == 6
    a, b = weights.modules[Q0]
    np.testing.assert_array_equal(a, tensors[f"{PREFIX}{Q0}.lora_A.weight"].float().numpy())
    np.testing.assert_array_equal(b, tensors[f"{PREFIX}{Q0}.lora_B.weight"].float().numpy() * 2)  # alpha / rank
    assert a.dtype == b.dtype == np.float32


def test_ranks_and_scales_by_pattern(tmp_path: Path) -> None:
    """The first pattern that matches counts; plain names match the end of a module's name."""
    patterns: dict[str, Any] = {
        "rank_pattern": {Q0: 3, r"layers\.1\.self_attn\.(q|v)_proj": 5},
        "alpha_pattern": {"down_proj": 7, r".*\.v_proj": 11, "layers.0.self_attn.v_proj": 13},
    }
    ranks = {Q0: 3} | {f"model.layers.1.self_attn.{kind}_proj": 5 for kind in "qv"}
    folder = write_adapter(tmp_path, BASE, ranks=ranks, use_rslora=True, **patterns)
    config = summarize_adapter(folder).config
    scales = {name.removeprefix("model.layers."): config.scale_of(name) for name in read_adapter(folder).modules}
    assert scales == pytest.approx(
        {
            "0.self_attn.q_proj": 8 / sqrt(3),
            "0.self_attn.v_proj": 11 / sqrt(4),
            "0.mlp.down_proj": 7 / sqrt(4),
            "1.self_attn.q_proj": 8 / sqrt(5),
            "1.self_attn.v_proj": 11 / sqrt(5),
            "1.mlp.down_proj": 7 / sqrt(4),
        }
    )
    assert read_adapter(folder).rank == summarize_adapter(folder).rank == 5


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "first", BASE, seed=1)
    digest = adapter_digest(first)
    assert digest == read_adapter(first).digest
    shutil.copytree(first, tmp_path / "copy")
    assert adapter_digest(tmp_path / "copy") == digest
    described = write_adapter(tmp_path / "described", BASE, seed=1, base_model_name_or_path="x", lora_dropout=0.1)
    assert adapter_digest(described) == digest
    others = [
        write_adapter(tmp_path / "weights", BASE, seed=2),
        write_adapter(tmp_path / "alpha", BASE, seed=1, lora_alpha=9),
        write_adapter(tmp_path / "scale", BASE, seed=1, use_rslora=True),
        write_adapter(tmp_path / "pattern", BASE, seed=1, alpha_pattern={"q_proj": 9}),
    ]
    assert len({digest, *map(adapter_digest, others)}) == 5


def test_the_digest_sees_every_byte_of_a_large_file(tmp_path: Path) -> None:
    wide = {name: (inputs * 4096, outputs) for name, (inputs, outputs) in BASE.items()}
    folder = write_adapter(tmp_path, wide)
    path = folder / WEIGHTS
    data = bytearray(path.read_bytes())
    assert len(data) > 3 * 2**20
    digests = {adapter_digest(folder)}
    for at in (len(data) // 2, len(data) - 1):
        data[at] ^= 1
        path.write_bytes(data)
        digests.add(adapter_digest(folder))
        assert read_adapter(folder).digest in digests
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported; supported: 'LORA'"),
        ({"use_dora": True}, "use_dora True is not supported (DoRA"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported (trained biases"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head'] is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication [[0, 2]] is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices [1] is not supported"),
        ({"target_parameters": ["experts"]}, "target_parameters ['experts'] is not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens [1] is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"r": 0}, "r must be a whole number from 1"),
        ({"r": True}, "r must be a whole number from 1"),
        ({"lora_alpha": None}, "lora_alpha must be a number, not None"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number, not nan"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must map"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern must map"),
        ({"alpha_pattern": {"(.+)+q": 8}}, "no group repeated"),
        ({"alpha_pattern": {".*.*.*.*q": 8}}, "no group repeated"),
        ({"alpha_pattern": {"(a|a)(a|a)(a|a)(a|a)": 8}}, "no group repeated"),
        ({"alpha_pattern": {"[q": 8}}, "no regular expression"),
        ({"alpha_pattern": {f"q{n}$": 8 for n in range(65)}}, "65 regular expressions; supported: 64"),
        ({"r": 8}, f"module {DOWN0} has A [4, 12] and B [8, 4], and adapter_config.json gives it rank 8"),
    ],
)
def test_configurations_that_need_more_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    refused(write_adapter(tmp_path, BASE, **fields), message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{PREFIX}model.embed_tokens.lora_embedding_A", "is not supported (an adapter of the embedding)"),
        (f"{PREFIX}{Q0}.lora_magnitude_vector", "is not supported (DoRA)"),
        (f"{PREFIX}{Q0}.lora_B.bias", "is not supported (a bias of lora_B)"),
        (f"{PREFIX}lm_head.weight", "is not supported (no part of LoRA)"),
        (f"{Q0}.lora_A.weight", "is not supported (no part of LoRA)"),
        (f"{PREFIX}model.layers.0.self_attn.k_proj.lora_A.weight", "has only one of lora_A and lora_B"),
        (f"{PREFIX}{'a.' * 100}q_proj.lora_A.weight", "has shape [4, 4]; supported are"),
    ],
)
def test_tensors_that_are_not_a_and_b_are_refused(tmp_path: Path, name: str, message: str) -> None:
    folder = write_adapter(tmp_path, BASE)
    save_file(load_file(folder / WEIGHTS) | {name: torch.zeros(4, 4)}, folder / WEIGHTS)
    refused(folder, message)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, BASE)
    tensors = load_file(folder / WEIGHTS)
    tensors[f"{PREFIX}{Q0}.lora_B.weight"][0, 0] = float("nan")
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(InvalidRequest, match=f"module {Q0} has values that are not finite"):
        read_adapter(folder)


def header_of(entry: dict[str, Any], extra: bytes = b"") -> bytes:
    header = json.dumps({f"{PREFIX}{Q0}.lora_A.weight": {"dtype": "F32"} | entry}).encode()
    return len(header).to_bytes(8, "little") + header + extra


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot read"),
        (b"\xff" * 8, "cannot read"),
        (b"\x02\0\0\0\0\0\0\0[]", "cannot read"),
        ((10**6).to_bytes(8, "little") + b"[" * 10**6, "cannot read"),
        (b"\x02\0\0\0\0\0\0\0{}", "has no tensors"),
        (header_of({"shape": [4, 8], "data_offsets": [0, 128]}), "it ends before"),
        (header_of({"shape": [4, 8], "data_offsets": [0, 4]}, bytes(4)), "has 4 bytes, and its shape [4, 8] 128"),
        (header_of({"shape": [4, 8], "data_offsets": [-128, 0]}), "has 128 bytes"),
        (header_of({"shape": [-4, -8], "data_offsets": [0, 128]}, bytes(128)), "has 128 bytes"),
        (header_of({"shape": [4, 8], "data_offsets": [0, 32], "dtype": "I8"}, bytes(32)), "dtype I8; supported: F32"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    folder = write_adapter(tmp_path, BASE)
    (folder / WEIGHTS).write_bytes(data)
    refused(folder, message)


def test_what_is_not_a_file_of_weights_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "adapter_config.json: No such file or directory")
    folder = write_adapter(tmp_path, BASE)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    refused(folder, "adapter_model.bin is not read")
    os.mkfifo(folder / WEIGHTS)
    refused(folder, "must be a file of at most")
    (folder / "adapter_config.json").write_bytes(b" " * (2**20 + 1))
    refused(folder, "adapter_config.json must be a file of at most 1,048,576 bytes")
    (folder / "adapter_config.json").write_text("[]")
    refused(folder, "adapter_config.json must hold a JSON object")
    (folder / "adapter_config.json").write_text("{")
    refused(folder, "adapter_config.json is not JSON")


def test_an_adapter_of_the_model_fits(tmp_path: Path) -> None:
    everything = tuple({name.rpartition(".")[2] for name in BASE})
    weights = read_adapter(write_adapter(tmp_path, BASE, kinds=everything))
    assert weights.modules.keys() == BASE.keys()
    check_fit(modules_of(weights), BASE, max_rank=4)
    assert modules_of(weights) == summarize_adapter(tmp_path).modules


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    modules = summarize_adapter(write_adapter(tmp_path, BASE)).modules

    def misfit(message: str, max_rank: int = 64, **changed: Any) -> None:
        model: Any = SimpleNamespace(**(vars(MODEL) | changed))
        with pytest.raises(InvalidRequest, match=re.escape(message)):
            check_fit(modules, projections(model), max_rank)

    misfit(f"the adapter's rank is 4 at {DOWN0}; supported: up to 2", max_rank=2)
    misfit(f"its {DOWN0} has 12 inputs and 8 outputs, the model's has 12 and 16", hidden_size=16)
    misfit("changes model.layers.1.mlp.down_proj, which is no linear layer", num_layers=1)
    misfit("supported: k_proj, o_proj, q_proj, v_proj of layers 0 to 1", moe=object())
