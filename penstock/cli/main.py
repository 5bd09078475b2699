"""The entry point of the `penstock` command: it finds the subcommand and runs it.

Nothing but the standard library is imported before `main` runs, so that Ctrl-C ends a command quietly from the start.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from penstock.core.errors import PenstockError


def main(argv: Sequence[str] | None = None) -> int:
    _prepare_output()
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _prepare_output() -> None:
    """What the terminal's encoding lacks is shown as a question mark; output that is closed (`>&-`) goes nowhere."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  for as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


@contextmanager
def _exit_at_ctrl_c() -> Iterator[None]:
    """While modules are imported: a KeyboardInterrupt is lost when it comes in a callback of the import system."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # ignored in `command &` of a script
    if not raises or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def make_parser() -> ArgumentParser:
    from penstock import __version__
    from penstock.cli import (
        adapters,
        batch,
        bench,
        chaos,
        chat,
        check,
        completion,
        consume,
        dashboards,
        explain,
        fleet,
        keys,
        profile,
        quantize,
        serve,
        status,
        usage,
        worker,
    )
    from penstock.cli.parser import Parser

    parser: ArgumentParser = Parser(prog="penstock", description="LLM serving that keeps a latency promise.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (
        serve,
        chat,
        check,
        quantize,
        bench,
        batch,
        consume,
        explain,
        status,
        profile,
        fleet,
        adapters,
        chaos,
        keys,
        usage,
        dashboards,
        worker,
    ):
        command.add_parser(subparsers)
    completion.add_parser(subparsers, parser)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    with _exit_at_ctrl_c():
        from penstock.core.errors import PenstockError

        args = make_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except PenstockError as error:
        print(f"{_place(error, args) or 'penstock'}: {error.message}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"penstock: {error.name} is not installed; pip install 'penstock[serve]'", file=sys.stderr)
        return 1
    except BrokenPipeError:  # nobody reads on, as behind `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at the end
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        print(f"penstock: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        return 1


def _place(error: PenstockError, args: Namespace) -> str | None:
    """Where the setting that is wrong is given, unless that is a flag."""
    from penstock.cli.settings import place_of
    from penstock.core.errors import StartupError

    name = error.param
    if not hasattr(args, "config") or not isinstance(error, StartupError) or name in (None, "config"):
        return None
    section, _, last = name.rpartition(".")
    is_flag = section in ("", "server", "engine") and getattr(args, last, None) is not None
    return None if is_flag else place_of(name, args.config)


if __name__ == "__main__":
    sys.exit(main())
