"""`penstock chaos` against a real server: every kind of fault, every kind of stream, and nothing lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import start_server

COMMAND = [sys.executable, "-m", "penstock.cli.main"]


def test_no_client_notices_faults(tmp_path: Path) -> None:
    state, report = f"sqlite:///{tmp_path}/state.db", tmp_path / "chaos.json"
    created = subprocess.run(
        [*COMMAND, "keys", "create", "--admin", "--state", state], capture_output=True, text=True, check=True
    )
    server = start_server("--replicas", "2", "--kv-memory-gib", "0.1", "--max-model-len", "1024", "--state", state)
    try:
        chaos = [*COMMAND, "chaos", "--url", server.url]
        refused = subprocess.run(chaos, capture_output=True, text=True)
        assert refused.returncode == 1
        assert "PENSTOCK_API_KEY" in refused.stderr
        chaos += ["--api-key", created.stdout.strip(), "--streams", "12", "--count", "6", "--output-tokens", "24"]
        chaos += ["--slow-seconds", "1", "--seed", "5", "--json", str(report), "--html", str(tmp_path / "chaos.html")]
        done = subprocess.run(chaos, capture_output=True, text=True)
    finally:
        server.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert rows["all"]["faults"] == 6
    assert rows["kill"]["faults"]
    assert sum(rows[kind]["streams"] for kind in ("kill", "freeze", "slow", "cut"))
    for row in rows.values():
        wrong = ("failed", "lost_tokens", "repeated_tokens", "changed", "shed")
        assert {name: row[name] for name in wrong} == dict.fromkeys(wrong, 0)
    assert "passed" in (tmp_path / "chaos.html").read_text()
