"""`penstock check FILE` validates a settings file and prints all settings as `penstock serve` would use them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.cli.requirements import missing_requirements
from penstock.cli.settings import file_and_environment, place_of
from penstock.core.errors import StartupError
from penstock.core.secrets import shown
from penstock.settings import OF_ONE_MODEL, Settings, settings_from_mapping

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("check", help="check a settings file and show what it comes to", description=__doc__)
    parser.add_argument("file", nargs="?", metavar="FILE", help="YAML, as for serve --config; default: variables alone")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    values = file_and_environment(args.file)
    found, settings = problems(values)
    if settings is not None:
        # Where nothing is given, the defaults are asked for, on whatever machine.
        found = list(missing_requirements(settings, "local")) if values else []
        if not found:
            print(as_yaml(settings), end="")
            return 0
    for error in found:
        place = place_of(error.param or "", args.file) or args.file or "environment"
        print(f"{place}: {error.message}", file=sys.stderr)
    return 1


def problems(values: Mapping[str, Any]) -> tuple[list[StartupError], Settings | None]:
    """Collect all errors: each setting with an error is removed, and the rest is checked again. Of one that must be
    given, the error counts, and not that it is missing then."""
    found: list[StartupError] = []
    rest = dict(values)
    while True:
        try:
            settings = settings_from_mapping(rest)
        except StartupError as error:
            if error.param not in [known.param for known in found]:
                found.append(error)
            path = path_in(rest, error.param or "")
            if not path:
                return found, None
            rest = without(rest, path)
        else:
            return found, None if found else settings


def path_in(values: Any, name: str) -> list[Any]:
    """The keys that lead to `engine.max_seqs`, as far as they are there. A tenant's name may have dots of its own."""
    if not isinstance(values, dict):
        return []
    for key, below in values.items():
        if name == str(key):
            return [key]
        if name.startswith(f"{key}."):
            return [key, *path_in(below, name.removeprefix(f"{key}."))]
    return []


def without(values: Mapping[Any, Any], path: list[Any]) -> dict[Any, Any]:
    first, *rest = path
    if not rest:
        return {key: value for key, value in values.items() if key != first}
    return {**values, first: without(values[first], rest)}


def as_yaml(settings: Settings) -> str:
    """A settings file that comes to the same settings, with all defaults and without secrets. What is derived from
    model and machine is null."""
    import yaml

    values = {name: value for name, value in shown(settings).items() if not (settings.models and name in OF_ONE_MODEL)}
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text
