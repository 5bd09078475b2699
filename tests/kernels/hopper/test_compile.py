"""NVRTC, the compiler that users have, takes the CUDA kernels as they are specialised for common models."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.kernels.hopper import program

# GEMMs: of 32 rows with a norm to defer, of 192 with a deferred norm to apply, the same in fp8, and logits.
PLAIN = {"FP8": 0, "GATED": 0, "ADD": 0, "WIDE": 0, "APPLIES_NORM": 0, "DEFERS_NORM": 0, "LORA": 0}
PERSISTENT = {"STAGES": 4, "FP8": 0, "GATED": 0, "ADD": 0, "APPLIES_NORM": 0, "SPLITS": 1, "EXACT": 0}
LLAMA = {"HIDDEN": 4096, "INNER": 14336, "HEADS": 32, "KV_HEADS": 8, "HEAD_NORM": 0, "CTAS": 132, "IN_FLIGHT": 4}
QWEN = {"HIDDEN": 1024, "INNER": 3072, "HEADS": 16, "KV_HEADS": 8, "HEAD_NORM": 1, "CTAS": 132, "IN_FLIGHT": 2}
VARIANTS = [
    ("activation.cu", {"WIDTH": 14336, "GATED": 1, "SCALED": 1}),
    ("activation.cu", {"WIDTH": 14336, "GATED": 0, "SCALED": 0}),
    ("decode.cu", {"GROUP": 4, "KV_HEADS": 8, "ROTARY": 128, "NORM": 0, "FP8": 1, "STAGES": 4, "NEW": 1}),
    ("decode.cu", {"GROUP": 2, "KV_HEADS": 8, "ROTARY": 128, "NORM": 1, "FP8": 0, "STAGES": 3, "NEW": 1}),
    ("persistent_gemm.cu", PERSISTENT | {"TILE": 256, "COMMON_ROWS": 0, "FP8": 1, "GATED": 1}),
    ("persistent_gemm.cu", PERSISTENT | {"TILE": 224, "COMMON_ROWS": 1, "GATED": 1}),
    ("persistent_gemm.cu", PERSISTENT | {"TILE": 128, "COMMON_ROWS": 0, "ADD": 1, "SPLITS": 2, "EXACT": 1}),
    ("persistent_gemm.cu", PERSISTENT | {"TILE": 256, "COMMON_ROWS": 0, "APPLIES_NORM": 1, "EXACT": 1}),
    ("gemm.cu", PLAIN | {"ROWS": 32, "TILE": 64, "STAGES": 18, "SPLITS": 2, "ADD": 1, "DEFERS_NORM": 1}),
    ("gemm.cu", PLAIN | {"ROWS": 192, "TILE": 256, "STAGES": 4, "SPLITS": 1, "GATED": 1, "APPLIES_NORM": 1}),
    ("gemm.cu", PLAIN | {"ROWS": 192, "TILE": 256, "STAGES": 4, "SPLITS": 1, "GATED": 1, "FP8": 1}),
    ("gemm.cu", PLAIN | {"ROWS": 64, "TILE": 128, "STAGES": 9, "SPLITS": 1, "WIDE": 1}),
    ("gemm.cu", PLAIN | {"ROWS": 32, "TILE": 64, "STAGES": 18, "SPLITS": 2, "ADD": 1, "DEFERS_NORM": 1, "LORA": 1}),
    ("gemm.cu", PLAIN | {"ROWS": 128, "TILE": 128, "STAGES": 4, "SPLITS": 1, "GATED": 1, "APPLIES_NORM": 1, "LORA": 1}),
    ("layers.cu", LLAMA | {"FP8": 1}),
    ("layers.cu", QWEN | {"FP8": 0}),
    ("prefill.cu", {"GROUP": 4, "RANGE": 0}),
    ("prefill.cu", {"GROUP": 2, "RANGE": 8}),
    ("deferred_norm.cu", {}),
]


@pytest.mark.parametrize(("file", "defines"), VARIANTS, ids=str)
def test_a_kernel_compiles(file: str, defines: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = tuple(f"-D{key}={value}" for key, value in defines.items())
    image = program._compiled(file, options)
    assert image[:4] == b"\x7fELF"
    assert program._compiled(file, options) == image  # from the cache folder
    assert len(list((tmp_path / "penstock" / "cuda").iterdir())) == 1


def test_a_mistake_is_shown_with_its_line() -> None:
    with pytest.raises(RuntimeError, match=r"wrong\.cu\(1\): error"):
        program.compile_source("void f() { undefined(); }", "wrong.cu", {}, ())
