"""The architecture as a rule: imports point down only, and the engine half embeds anywhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "penstock"

# Each folder with those it may import, from the table in docs/architecture.md. `cli` composes everything, and so do the
# modules at the top level of the package (llm.py).
TABLE_ROW = re.compile(r"^\| `(\w+)/` \|.*\| ([^|]+) \|$", re.M)
BELOW: dict[str, set[str]] = {
    layer: set() if names == "nothing" else {name.strip("`").removesuffix(".py") for name in names.split(", ")}
    for layer, names in TABLE_ROW.findall((PACKAGE.parent / "docs" / "architecture.md").read_text())
    if names != "everything"
}
WITHOUT_TORCH = ("core", "checkpoint", "text", "engine", "observability", "cache", "gateway")
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
                assert parts[1] in BELOW[layer], f"{path.relative_to(PACKAGE)} imports {name}"


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
    return [name.removesuffix(".__init__") for name in names if not name.endswith("_triton")]


def test_decisions_and_gateway_do_not_load_torch() -> None:
    assert "torch" not in loaded_by([name for layer in WITHOUT_TORCH for name in modules_of(layer)])


def test_the_native_cpu_path_does_not_load_torch() -> None:
    """220 MiB of a server that should stay small; what uses torch is imported once it is needed."""
    modules = ["startup", "native_runner", "packed", "quality", "progress"]
    assert "torch" not in loaded_by(["penstock.worker.main", *(f"penstock.runner.{name}" for name in modules)])


def test_engine_half_needs_no_server_packages() -> None:
    assert not loaded_by([name for layer in ENGINE_HALF for name in modules_of(layer)]) & SERVER_ONLY
