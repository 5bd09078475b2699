"""`penstock dashboards export FOLDER`: dashboards for Grafana, rules and alerts for Prometheus."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

RULES = "penstock-rules.yaml"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("dashboards", help="dashboards for Grafana, rules and alerts for Prometheus")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser("export", help="write them into a folder")
    export.add_argument(
        "folder", nargs="?", type=Path, default=Path("penstock-dashboards"), help="default: %(default)s"
    )
    export.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    written = export_to(args.folder)
    print(f"wrote {len(written)} files into {args.folder}:")
    for path, what in written.items():
        print(f"  {path.name:24}{what}")
    print(
        f"\nPrometheus: add {args.folder / RULES} to rule_files.\n"
        "Grafana: Dashboards, New, Import; or put the folder where Grafana provisions dashboards from."
    )
    return 0


def export_to(folder: Path) -> dict[Path, str]:
    """The files written and what each is."""
    import yaml

    from penstock.observability.grafana import DASHBOARDS
    from penstock.observability.rules import ALERTS, RECORDS, rules

    folder.mkdir(parents=True, exist_ok=True)
    written = {folder / RULES: f"{len(ALERTS)} alerts and {len(RECORDS)} recording rules for Prometheus"}
    text = yaml.safe_dump(rules(), sort_keys=False, allow_unicode=True, width=120)
    (folder / RULES).write_text(text, encoding="utf-8")
    for dashboard in DASHBOARDS:
        path = folder / f"{dashboard.name}.json"
        path.write_text(json.dumps(dashboard.json(), indent=2) + "\n")
        written[path] = f"{dashboard.title}: {dashboard.about}"
    return written
