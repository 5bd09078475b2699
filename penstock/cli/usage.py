"""`penstock usage`: who used how many tokens, and what they cost."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from penstock.cli.keys import add_store_arguments, run_on_store

if TYPE_CHECKING:
    from penstock.state.store import Store

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("usage", help="tokens and cost by day, tenant and model")
    today = time.strftime("%Y-%m-%d", time.gmtime())
    parser.add_argument("--since", metavar="DAY", default=today[:7] + "-01", help="default: the first of this month")
    parser.add_argument("--until", metavar="DAY", default=today, help="like 2031-05-06, in UTC; default: today")
    parser.add_argument("--tenant", help="only this one")
    parser.add_argument("--csv", action="store_true")
    add_store_arguments(parser)
    parser.set_defaults(run=lambda args: run_on_store(args, lambda settings, store: _show(args, store)))


async def _show(args: argparse.Namespace, store: Store) -> int:
    from penstock.gateway.tenancy.budgets import COLUMNS, as_csv, day_range, rows

    found = rows(await store.usage(*day_range(args.since, args.until)), args.tenant)
    if args.csv:
        print(as_csv(found), end="")
        return 0
    table = [COLUMNS, *([str(cell) for cell in row] for row in found)]
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    for row in table:
        words = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False)]
        numbers = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        print("  ".join([*words, *numbers]))
    return 0
