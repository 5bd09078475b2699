"""The architecture as a rule: imports point down only, and the engine half embeds anywhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "penstock"

# Each layer with those, or the modules of those, that it may import. What stands at the top level of the package
# (llm.py, settings.py) composes.
BELOW: dict[str, set[str]] = {
    "core": set(),
    "checkpoint": {"core"},
    "text": {"core", "checkpoint"},
    "engine": {"core"},
    "quantization": {"core"},
    "kernels": {"core", "quantization"},
    "models": {"core", "checkpoint", "kernels"},
    "runner": {"core", "checkpoint", "engine", "kernels", "models", "quantization"},
    "observability": {"core"},
    "state": {"core"},
    "cache": {"core", "text"},
    "client": {"core"},
    "worker": {"core", "engine", "runner", "observability"},
    "simulation": {"core", "engine", "text"},
    "gateway": {"core", "text", "observability", "state", "client", "cache.settings", "engine.settings"},
    "bench": {"core", "checkpoint", "text", "engine", "runner", "models", "client"},
}
# The gateway's protocol server could serve anything: neither tenants nor models are known there.
HTTP_SERVER = {"core", "observability", "gateway.errors", "gateway.http", "gateway.settings"}
WITHOUT_TORCH = ("core", "checkpoint", "text", "engine", "observability", "cache", "gateway", "simulation")
ENGINE_HALF = ("core", "checkpoint", "text", "engine", "kernels", "models", "quantization", "runner", "bench.engine")
SERVER_ONLY = {
    *("starlette", "uvicorn", "msgspec", "pydantic", "prometheus_client", "yaml", "rich", "prompt_toolkit"),
    *("redis", "jwt"),
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("layer", BELOW)
def test_imports_point_down(layer: str) -> None:
    for path in (PACKAGE / layer).rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "penstock" and len(parts) > 1 and parts[1] != layer:
                assert {parts[1], ".".join(parts[1:3])} & BELOW[layer], f"{path.relative_to(PACKAGE)} imports {name}"


def test_the_http_server_knows_neither_tenants_nor_models() -> None:
    allowed = tuple(f"penstock.{name}" for name in HTTP_SERVER)
    for path in (PACKAGE / "gateway" / "http").rglob("*.py"):
        for name in imports(path):
            assert not name.startswith("penstock") or name.startswith(allowed), f"{path.name} imports {name}"


def test_no_import_cycle() -> None:
    modules = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {name: {used for used in imported_at_load(path) if used in files} for name, path in files.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def imported_at_load(path: Path) -> Iterator[str]:
    """Without what functions import, and without what only type checkers see."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)


def test_every_folder_has_a_layer() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders - {"cli"} == set(BELOW)


def loaded_by(modules: list[str]) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def modules_of(layer: str) -> list[str]:
    path = PACKAGE / layer.replace(".", "/")
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    names = (".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files)
    return [name.removesuffix(".__init__") for name in names]


def test_decisions_and_gateway_do_not_load_torch() -> None:
    assert "torch" not in loaded_by([name for layer in WITHOUT_TORCH for name in modules_of(layer)])


def test_the_native_cpu_path_does_not_load_torch() -> None:
    """220 MiB of a server that should stay small; what uses torch is imported once it is needed."""
    modules = ["startup", "native_runner", "packed", "quality", "progress"]
    assert "torch" not in loaded_by(["penstock.worker.main", *(f"penstock.runner.{name}" for name in modules)])


def test_engine_half_needs_no_server_packages() -> None:
    assert not loaded_by([name for layer in ENGINE_HALF for name in modules_of(layer)]) & SERVER_ONLY


def test_commands_are_parsed_without_server_packages() -> None:
    """`penstock bench engine` runs where only the engine is installed."""
    assert not loaded_by(["penstock.cli.main"]) & SERVER_ONLY
