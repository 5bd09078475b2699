"""Runs work on a GPU from many threads at once, for its side effect: kernels are compiled in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from penstock.core.machine import usable_cpus

Task = Callable[[], object]


def run_in_parallel(tasks: Sequence[Task]) -> None:
    """Each task runs on some thread, with a stream of its own; what does not fit into memory then runs again alone.

    The first one also runs on the calling thread, so that its libraries are set up before any graph is captured there.
    Raises torch.OutOfMemoryError.
    """
    torch.cuda.synchronize()
    with ThreadPoolExecutor(min(16, usable_cpus()), initializer=_use_own_stream) as threads:
        fitted = list(threads.map(_fits, tasks))
    torch.cuda.synchronize()
    _free_library_memory()
    _run(tasks[0])
    for task, fitting in zip(tasks, fitted, strict=True):
        if not fitting:
            torch.cuda.empty_cache()
            _run(task)
    torch.cuda.synchronize()


def _run(task: Task) -> None:
    with torch.inference_mode():
        task()


def _fits(task: Task) -> bool:
    try:
        _run(task)
    except torch.OutOfMemoryError:
        return False
    return True


def _use_own_stream() -> None:
    torch.cuda.set_stream(torch.cuda.Stream())
    torch.cuda.current_stream().synchronize()  # makes the context current in this thread


def _free_library_memory() -> None:
    """cuBLAS keeps 32 MiB for each thread and stream that used it."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
