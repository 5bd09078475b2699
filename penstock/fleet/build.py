"""From the settings of a model to the launchers of its replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

from penstock.core.engine import EngineInfo
from penstock.core.errors import StartupError
from penstock.fleet.discovery import Discovery
from penstock.fleet.fleet import Fleet
from penstock.fleet.launcher import Launcher, LocalLauncher, RemoteLauncher
from penstock.fleet.settings import ModelConfig
from penstock.observability.settings import LogConfig
from penstock.text.tokenizer import Tokenizer
from penstock.worker.protocol import Start
from penstock.worker.remote import SECRET

# Makes the launcher of a replica that this server starts itself: of this checkpoint, with these settings, this number
# among the replicas of its model, and these logs.
NewLauncher = Callable[[str, ModelConfig, int, LogConfig], Launcher]


def launchers(
    checkpoint: str, config: ModelConfig, tokenizer: Tokenizer | None, logs: LogConfig, new_launcher: NewLauncher
) -> list[Launcher]:
    """One for each replica. `tokenizer` is needed for upstreams alone."""
    return [*own_launchers(checkpoint, config, logs, new_launcher), *elsewhere(config, tokenizer)]


def own_launchers(checkpoint: str, config: ModelConfig, logs: LogConfig, new_launcher: NewLauncher) -> list[Launcher]:
    """One for each replica that this server starts itself."""
    return [new_launcher(checkpoint, config, number, logs) for number in range(config.local_replicas)]


def elsewhere(config: ModelConfig, tokenizer: Tokenizer | None) -> list[Launcher]:
    """Of replicas that are no processes of this machine's server."""
    workers = [(host, port) for scheme, host, port in map(_worker, config.workers) if scheme == "tcp"]
    return [*(RemoteLauncher(host, port, worker_secret()) for host, port in workers), *_upstreams(config, tokenizer)]


async def start(
    fleet: Fleet,
    launchers: Sequence[Launcher],
    config: ModelConfig,
    drain_seconds: float,
    names: Sequence[str] = (),
    expected: EngineInfo | None = None,
) -> str:
    """As `Fleet.start`, with the workers that are found by DNS. Where there are no others, the first is waited for."""
    discovered = [(host, port) for scheme, host, port in map(_worker, config.workers) if scheme == "dns"]
    for host, port in discovered:
        launcher = partial(RemoteLauncher, port=port, secret=worker_secret())
        fleet.keep_doing(Discovery(fleet, host, launcher, drain_seconds).follow())
    if launchers or not discovered:
        return await fleet.start(launchers, names, expected)
    await fleet.until_ready()
    return ""


def local_launcher(checkpoint: str, config: ModelConfig, number: int, logs: LogConfig) -> Launcher:
    """Of the replica with this number. Replicas that share a GPU get equal shares of its memory."""
    devices, engine = config.devices, config.engine
    device = devices[number % len(devices)] if devices else None
    sharing = -(-config.local_replicas // max(1, len(devices)))
    if engine.gpu_memory_share is None and sharing > 1:
        engine = replace(engine, gpu_memory_share=1 / sharing)
    return LocalLauncher(Start(checkpoint, engine, logs, device))


class LocalLaunchers:
    """Makes the launchers of replicas on this machine."""

    replica = staticmethod(local_launcher)
    secret = ""  # workers have connections from those who launch them alone


def _worker(worker: str) -> tuple[str, str, int]:
    address = urlsplit(worker)
    return address.scheme, address.hostname or "", address.port or 0


def worker_secret() -> str:
    """Raise StartupError if the variable that should have it is not set."""
    secret = os.environ.get(SECRET)
    if not secret:
        raise StartupError(f"workers on other machines need a secret: set {SECRET} here and there", param="workers")
    return secret


def _upstreams(config: ModelConfig, tokenizer: Tokenizer | None) -> list[Launcher]:
    if not config.upstreams:
        return []
    from penstock.fleet.upstream.launcher import UpstreamLauncher

    assert tokenizer is not None
    return [UpstreamLauncher(upstream, tokenizer) for upstream in config.upstreams]
