"""The AMX kernels on any CPU, over the tiles of `emulated_amx.h`, against their plain references."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.kernels.native import bindings
from tests.kernels.native.test_kernels import matmul_reference
from tests.kernels.native.test_sanitizers import LEVELS

SOURCES = Path(bindings.__file__).parent
SHARED = ("adapters", "api", "encoder", "model", "pack", "sampling", "threadpool", "weights")
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-ffp-contract=off", "-pthread", "-Wno-psabi"]
# In the place of the portable kernels, which need nothing of the CPU: the only ones of this library.
TILES = ["-DPENSTOCK_ISA=portable", "-include", str(Path(__file__).with_name("emulated_amx.h"))]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None or not bindings.available(), reason="needs g++")


@pytest.fixture(scope="module")
def tile_matmuls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], int]]:
    """Puts a library with emulated tiles in the place of the real one; counts the matmuls of tiles so far."""
    folder = tmp_path_factory.mktemp("amx")
    builds: list[tuple[str, list[str]]] = [(name, []) for name in SHARED]
    builds.append(("kernels_isa", [*LEVELS.get("avx512bf16", []), *TILES]))
    commands = [["g++", *FLAGS, *flags, "-c", f"{SOURCES / name}.cpp", "-o", f"{name}.o"] for name, flags in builds]
    running = [subprocess.Popen(command, cwd=folder) for command in commands]
    assert [process.wait() for process in running] == [0] * len(running)
    subprocess.run("g++ -shared -pthread *.o -o amx.so", shell=True, cwd=folder, check=True)
    real = bindings.LIBRARY
    bindings.LIBRARY = folder / "amx.so"
    bindings._load.cache_clear()
    try:
        matmuls = ctypes.c_long.in_dll(bindings.library(), "emulated_tile_matmuls")
        yield lambda: matmuls.value
    finally:
        bindings.LIBRARY = real
        bindings._load.cache_clear()


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_matmul(tile_matmuls: Callable[[], int], kind: bindings.Scheme) -> None:
    if kind == "none" and "avx512bf16" not in LEVELS:
        pytest.skip("activations become bfloat16 by instructions that this CPU lacks")
    for rows, n, k in [
        (15, 32, 64),
        (16, 32, 64),
        (17, 100, 96),
        (31, 33, 64),
        (32, 40, 160),
        (47, 70, 577),
        (63, 40, 96),
        (64, 40, 96),
        (70, 40, 577),
        (300, 33, 1536),
    ]:
        rng = np.random.default_rng(rows * 1000 + n + k)
        x = rng.standard_normal((rows, k), dtype=np.float32) * rng.uniform(0.1, 30, (rows, 1)).astype(np.float32)
        w, bias = rng.standard_normal((n, k), dtype=np.float32), rng.standard_normal(n, dtype=np.float32)
        x[rows // 2, :16] = 0
        expected, tolerance = matmul_reference(x, w, kind, "amx")
        before = tile_matmuls()
        got = bindings.matmul(x, w, kind, bias)
        np.testing.assert_allclose(got, expected + bias, rtol=1e-5, atol=tolerance)
        assert (tile_matmuls() > before) == (rows >= (64 if kind == "int4" else 16))
        if kind != "none":  # the same bits as in vectors
            np.testing.assert_array_equal(
                got, np.concatenate([bindings.matmul(row, w, kind, bias) for row in x[:, None]])
            )


def test_extreme_inputs_neither_saturate_nor_overflow(tile_matmuls: Callable[[], int]) -> None:
    x = np.full((33, 4096), 127, dtype=np.float32)
    w = np.ones((34, 4096), dtype=np.float32)
    w[1] = -1
    np.testing.assert_allclose(bindings.matmul(x, w, "int8"), x @ w.T, rtol=1e-6)
