"""Samples of all rounds into two tables: what each system reaches, and how far Penstock is ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from peers.cases import COLUMNS, Column
from penstock.bench.report import render_table

Figures = dict[str, float]  # by the keys of COLUMNS
Rounds = Mapping[str, Sequence[Figures]]  # by system; a round in which it failed is an empty entry


def medians(rounds: Sequence[Figures]) -> Figures:
    found = {key: [figures[key] for figures in rounds if key in figures] for key in COLUMNS}
    return {key: median(values) for key, values in found.items() if values}


def advantage(column: Column, own: float, other: float) -> float:
    """How many times better `own` is: above 1 it is faster, smaller or sooner."""
    return other / own if column.lower_wins else own / other


def advantages(own: Sequence[Figures], other: Sequence[Figures]) -> Figures:
    """The median over rounds of the ratio within a round, since machines drift from one round to the next."""
    ratios: list[Figures] = [
        {key: advantage(column, mine[key], its[key]) for key, column in COLUMNS.items() if key in mine and key in its}
        for mine, its in zip(own, other, strict=False)
    ]
    return medians(ratios)


def figures_table(rounds: Rounds) -> str:
    return _table("median", {name: medians(found) for name, found in rounds.items()}, None)


def ratios_table(rounds: Rounds, own: str) -> str:
    rows = {name: advantages(rounds[own], found) for name, found in rounds.items() if name != own}
    return _table(f"{own} is better by", rows, 2)


def _table(title: str, rows: Mapping[str, Figures], digits: int | None) -> str:
    shown = {key: column for key, column in COLUMNS.items() if any(key in row for row in rows.values())}

    def cell(row: Figures, key: str, column: Column) -> str:
        return f"{row[key]:,.{column.digits if digits is None else digits}f}" if key in row else "-"

    lines = [[name, *(cell(row, key, column) for key, column in shown.items())] for name, row in rows.items()]
    return render_table([title, *(column.title for column in shown.values())], lines)
