"""Which LoRA adapters the models of the settings take, and those that are served from the start."""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from pathlib import Path

from penstock.checkpoint.source import Checkpoint, resolve
from penstock.core.errors import StartupError
from penstock.fleet.settings import ModelConfig
from penstock.gateway.api import adapters as served
from penstock.gateway.api.adapters import AdapterBase, NamedAdapter
from penstock.lora.checkpoint import summarize_adapter
from penstock.lora.config import invalid_adapter
from penstock.lora.fit import Projections, check_fit, projections
from penstock.lora.tokenizer import check_tokenizer
from penstock.settings import Settings
from penstock.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


def adapter_base(checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer) -> AdapterBase | None:
    """None: the model takes no adapters."""
    if not (config.local_replicas or config.workers) or not config.engine.max_adapters:
        return None

    @cache
    def layers() -> Projections:
        from penstock.models.config import read_config

        return projections(read_config(checkpoint))

    def check(folder: Path) -> None:
        found = summarize_adapter(folder)
        try:
            base = layers()
        except StartupError as error:  # of an architecture without a decoder
            raise invalid_adapter(f"{checkpoint.name} takes no LoRA adapters: {error.message}") from error
        check_fit(found.modules, base, config.engine.max_adapter_rank)
        check_tokenizer(folder, lambda: tokenizer.vocabulary)
        if not same_model(found.config.base_model, checkpoint):
            log.warning("adapter %s fits %s, but was trained on %s", folder, checkpoint.name, found.config.base_model)

    folder = None if config.adapter_folder is None else Path(config.adapter_folder).expanduser()
    return AdapterBase(check, folder, config.adapter_paths == "any")


def same_model(trained_on: str, served: Checkpoint) -> bool:
    """As far as names can tell: without the organisation before them, the precision behind that of a GGUF file, and
    regard to letter case."""
    name, file = Path(trained_on).name.lower(), served.path.name.lower()
    return name in ("", Path(served.name).name.lower()) or (served.kind == "gguf" and file.startswith(name))


async def adapters_at_start(settings: Settings) -> list[NamedAdapter]:
    """Of all models. Each is read once for all gateway processes, so a name means the same in each of them."""

    def read() -> list[NamedAdapter]:
        found: list[NamedAdapter] = []
        refused: dict[str, str] = {}
        for name, config in settings.served.items():
            if config.adapters or config.adapter_folder is not None:
                checkpoint = resolve(config.model or name, weights=False)
                if (base := adapter_base(checkpoint, config, load_tokenizer(checkpoint))) is not None:
                    found += served.adapters_at_start(name or checkpoint.name, config, base, refused)
        for name in sorted(refused.keys() - {adapter.name for adapter in found}):  # which fit no other model either
            log.warning("adapter_folder: %s is not served: %s", name, refused[name])
        return found

    return await asyncio.to_thread(read)
