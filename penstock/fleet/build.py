"""From the settings of a model to the launchers of its replicas."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

from penstock.core.errors import StartupError
from penstock.fleet.launcher import Launcher, LocalLauncher, RemoteLauncher
from penstock.fleet.settings import ModelConfig
from penstock.text.tokenizer import Tokenizer
from penstock.worker.protocol import Start
from penstock.worker.remote import SECRET

# Makes the launcher of a replica that this server starts itself: of this checkpoint, with these settings, this number
# among the replicas of its model, and this log level.
NewLauncher = Callable[[str, ModelConfig, int, str], Launcher]


def launchers(
    checkpoint: str, config: ModelConfig, tokenizer: Tokenizer | None, log_level: str, new_launcher: NewLauncher
) -> list[Launcher]:
    """One for each replica. `tokenizer` is needed for upstreams alone."""
    return [*own_launchers(checkpoint, config, log_level, new_launcher), *elsewhere(config, tokenizer)]


def own_launchers(checkpoint: str, config: ModelConfig, log_level: str, new_launcher: NewLauncher) -> list[Launcher]:
    """One for each replica that this server starts itself."""
    return [new_launcher(checkpoint, config, number, log_level) for number in range(config.local_replicas)]


def elsewhere(config: ModelConfig, tokenizer: Tokenizer | None) -> list[Launcher]:
    """One for each replica that somebody else runs."""
    return [*map(_remote, config.workers), *_upstreams(config, tokenizer)]


def local_launcher(checkpoint: str, config: ModelConfig, number: int, log_level: str) -> Launcher:
    """Of the replica with this number. Replicas that share a GPU get equal shares of its memory."""
    devices, engine = config.devices, config.engine
    device = devices[number % len(devices)] if devices else None
    sharing = -(-config.local_replicas // max(1, len(devices)))
    if engine.gpu_memory_share is None and sharing > 1:
        engine = replace(engine, gpu_memory_share=1 / sharing)
    return LocalLauncher(Start(checkpoint, engine, log_level, device))


def _remote(worker: str) -> Launcher:
    secret = os.environ.get(SECRET)
    if not secret:
        raise StartupError(f"workers on other machines need a secret: set {SECRET} here and there", param="workers")
    address = urlsplit(worker)
    return RemoteLauncher(address.hostname or "", address.port or 0, secret)


def _upstreams(config: ModelConfig, tokenizer: Tokenizer | None) -> list[Launcher]:
    if not config.upstreams:
        return []
    from penstock.fleet.upstream.launcher import UpstreamLauncher

    assert tokenizer is not None
    return [UpstreamLauncher(upstream, tokenizer) for upstream in config.upstreams]
