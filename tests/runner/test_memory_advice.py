"""What does not fit is refused with a number, and that number fits."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.core.errors import StartupError
from penstock.runner import memory
from penstock.runner.memory import GIB, KVDemand, kv_blocks

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.runner import cuda_startup

CUDA = torch.device("cuda")


def advised(error: pytest.ExceptionInfo[StartupError], setting: str) -> float:
    found = re.search(rf"set {setting} to at most ([\d.]+)", str(error.value))
    assert found
    assert error.value.param == f"engine.{setting}"
    return float(found[1])


def test_a_cache_that_is_too_large_is_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free_on_gpu", lambda device, share: 10 * GIB)
    demand = KVDemand(2**20, 16, max_model_len=4096, max_seqs=512, reserve=3 * GIB)
    with pytest.raises(StartupError) as error:
        kv_blocks(demand, 8.0, CUDA)
    fitting = advised(error, "kv_memory_gib")
    assert kv_blocks(demand, fitting, CUDA) * demand.block_bytes <= 7 * GIB
    assert kv_blocks(demand, None, CUDA) * demand.block_bytes <= 7 * GIB


class Steps:
    """Runs steps of up to so many tokens; compiling runs the largest as well, on `compiling` tokens."""

    def __init__(self, most: int, compiling: int = 0) -> None:
        self.most, self.compiling = most, compiling

    def compile_all(self) -> None:
        self.probe(self.compiling or 1)

    def probe(self, max_step_tokens: int | None = None) -> int:
        if (max_step_tokens or 8192) > max(self.most, 1):
            raise torch.OutOfMemoryError
        return 1


@pytest.mark.parametrize(
    ("most", "compiling", "setting"),
    [(3000, 0, "max_step_tokens"), (3000, 8192, "max_step_tokens"), (300, 0, "max_step_tokens"), (0, 0, "max_seqs")],
)
def test_a_step_that_is_too_large_is_refused_with_what_fits(most: int, compiling: int, setting: str) -> None:
    plan: Any = SimpleNamespace(
        max_step_tokens=8192, engine=SimpleNamespace(max_seqs=512), model=SimpleNamespace(vocab_size=150_000)
    )
    steps: Any = Steps(most, compiling)
    with pytest.raises(StartupError) as error:
        cuda_startup._compile_and_try(plan, steps, 2 * GIB)
    assert 1 <= advised(error, setting) <= (most or 511)
    steps.most = 8192
    assert cuda_startup._compile_and_try(plan, steps, 2 * GIB) == 1
