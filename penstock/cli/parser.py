"""An argument parser that suggests the nearest flag, command or value for a mistyped one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from penstock.core.suggest import did_you_mean

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


class Parser(argparse.ArgumentParser):
    """Flags have one spelling: an abbreviation would change its meaning when a flag is added."""

    # What to write for a flag of another program; empty for one that is not known.
    instead_of: Callable[[str], str] = staticmethod(lambda flag: "")

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A subcommand complains itself about what it does not know, so that its own flags are suggested."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(word + self._hint(word) for word in rest)}")
        return known, rest

    def _hint(self, word: str) -> str:
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            return ""
        return self.instead_of(flag) or did_you_mean(flag, self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        if found := _CHOICE.search(message):
            message += did_you_mean(found[1], re.findall(r"'([^']*)'", found[2]))
        super().error(message)
