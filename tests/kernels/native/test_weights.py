"""Loading weights into a native model: from checkpoints that may be wrong, and packed files that may be damaged."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import StartupError
from penstock.kernels.native import bindings
from penstock.kernels.native.bindings import Scheme
from penstock.kernels.native.model import ALIGNMENT
from tests.kernels.native.random_models import arrays_of, build, empty, reference, shape, step

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))


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
