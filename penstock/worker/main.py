"""The worker process. Started by a launcher as `python -m penstock.worker.main CONTROL_FD [LISTENER_FD]`.

All else comes over that control socket: first what to load, then a socket for each gateway, which is greeted once the
model is loaded. A worker that cannot load says why over the control socket. When that ends, the launcher is gone and
the worker goes too, also in the middle of loading. A standby is told to prepare for a model before it is told to load.
Gateways on other machines come over the listener, if there is one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from penstock.core.engine import EngineInfo
from penstock.core.errors import PenstockError
from penstock.core.machine import cache_folder, lower_priority, process_began
from penstock.core.start_times import StartTimes
from penstock.engine.calibration import calibrate
from penstock.engine.executor import Adapters, LoadedExecutor
from penstock.engine.grammar import Grammars
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.grammar.compiler import grammars_of
from penstock.grammar.trial import Trials
from penstock.observability.logging import configure_logging
from penstock.worker.control import Control
from penstock.worker.host import resident_bytes
from penstock.worker.profiling import WorkerProfiler
from penstock.worker.protocol import HEARTBEAT_SECONDS, Failed, Prepared, Standby, Start, frame, read_control
from penstock.worker.protocol import Control as Message
from penstock.worker.remote import LEASE_SECONDS, Port
from penstock.worker.server import WorkerServer

log = logging.getLogger("penstock.worker.main")  # it runs as __main__

SOFTWARE_ERROR = 70  # EX_SOFTWARE


class Gateways(Protocol):
    """Where gateways come from: a launcher's control socket, or a port."""

    async def attach(self, server: WorkerServer, stop: Callable[[], None]) -> None:
        """Connect those that have come and those that will. `stop` is called when there will be none any more."""


class Everywhere:
    """Gateways come from several places."""

    def __init__(self, *places: Gateways) -> None:
        self._places = places

    async def attach(self, server: WorkerServer, stop: Callable[[], None]) -> None:
        for place in self._places:
            await place.attach(server, stop)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway decides
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # a compiler started from here must not keep it open
    times, wanted = StartTimes(process_began()), read_control(connection)
    if isinstance(wanted, Standby):
        wanted = _stand_by(wanted, connection)
        times = StartTimes()
    if not isinstance(wanted, Start):
        return 1
    configure_logging(wanted.logs)
    if wanted.visible_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = wanted.visible_devices  # read when CUDA is initialised, not imported
    control = Control(connection)
    from penstock.lora.host_memory import adapters_of  # numpy

    try:
        scheduler, executor, info = load(wanted, times)
    except PenstockError as error:
        connection.sendall(frame(Failed(error.message)))
        return 1
    gateways: Gateways = control
    if len(sys.argv) > 2:
        listener = socket.socket(fileno=int(sys.argv[2]))
        listener.set_inheritable(False)
        gateways = Everywhere(control, Port(listener, wanted.secret, LEASE_SECONDS))
    grammars, engine = grammars_of(scheduler.limits, wanted.model, trials=Trials()), wanted.engine
    adapters = adapters_of(executor, engine.max_adapter_rank, engine.adapter_memory_gib)
    asyncio.run(serve(scheduler, executor, info, gateways, times.seconds, grammars=grammars, adapters=adapters))
    return 0


def _stand_by(standby: Standby, connection: socket.socket) -> Message | None:
    """Prepare, then wait without using the CPU for what to load. None: the launcher has gone."""
    configure_logging(standby.logs)
    mapped: list[object] = []

    def prepare() -> None:
        """At low priority. On a thread, since a process cannot raise its own again."""
        lower_priority()
        from penstock.runner.standby import prepare_start

        said: Message = Prepared()
        try:
            mapped.extend(prepare_start(standby.model, standby.engine))
        except PenstockError as error:
            said = Failed(error.message)
        except Exception as error:
            said = Failed(repr(error))
        with suppress(OSError):  # the launcher has gone, which the main thread sees
            connection.sendall(frame(said))

    threading.Thread(target=prepare, name="prepare", daemon=True).start()
    return read_control(connection)


def load(wanted: Start, times: StartTimes) -> tuple[Scheduler, LoadedExecutor, EngineInfo]:
    """Load the model and, on a machine where it never ran, measure how fast it is."""
    from penstock.runner.progress import LoadProgress  # numpy, and torch where it is needed, from here on
    from penstock.runner.startup import start

    scheduler, executor, info = start(wanted.model, wanted.engine, LoadProgress(sys.stderr), times)
    measured = scheduler.times.ready if scheduler.limits.pools else scheduler.times.measured
    if not measured:
        log.info("measuring how fast this machine is, once; kept in %s", cache_folder() / "step_times")
        calibrate(scheduler, executor)
        times.ended("calibration")
    return scheduler, executor, info


async def serve(
    scheduler: Scheduler,
    executor: LoadedExecutor,
    info: EngineInfo,
    gateways: Gateways,
    start_seconds: Mapping[str, float],
    drain_seconds: float = 0.0,
    grammars: Grammars | None = None,
    adapters: Adapters | None = None,
) -> None:
    """Run the engine for its gateways, until there will be none any more or SIGTERM comes. Gateways are told how long
    the phases of the start took. Requests that are under way at SIGTERM may take `drain_seconds` more."""
    server, stopped = WorkerServer(), asyncio.Event()
    engine = server.engine = EngineLoop(scheduler, executor, server.emit, grammars, adapters)
    server.info, server.start_seconds = info, start_seconds
    if grammars is not None:
        grammars.pausing = server.pausing
    server.profile = WorkerProfiler(server, scheduler, executor, executor.device, executor.kernel_probe).take
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    gc.collect()
    gc.freeze()  # what was loaded stays; collecting garbage must not walk through it in the middle of a step
    _log_memory(executor)
    thread = threading.Thread(target=_run, args=(engine, executor), name="engine", daemon=True)
    thread.start()
    watching = asyncio.create_task(_end_if_stalled(engine))
    await gateways.attach(server, stopped.set)
    await stopped.wait()
    await server.drain(drain_seconds)
    server.close()
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
            logging.shutdown()
            os._exit(SOFTWARE_ERROR)


def _log_memory(executor: LoadedExecutor) -> None:
    """What the machine gives for this: now, and once the KV cache is full."""
    here, gateway = resident_bytes("self") / 2**20, resident_bytes(str(os.getppid())) / 2**20
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


def _run(engine: EngineLoop, executor: LoadedExecutor) -> None:
    executor.enter_thread()
    try:
        engine.run()
    except BaseException:
        log.exception("the engine stopped; this worker ends so that it can be started again")
        logging.shutdown()
        os._exit(SOFTWARE_ERROR)  # the gateway sees the socket close at once


if __name__ == "__main__":
    sys.exit(main())
