"""The emulated GPU finds the mistakes that it is there for: otherwise the tests of kernels could not fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.hopper.emulated_gpu import available, emulated_kernel, emulated_tensor_map

pytestmark = pytest.mark.skipif(not available, reason="needs g++")

# MISTAKE 0: none; 1: what is copied is read before it has come; 2: nobody says how many bytes will come; 3: misaligned;
# 4: one thread does not come to the barrier.
SOURCE = """
#include "device.cuh"
extern "C" __global__ void copied(float* out, const __grid_constant__ TensorMap map, const bf16* plain) {
    SHARED_MEMORY(shared);
    bf16* tile = reinterpret_cast<bf16*>(shared);
    u64* barrier = reinterpret_cast<u64*>(shared + 8192);
    if (threadIdx.x == 0) init_barrier(barrier, 1), publish_barriers();
    __syncthreads();
    if (threadIdx.x == 0) {
        if (MISTAKE == 3) copy_bulk(tile, plain + 1, 128, barrier);
        copy_box(tile, &map, 0, 0, barrier, EVICT_FIRST);
        if (MISTAKE != 2) arrive_expecting(barrier, 64 * 128);
    }
    if (MISTAKE != 1) wait(barrier, 0);
    for (int i = threadIdx.x; i < 64 * 64; i += 64) {
        const int row = i / 64, column = i % 64;
        out[i] = from_bf16(tile[row * 64 + (column / 8 ^ row % 8) * 8 + column % 8]);
    }
    if (MISTAKE == 1) wait(barrier, 0);
    if (MISTAKE != 4 || threadIdx.x) __syncthreads();
}
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "copied.cu").write_text(SOURCE)
    return folder


def run(sources: Path, folder: Path, mistake: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.randn(64, 64).bfloat16(), torch.full((64, 64), torch.nan)
    kernel = emulated_kernel(folder, sources=sources)("copied.cu", "copied", MISTAKE=mistake)
    kernel((1,), 64, 8192 + 64, out, emulated_tensor_map(x, (64, 64)), x)
    return out, x.float()


def test_a_copy_has_come_after_the_wait_and_not_before(sources: Path, tmp_path: Path) -> None:
    out, x = run(sources, tmp_path, mistake=0)
    assert torch.equal(out, x)
    out, x = run(sources, tmp_path, mistake=1)
    assert not torch.equal(out, x)


@pytest.mark.parametrize(("mistake", "message"), [(2, "deadlock"), (3, "aligned to 16"), (4, "deadlock")])
def test_mistakes_are_named(sources: Path, tmp_path: Path, mistake: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(sources, tmp_path, mistake)
