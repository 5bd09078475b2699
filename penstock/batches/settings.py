"""The `batches` section of the settings: uploaded files and the batches made of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.setting_paths import PATH
from penstock.core.settings import check


@dataclass(frozen=True, slots=True)
class BatchesConfig:
    """Where files lie, how many a tenant may have, and how their lines are run."""

    # Of files and queue, unless state is a Redis; default: beside the state.
    folder: str | None = field(default=None, metadata=PATH)
    max_file_mib: float = 512.0
    max_files: int = 1000  # these two: of one tenant
    max_storage_mib: float = 8192.0
    max_lines: int = 1_000_000  # of one batch
    concurrent: int = 64  # lines computed at once, for each gateway process; 0: it runs none
    keep_days: float = 30.0  # after which a file is deleted, unless it says otherwise

    def __post_init__(self) -> None:
        for name in ("max_file_mib", "max_files", "max_storage_mib", "max_lines", "keep_days"):
            check(getattr(self, name) > 0, name, "must be above 0")
        check(0 <= self.concurrent <= 4096, "concurrent", "must be between 0 and 4096")
