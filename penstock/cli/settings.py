"""Reads the settings of a command: a YAML file, overridden by environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.cli.environment import settings_from_environment
from penstock.core.errors import StartupError


def file_and_environment(path: str | None) -> dict[str, Any]:
    """The settings of file and environment as a mapping, for `settings_from_mapping`."""
    return merged(read_yaml(path), settings_from_environment())


def read_yaml(path: str | None) -> dict[str, Any]:
    """The contents of a settings file; empty without a file."""
    if path is None:
        return {}
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}", param="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not valid YAML: {error}", param="config") from error
    if not isinstance(values, dict):
        raise StartupError(f"{path} must hold a mapping with model, engine and server", param="config")
    return values


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge section by section. A section of a wrong type is left to the validation."""
    result = dict(values)
    for name, value in over.items():
        below = result.get(name)
        result[name] = merged(below or {}, value) if isinstance(value, dict) and _may_hold(below) else value
    return result


def _may_hold(section: Any) -> bool:
    return section is None or isinstance(section, dict)
