"""From the settings of a model to the launchers of its replicas."""

from __future__ import annotations

import os
from dataclasses import replace
from urllib.parse import urlsplit

from penstock.core.errors import StartupError
from penstock.fleet.launcher import Launcher, LocalLauncher, RemoteLauncher
from penstock.fleet.settings import ModelConfig
from penstock.text.tokenizer import Tokenizer
from penstock.worker.protocol import Start
from penstock.worker.remote import SECRET


def launchers(checkpoint: str, config: ModelConfig, tokenizer: Tokenizer | None, log_level: str) -> list[Launcher]:
    """One for each replica. `tokenizer` is needed for upstreams alone."""
    local = [local_launcher(checkpoint, config, number, log_level) for number in range(config.local_replicas)]
    return [*local, *elsewhere(config, tokenizer)]


def elsewhere(config: ModelConfig, tokenizer: Tokenizer | None) -> list[Launcher]:
    """Of replicas that are no processes of this machine's server."""
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
