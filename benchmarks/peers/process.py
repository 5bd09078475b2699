"""A peer as a group of processes: started, watched, weighed and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

STOP_SECONDS = 20.0
PIPE_LIMIT = 1 << 26  # bytes in one line of a runner's answer


class PeerError(Exception):
    """The peer failed to start or to answer."""


@dataclass(frozen=True, slots=True)
class PeerProcess:
    process: asyncio.subprocess.Process
    started: float  # on the clock of time.perf_counter
    log: Path

    def check_alive(self) -> None:
        if (status := self.process.returncode) is not None:
            raise PeerError(f"it exited with {status}; see {self.log}")

    def resident_bytes(self) -> int:
        """Summed over the process and its descendants; pages that they share count once for each."""
        return sum(_resident_bytes(pid) for pid in descendants(self.process.pid, _parents()))


@asynccontextmanager
async def running(
    command: Sequence[str], environment: Mapping[str, str], log: Path, *, pipe: bool
) -> AsyncIterator[PeerProcess]:
    """The peer, in a session of its own, for as long as the block lasts. `pipe`: its output is read, not logged."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(command)}\n".encode())
        output.flush()
        started = time.perf_counter()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if pipe else output,
                stderr=output,
                env={**os.environ, **environment},
                limit=PIPE_LIMIT,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"{command[0]}: {error.strerror}") from error
    try:
        yield PeerProcess(process, started, log)
    finally:
        await _stop(process)


def end_on_signal() -> None:
    """A polite kill must still stop the peer that is running."""
    main_task = asyncio.current_task()
    assert main_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ask, wait, then end what is left of the group, of which this process is the leader."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.communicate()
    except TimeoutError:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    await process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _parents() -> dict[int, int]:
    """The parent of every process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The second field is the name in parentheses, which may hold spaces.
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has ended
    return parents


def descendants(root: int, parents: Mapping[int, int]) -> set[int]:
    """`root` and all below it."""
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def has_bf16(cpuinfo: str) -> bool:
    """Whether the processor multiplies bf16 itself; where it does not, torch is slower in it than in float32."""
    return any(flag in cpuinfo for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def cpu_list(cores: Iterable[int]) -> str:
    """As `taskset` writes it: 0-1,4."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)
