"""The `PENSTOCK_*` variables, all of which are read here.

Of clients: PENSTOCK_URL and PENSTOCK_API_KEY. Of workers on other machines: PENSTOCK_WORKER_SECRET. Of the server:
every setting, by its path in the settings file in capital letters with two underscores between the parts, as in
PENSTOCK_SERVER__PORT=9000. Lists and mappings are YAML, as in
PENSTOCK_TENANTS='{acme: {weight: 2}}'. An empty variable counts as none.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import StartupError
from penstock.core.settings import is_text, section_fields, section_type
from penstock.core.suggest import did_you_mean
from penstock.settings import Settings

PREFIX = "PENSTOCK_"
URL, API_KEY = "PENSTOCK_URL", "PENSTOCK_API_KEY"
RAY_ADDRESS = "RAY_ADDRESS"  # Ray's own
WORKER_SECRET = "PENSTOCK_WORKER_SECRET"  # of workers on other machines and their gateways
DEFAULT_URL = "http://127.0.0.1:8000"
_NO_SETTINGS = (URL, API_KEY, WORKER_SECRET)


def server_url() -> str | None:
    """The URL at which client commands look for a server."""
    return os.environ.get(URL) or None


def ray_address() -> str | None:
    """The Ray cluster of settings that name none."""
    return os.environ.get(RAY_ADDRESS) or None


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that talk to a running server."""
    parser.add_argument(
        "--url", default=server_url() or DEFAULT_URL, help=f"root of the server (default: {URL}, else {DEFAULT_URL})"
    )
    add_key_argument(parser)


def add_key_argument(parser: argparse.ArgumentParser) -> None:
    key = os.environ.get(API_KEY, "").strip() or None  # files with a key end in a newline
    parser.add_argument("--api-key", metavar="KEY", default=key, help=f"sent as a bearer token (default: {API_KEY})")


def printable(text: str) -> str:
    """What somebody else has written, without what a terminal would obey."""
    return "".join(character for character in text if character.isprintable())


def output_file(text: str) -> Path:
    """The type of an argument: a file that is written after the work, so what is wrong with it is said before."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
        raise argparse.ArgumentTypeError(f"{text} {what}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: permission denied")
    return path


def settings_from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """As a settings file would hold them. A name that is no setting is reported and ignored: it may be another's, as
    those that Kubernetes makes of a service called penstock."""
    known = dict(_names((), Settings))
    values: dict[str, Any] = {}
    for name, text in sorted(environ.items()):
        if not name.startswith(PREFIX) or not text or name in _NO_SETTINGS:
            continue
        if name not in known:
            section_left_out = [other for other in known if other.endswith(f"__{name.removeprefix(PREFIX)}")]
            hint = did_you_mean(name, section_left_out or known, least=0 if section_left_out else 0.6)
            print(f"penstock: {name} is ignored: no such setting{hint}", file=sys.stderr)
            continue
        path, kind = known[name]
        section = values
        for part in path[:-1]:
            section = section.setdefault(part, {})
        section[path[-1]] = _value(name, text, kind)
    return values


def set_by(name: str) -> str | None:
    """The variable that gives a setting, if there is one."""
    variable = PREFIX + name.replace(".", "__").upper()
    return variable if os.environ.get(variable) and variable not in _NO_SETTINGS else None


def _names(above: tuple[str, ...], cls: type) -> Iterator[tuple[str, tuple[tuple[str, ...], Any]]]:
    """Each variable with the path of its setting and the type there."""
    for name, (_, kind) in section_fields(cls).items():
        path = (*above, name)
        section = section_type(kind)
        if section is None:
            yield PREFIX + "__".join(path).upper(), (path, kind)
        else:
            yield from _names(path, section)


def _value(name: str, text: str, kind: Any) -> Any:
    if is_text(kind):
        return text
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise StartupError(f"{name} is not valid YAML: {error}", param=name) from error
