"""LoRA adapters through a real server: loaded by a command, known to every gateway process, limited to tenants, and
swapped under their names while requests run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from penstock.checkpoint.source import resolve
from penstock.lora.checkpoint import adapter_digest
from penstock.lora.fit import projections
from penstock.models.config import read_config
from tests.conftest import Server, start_server
from tests.e2e.test_server import MODEL
from tests.lora.peft_folder import write_adapter

ROOT = Path(__file__).parents[2]
BASE = projections(read_config(resolve(MODEL)))
SETTINGS = """
server: {{processes: 2}}
engine: {{kv_memory_gib: 0.1}}
adapter_folder: {folder}/adapters
tenants: {{all: {{}}, few: {{models: [support]}}}}
cache: {{enabled: false}}
"""


@dataclass
class Running:
    server: Server
    folder: Path
    keys: dict[str, str]

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        asked = [*penstock("adapters", *words), "--url", self.server.url, "--api-key", self.keys["admin"]]
        return subprocess.run(asked, capture_output=True, text=True)

    def ask(self, model: str, tenant: str = "all") -> tuple[int, str]:
        """On a connection of its own, so that either gateway process may answer."""
        body = {"model": model, "prompt": "The ship that came in", "max_tokens": 8, "temperature": 0}
        key = {"authorization": f"Bearer {self.keys[tenant]}"}
        response = httpx.post(f"{self.server.base_url}/completions", json=body, headers=key, timeout=100)
        found = response.json()
        return response.status_code, found["choices"][0]["text"] if "choices" in found else found["error"]["message"]


def penstock(*words: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", *words]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("support", "legal")):
        write_adapter(folder / "adapters" / name, BASE, seed, size=0.06)
    config, state = folder / "settings.yaml", f"sqlite:///{folder}/state.sqlite"
    config.write_text(SETTINGS.format(folder=folder))
    keys = {}
    for name, who in (("admin", "--admin"), ("all", "all"), ("few", "few")):
        create = penstock("keys", "create", who, "--config", str(config), "--state", state)
        keys[name] = subprocess.run(create, capture_output=True, text=True, check=True).stdout.strip()
    server = start_server("--config", str(config), "--state", state)
    yield Running(server, folder, keys)
    server.stop()


def test_names_mean_the_same_in_every_process(running: Running) -> None:
    right = {name: running.ask(name) for name in (MODEL, "support", "legal")}
    assert {status for status, _ in right.values()} == {200}
    assert len(set(right.values())) == 3
    for path in ("support", "legal"):
        loaded = running.command("load", "mine", path)
        digest = adapter_digest(running.folder / "adapters" / path)
        assert loaded.stdout == f"mine is an adapter of {MODEL}, digest {digest}\n", loaded.stderr
        assert {running.ask("mine") for _ in range(8)} == {right[path]}
    listed = [row.split()[0] for row in running.command("list").stdout.splitlines()]
    assert listed == ["adapter", "legal", "support", "mine"]
    assert running.command("unload", "mine").stdout == "mine is no longer served\n"
    assert {running.ask("mine")[0] for _ in range(8)} == {404}
    refused = running.command("load", "mine", "../..")
    assert refused.returncode == 1
    assert f"lora_path must be below {running.folder}/adapters" in refused.stderr


def test_a_tenant_uses_its_adapters_alone(running: Running) -> None:
    assert running.ask("support", "few") == running.ask("support")
    for name in (MODEL, "legal", "absent"):
        status, message = running.ask(name, "few")
        assert (status, message) == (404, running.ask("absent", "few")[1].replace("absent", name))
    key = {"authorization": f"Bearer {running.keys['few']}"}
    cards = httpx.get(f"{running.server.base_url}/models", headers=key).json()["data"]
    assert [card["id"] for card in cards] == ["support"]
    body = {"lora_name": "mine", "lora_path": "legal"}
    assert httpx.post(f"{running.server.base_url}/load_lora_adapter", json=body, headers=key).status_code == 403


def test_an_adapter_that_overflows_is_an_error_and_no_answer(running: Running) -> None:
    folder = write_adapter(running.folder / "adapters" / "huge", BASE, size=1e19)
    loaded = running.command("load", "huge", str(folder))
    assert loaded.returncode == 0, loaded.stderr
    status, message = running.ask("huge")
    assert (status, "weights of the model or of its LoRA adapter" in message) == (500, True), message
    assert running.ask(MODEL)[0] == 200
    assert running.command("unload", "huge").returncode == 0


def test_a_folder_is_checked_without_a_server(running: Running) -> None:
    def check(folder: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            penstock("adapters", "check", str(running.folder / folder)), capture_output=True, text=True
        )

    found = check("adapters/support")
    assert found.returncode == 0, found.stderr
    rank, modules, _, digest, verdict = found.stdout.splitlines()
    assert rank == "rank      4, alpha 8"
    assert modules == "modules   90: down_proj, q_proj, v_proj"
    assert digest.split() == ["digest", adapter_digest(running.folder / "adapters" / "support")]
    assert verdict == f"It fits {MODEL}."
    write_adapter(running.folder / "large", BASE, rank=128)
    found = check("large")
    assert found.returncode == 1
    assert "the adapter's rank is 128" in found.stdout
    assert "supported: up to 64" in found.stdout


def test_answers_come_from_the_right_adapter_while_names_are_swapped() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "adapter_swaps.py"), "--requests", "200", "--adapters", "6"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*script, "--kills", "1"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong 0, unknown 0" in done.stdout
