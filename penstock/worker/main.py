"""The worker process. Started by supervisor.py as `python -m penstock.worker.main SETTINGS_JSON SOCKET READY_FD`.

It says `ready` on READY_FD once it listens, or `error MESSAGE` if it cannot. When its standard input ends, the parent
is gone and the worker goes too.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from penstock.core.config import Settings, settings_from_mapping
from penstock.core.errors import PenstockError
from penstock.engine.calibration import calibrate
from penstock.engine.executor import Executor
from penstock.engine.loop import EngineLoop
from penstock.observability.logging import configure_logging
from penstock.worker.server import WorkerServer

log = logging.getLogger(__name__)


def main() -> int:
    settings = settings_from_mapping(json.loads(sys.argv[1]))
    address, ready_fd = sys.argv[2], int(sys.argv[3])
    configure_logging(settings.server.log_level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway decides
    with os.fdopen(ready_fd, "w") as ready:
        try:
            return asyncio.run(_serve(settings, address, ready.fileno()))
        except PenstockError as error:
            ready.write(f"error {error.message}")
            return 1


async def _serve(settings: Settings, address: str, ready_fd: int) -> int:
    from penstock.runner.progress import LoadProgress  # numpy, and torch where it is needed, from here on
    from penstock.runner.startup import start

    scheduler, executor, info = start(settings.model, settings.engine, LoadProgress(sys.stderr))
    if not scheduler.times.measured:
        log.info("measuring how fast this machine is, once")
        calibrate(scheduler, executor)
    server = WorkerServer(info)
    engine = EngineLoop(scheduler, executor, server.emit)
    server.attach(engine)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    _stop_with_parent(stop)
    gc.collect()
    gc.freeze()  # what was loaded stays; collecting garbage must not walk through it in the middle of a step
    _log_memory(executor)
    thread = threading.Thread(target=_run, args=(engine, executor), name="engine", daemon=True)
    thread.start()
    listener = await server.serve(address)
    beat = asyncio.create_task(server.beat())
    os.write(ready_fd, b"ready\n")
    await stop.wait()
    beat.cancel()
    listener.close()
    await server.hang_up()
    engine.stop()
    await asyncio.to_thread(thread.join)
    return 0


def _log_memory(executor: Executor) -> None:
    """What the machine gives for this: now, and once the KV cache is full."""
    from penstock.runner.native_runner import NativeRunner

    here, gateway = _resident_mib("self"), _resident_mib(str(os.getppid()))
    if isinstance(executor, NativeRunner):
        weights, cache = executor.model.weight_bytes / 2**20, executor.model.cache_bytes / 2**20
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


def _run(engine: EngineLoop, executor: Executor) -> None:
    from penstock.runner.native_runner import NativeRunner

    if isinstance(executor, NativeRunner):
        executor.model.pin_caller()
    try:
        engine.run()
    except BaseException:
        log.exception("the engine stopped; this worker ends so that it can be started again")
        os._exit(70)  # EX_SOFTWARE: clients see the socket close at once


def _stop_with_parent(stop: asyncio.Event) -> None:
    def readable() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            stop.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), readable)


if __name__ == "__main__":
    sys.exit(main())
