"""What a process keeps for the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core import machine

SCRIPT = "from penstock.core.machine import keep_compiled; keep_compiled('heavy'); import heavy"


@pytest.mark.parametrize("compiled_before", [False, True])
def test_compiled_code_is_kept_where_python_would_not(tmp_path: Path, compiled_before: bool) -> None:
    package = tmp_path / "site" / "heavy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = 1\n")
    if compiled_before:  # beside it: then Python needs no other place
        (package / "__pycache__").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True)
    kept = list((tmp_path / "cache" / "penstock" / "compiled").rglob("*.pyc"))
    assert bool(kept) is not compiled_before
    assert not list(package.rglob("*.pyc"))


def test_a_user_without_a_home_has_the_root_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert machine.cache_folder() == Path("/.cache/penstock")
    assert machine.state_folder() == Path("/.local/state/penstock")


def test_cached_files_of_a_container_are_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads and writes files for long enough uses all of its limit, most of it for their contents."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    written = {
        "memory.max": 2**20 * 64,
        "memory.current": 2**20 * 63,
        "memory.stat": f"anon {2**20 * 20}\nfile {2**20 * 43}\nshmem {2**20 * 3}\ninactive_file {2**20 * 30}\n"
        f"active_file {2**20 * 10}",
    }
    for name, content in written.items():
        (tmp_path / name).write_text(f"{content}\n")
    assert machine.free_memory() == 2**20 * 41
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory() > 2**20 * 64


def test_limits_of_a_container_on_a_host_with_cgroup_v1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "memory").mkdir()

    def write(**files: object) -> None:
        for name, content in files.items():
            folder, _, rest = name.partition("_")
            (tmp_path / folder / f"{folder}.{rest}").write_text(f"{content}\n")

    stat = f"active_file 0\ntotal_inactive_file {2**20 * 30}\ntotal_active_file {2**20 * 10}"
    write(cpu_cfs_period_us=100000, cpu_cfs_quota_us=250000, memory_stat=stat)
    write(memory_limit_in_bytes=2**20 * 64, memory_usage_in_bytes=2**20 * 63)
    assert machine.usable_cpus() == 2
    assert machine.free_memory() == 2**20 * 41
    write(cpu_cfs_quota_us=-1, memory_limit_in_bytes=2**63 - 4096)
    assert machine.usable_cpus() == 64
    assert machine.free_memory() > 2**20 * 64


KERNEL = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from penstock.core.machine import keep_kernels

@triton.jit
def double(x):
    tl.store(x, 2 * tl.load(x))

keep_kernels()
triton.compile(ASTSource(double, {"x": "*fp32"}, {}), target=GPUTarget("cuda", 90, 32))
"""


def test_kernels_of_triton_are_kept_beside_the_others(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    for variable in ("TRITON_CACHE_DIR", "TRITON_INTERPRET"):
        environment.pop(variable, None)
    subprocess.run([sys.executable, str(script)], env=environment, check=True)
    assert list((tmp_path / "cache" / "penstock" / "triton").rglob("double.cubin"))
