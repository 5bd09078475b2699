"""What usually arrives at each time of the day, kept in a file, so that a restart does not have to learn it again."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from urllib.parse import quote

from penstock.autoscaling.arrivals import Profile
from penstock.core.machine import state_folder

log = logging.getLogger(__name__)

_VERSION = 1


def profile_path(model: str) -> Path:
    return state_folder() / "arrivals" / f"{quote(model, safe='')}.json"


def save_profile(profile: Profile, path: Path) -> None:
    """Nothing is written before a whole bin has been seen."""
    seen = [[float(f"{rate:.4g}") for rate in rates] for rates in profile.seen]
    if not any(seen):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"version": _VERSION, "period": profile.period, "seen": seen}))
        temporary.replace(path)
    except OSError as error:
        log.warning("cannot keep the course of arrivals in %s: %s; the next start learns it again", path, error)


def load_profile(profile: Profile, path: Path) -> None:
    """Of a file for another period nothing is taken."""
    try:
        stored = json.loads(path.read_text())
        if stored["version"] == _VERSION and stored["period"] == profile.period:
            profile.restore([[float(rate) for rate in rates] for rates in stored["seen"]])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("cannot read the course of arrivals from %s: %s; it is learnt again", path, error)
