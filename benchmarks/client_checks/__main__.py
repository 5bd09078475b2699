"""`python -m client_checks MODULE URL MODEL` runs the checks of a module: a line of JSON for each, as from npm.mjs."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import traceback

from client_checks.of_openai import Check


def main(module: str, url: str, model: str) -> None:
    checks: dict[str, Check] = importlib.import_module(f"client_checks.{module}").CHECKS
    for name, check in checks.items():
        failed = False
        with contextlib.redirect_stdout(sys.stderr):  # where clients print themselves
            try:
                seen = check(url, model)
            except Exception as error:
                failed, seen = True, f"**failed**: {error!r}"
                traceback.print_exc()
        print(json.dumps({"name": name, "seen": seen, "failed": failed}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
