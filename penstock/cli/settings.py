"""Reads the settings of a command: a YAML file, overridden by environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.environment import set_by, settings_from_environment
from penstock.core.errors import StartupError
from penstock.core.setting_paths import with_absolute_paths
from penstock.settings import Settings

if TYPE_CHECKING:
    import yaml


def file_and_environment(path: str | None) -> dict[str, Any]:
    """The settings of file and environment as a mapping, for `settings_from_mapping`."""
    return merged(read_yaml(path), settings_from_environment())


def read_yaml(path: str | None) -> dict[str, Any]:
    """The contents of a settings file, in which relative paths begin at its folder; empty without a file."""
    if path is None:
        return {}
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        _check_unique(yaml.compose(text, yaml.SafeLoader))
        values = yaml.safe_load(text) or {}
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}", param="config") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = path if mark is None else f"{path}:{mark.line + 1}:{mark.column + 1}"
        raise StartupError(f"{place}: not valid YAML: {error.problem}", param="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not valid YAML: {error}", param="config") from error
    except RecursionError:
        raise StartupError(f"{path} is nested too deeply, or an alias in it holds itself", param="config") from None
    if not isinstance(values, dict):
        raise StartupError(f"{path} must hold a mapping with model, engine and server", param="config")
    folder = os.path.dirname(os.path.abspath(path)) if os.path.isfile(path) else os.getcwd()  # a pipe has none
    absolute: dict[str, Any] = with_absolute_paths(Settings, values, folder)
    return absolute


def place_of(name: str, file: str | None) -> str | None:
    """What gives a setting, or the nearest one above it: a variable, or FILE:LINE as editors understand it."""
    import yaml

    variable = set_by(name)
    if variable is not None or file is None:
        return variable
    line = _line(yaml.compose(Path(file).read_text(encoding="utf-8")), name)
    return None if line is None else f"{file}:{line}"


def _line(node: yaml.Node | None, name: str) -> int | None:
    import yaml

    for key, below in node.value if isinstance(node, yaml.MappingNode) else ():
        if name == key.value or name.startswith(f"{key.value}."):
            return _line(below, name.removeprefix(f"{key.value}.")) or int(key.start_mark.line) + 1
    return None


def _check_unique(node: yaml.Node | None) -> None:
    """Of two equal keys PyYAML would silently use the last one."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        for below in node.value:
            _check_unique(below)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, below in node.value:
        if isinstance(key, yaml.ScalarNode):
            if (first := lines.get(key.value)) is not None:
                problem = f"{key.value} stands here and on line {first}; put both together"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        _check_unique(below)


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge section by section. A section of a wrong type is left to the validation."""
    result = dict(values)
    for name, value in over.items():
        below = result.get(name)
        result[name] = merged(below or {}, value) if isinstance(value, dict) and _may_hold(below) else value
    return result


def _may_hold(section: Any) -> bool:
    return section is None or isinstance(section, dict)
