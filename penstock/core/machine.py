"""What this process may use of the machine: CPUs by affinity and quota, memory and files by limit, a cache folder; and
which signals end it."""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CGROUP = Path("/sys/fs/cgroup")


def cache_folder() -> Path:
    """Where things that can be made again are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "penstock"


def state_folder() -> Path:
    """Where things that cannot be made again are kept: keys, spend."""
    return Path(os.environ.get("XDG_STATE_HOME") or _home() / ".local/state") / "penstock"


def _home() -> Path:
    """A user without an entry in /etc/passwd and without HOME has the root folder, as container engines set it for
    him; what cannot be written there is not kept."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def keep_compiled(package: str) -> None:
    """Before it is imported: where Python has not kept its compiled code and will not, keep it in the cache folder.

    Images of containers often set PYTHONDONTWRITEBYTECODE; compiling torch then takes 3 s of every start.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or sys.pycache_prefix is not None:
        return
    folder = Path(spec.origin).parent
    if not (folder / "__pycache__").is_dir() and (sys.dont_write_bytecode or not os.access(folder, os.W_OK)):
        sys.pycache_prefix, sys.dont_write_bytecode = str(cache_folder() / "compiled"), False


def keep_kernels() -> None:
    """Before Triton compiles anything: in the cache folder, as other kernels, unless it was told otherwise."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))


def ending_signals() -> list[signal.Signals]:
    """Those that ask a server to end. SIGHUP, which a terminal that is closed sends, unless nohup has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def raise_file_limit() -> None:
    """Of this process and those that it starts, as far as it may: every connection takes a file descriptor, and the
    soft limit of most systems is 1,024, for the sake of programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS has a lower limit than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int:
    """File descriptors that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def open_files() -> int:
    """File descriptors that this process has open."""
    try:
        # The first takes microseconds, but says 0 before Linux 6.2.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        return len(os.listdir("/dev/fd"))
    except OSError:  # there is none left to look with
        return file_limit()


def usable_cpus() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, _cgroup_cpus() or cpus))


def _cgroup_cpus() -> int | None:
    """By version 2, or version 1, where -1 means no limit."""
    period = _read(_CGROUP / "cpu/cpu.cfs_period_us") or ""
    of_version_1 = f"{_read(_CGROUP / 'cpu/cpu.cfs_quota_us') or 'max'} {period}"
    fields = (_read(_CGROUP / "cpu.max") or of_version_1).split()
    if len(fields) == 2 and fields[0] not in ("max", "-1"):
        return max(1, int(fields[0]) // int(fields[1]))
    return None


def lower_priority(niceness: int = 19) -> None:
    """Of this thread and those that it starts, for good: to raise it again takes a privilege. Linux has priorities of
    threads, others only of processes, which keep theirs."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def with_niceness(niceness: int, work: Callable[[], T]) -> T:
    """Do this on a thread of lower priority. Threads that are started meanwhile keep it."""
    outcome: list[T | BaseException] = []

    def run() -> None:
        lower_priority(niceness)
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="niced")
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def boot_id() -> str:
    """Of the machine since it was started: whoever has the same has the same monotonic clock. "" if it has none."""
    return _read(Path("/proc/sys/kernel/random/boot_id")) or ""


def process_began() -> float:
    """When this process was started, on the monotonic clock; now, where the system does not say."""
    now = time.monotonic()
    stat = _read(Path("/proc/self/stat"))
    if stat is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return now
    ticks = int(stat.rpartition(") ")[2].split()[19])  # starttime of proc(5)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now - max(0.0, age)


def free_memory() -> int:
    """Bytes that can be taken now without pushing anything out but cached files, which the kernel drops when somebody
    needs their memory."""
    free = _meminfo("MemAvailable")
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit is None:  # version 1, where no limit is a very large one
        limit = _read(_CGROUP / "memory/memory.limit_in_bytes")
        used = _read(_CGROUP / "memory/memory.usage_in_bytes")
    if limit and used and limit != "max":
        free = min(free, int(limit) - int(used) + _cgroup_file_cache())
    return max(0, free)


def _cgroup_file_cache() -> int:
    """A container that has read or written files counts them as used, up to its limit, for as long as it runs."""
    written, prefix = _read(_CGROUP / "memory.stat"), ""
    if written is None:  # version 1, which counts groups within this one apart
        written, prefix = _read(_CGROUP / "memory/memory.stat"), "total_"
    stat = dict(line.split() for line in (written or "").splitlines())
    return sum(int(stat.get(f"{prefix}{which}_file", 0)) for which in ("active", "inactive"))


def _meminfo(field: str) -> int:
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return pages * size // 2  # no /proc (macOS): half of what is installed


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
