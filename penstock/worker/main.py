"""The worker process. Started by supervisor.py as `python -m penstock.worker.main SOCKET_FD`.

All else comes over that socket: first what to load, which is answered by a greeting once it is loaded or by the reason
why it cannot be. When the socket ends, the gateway is gone and the worker goes too, also in the middle of loading.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

from penstock.core.engine import EngineInfo
from penstock.core.errors import PenstockError
from penstock.engine.calibration import calibrate
from penstock.engine.executor import LoadedExecutor
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.observability.logging import configure_logging
from penstock.worker.protocol import HEARTBEAT_SECONDS, Failed, Start, frame, read_start
from penstock.worker.server import WorkerServer

log = logging.getLogger(__name__)

SOFTWARE_ERROR = 70  # EX_SOFTWARE


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway decides
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # a compiler started from here must not keep it open
    wanted = read_start(connection)
    if wanted is None:
        return 1
    configure_logging(wanted.log_level)
    try:
        scheduler, executor, info = _load(wanted, connection)
    except PenstockError as error:
        connection.sendall(frame(Failed(error.message)))
        return 1
    asyncio.run(serve(connection, scheduler, executor, info))
    return 0


def _load(wanted: Start, connection: socket.socket) -> tuple[Scheduler, LoadedExecutor, EngineInfo]:
    from penstock.runner.progress import LoadProgress  # numpy, and torch where it is needed, from here on
    from penstock.runner.startup import start

    loaded = threading.Event()
    threading.Thread(target=_end_with_gateway, args=(connection, loaded), daemon=True).start()
    try:
        scheduler, executor, info = start(wanted.model, wanted.engine, LoadProgress(sys.stderr))
        if not scheduler.times.measured:
            log.info("measuring how fast this machine is, once")
            calibrate(scheduler, executor)
        return scheduler, executor, info
    finally:
        loaded.set()


def _end_with_gateway(connection: socket.socket, loaded: threading.Event) -> None:
    """A gateway sends nothing before the greeting, so what can be read while the model loads is the socket's end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.poll()
    if not loaded.is_set():
        os._exit(0)


async def serve(connection: socket.socket, scheduler: Scheduler, executor: LoadedExecutor, info: EngineInfo) -> None:
    """Run the engine for the gateway at the other end, until that goes away or SIGTERM comes."""
    server = await WorkerServer.over(connection)
    engine = EngineLoop(scheduler, executor, server.emit)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.hang_up)
    gc.collect()
    gc.freeze()  # what was loaded stays; collecting garbage must not walk through it in the middle of a step
    _log_memory(executor)
    thread = threading.Thread(target=_run, args=(engine, executor), name="engine", daemon=True)
    thread.start()
    watching = asyncio.create_task(_end_if_stalled(engine))
    await server.handle_client(engine, info)
    engine.stop()
    await asyncio.to_thread(thread.join)
    watching.cancel()


async def _end_if_stalled(engine: EngineLoop) -> None:
    """An engine that hangs in a step is replaced, and its process with it.

    Time is counted in rounds of this loop: a process that was suspended must not take the gap for a step's time.
    """
    turns, silent = -1, 0.0
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        idle = not engine.stats.seconds_since_step
        silent = 0.0 if idle or engine.turns != turns else silent + HEARTBEAT_SECONDS
        turns = engine.turns
        if engine.overdue(silent):
            log.error("no step finished for %.0f s with work to do; this worker ends so that another can start", silent)
            os._exit(SOFTWARE_ERROR)


def _log_memory(executor: LoadedExecutor) -> None:
    """What the machine gives for this: now, and once the KV cache is full."""
    here, gateway = _resident_mib("self"), _resident_mib(str(os.getppid()))
    if memory := executor.host_memory:
        weights, cache = memory.weights / 2**20, memory.cache / 2**20
        log.info(
            "memory: %.0f MiB resident here (weights %.0f, Python and libraries %.0f) and %.0f in the gateway; "
            "the KV cache takes up to %.0f more as it fills: %.0f MiB in all",
            here,
            weights,
            here - weights,
            gateway,
            cache,
            here + gateway + cache,
        )
    else:
        log.info("memory: %.0f MiB resident here and %.0f in the gateway", here, gateway)


def _resident_mib(process: str) -> float:
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:  # no /proc (macOS)
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _run(engine: EngineLoop, executor: LoadedExecutor) -> None:
    executor.enter_thread()
    try:
        engine.run()
    except BaseException:
        log.exception("the engine stopped; this worker ends so that it can be started again")
        os._exit(SOFTWARE_ERROR)  # the gateway sees the socket close at once


if __name__ == "__main__":
    sys.exit(main())
