"""Print what the given extras of pyproject.toml need, for an image that installs it before Penstock itself."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], extras: list[str]) -> list[str]:
    own, optional = project["dependencies"], project["optional-dependencies"]
    assert isinstance(own, list)
    assert isinstance(optional, dict)
    return [*own, *(requirement for extra in extras for requirement in optional[extra])]


if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    print(*requirements(project, sys.argv[1:]), sep="\n")
