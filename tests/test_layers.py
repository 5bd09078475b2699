"""The architecture as a rule: imports point down only, and the engine half embeds anywhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "penstock"

TABLE_ROW = re.compile(r"^\| `([\w/]+)/` \|.*\| ([^|]+) \|$", re.M)


def read_layers() -> dict[str, list[str]]:
    """The table in docs/architecture.md: each folder with the folders and modules (`engine/settings.py`) it may import.

    `cli` composes everything, and so do the modules at the top level of the package, which are not in the table.
    """
    rows = TABLE_ROW.findall((PACKAGE.parent / "docs" / "architecture.md").read_text())
    dotted = [[re.sub(r"`|\.py\b", "", cell).replace("/", ".") for cell in row] for row in rows]
    return {layer: [] if names == "nothing" else names.split(", ") for layer, names in dotted}


LAYERS = read_layers()
WITHOUT_TORCH = (
    *("core", "checkpoint", "text", "engine", "observability", "cache", "gateway", "autoscaling", "fleet"),
    "simulation",
    "speculative",
)
ENGINE_HALF = (
    *("core", "checkpoint", "text", "engine", "kernels", "models", "quantization", "speculative", "runner"),
    "bench.engine",
)
SERVER_ONLY = {
    *("starlette", "uvicorn", "msgspec", "pydantic", "prometheus_client", "yaml", "rich", "prompt_toolkit"),
    *("redis", "jwt", "llguidance"),
}


def imports(path: Path) -> Iterator[str]:
    """What a file imports of the package, such as `core.errors.InvalidRequest`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        ours = (name.removeprefix("penstock.") for name in names if name.startswith("penstock."))
        yield from (name for name in ours if name != "__version__")


def within(name: str, folder: str) -> bool:
    return f"{name}.".startswith(f"{folder}.")


def layer_of(path: Path) -> str | None:
    """The innermost folder in the table that holds a file."""
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return max((layer for layer in LAYERS if within(module, layer)), key=len, default=None)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_down(layer: str) -> None:
    files = [path for path in (PACKAGE / layer.replace(".", "/")).rglob("*.py") if layer_of(path) == layer]
    assert files
    below = [layer, *LAYERS[layer]]
    for path in files if "everything" not in below else ():
        for name in imports(path):
            assert any(within(name, other) for other in below), f"{path.relative_to(PACKAGE)} imports {name}"


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


def test_functions_and_files_stay_short() -> None:
    """A kernel is one function, however long; elsewhere a function fits on a screen."""
    for path in PACKAGE.rglob("*.py"):
        source, where = path.read_text(), path.relative_to(PACKAGE)
        assert source.count("\n") <= 400, where
        for node in ast.walk(ast.parse(source)) if where.parts[0] != "kernels" else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                assert node.end_lineno - node.lineno < 60, f"{where}: {node.name}"


def test_every_folder_is_in_the_table() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= set(LAYERS)


def loaded_by(modules: list[str]) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def modules_of(layer: str) -> list[str]:
    path = PACKAGE / layer.replace(".", "/")
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    names = (".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files)
    return [name.removesuffix(".__init__") for name in names]


def test_decisions_and_gateway_do_not_load_torch() -> None:
    """Nor Ray, which only the driver process beside a gateway imports."""
    modules = {name for layer in WITHOUT_TORCH for name in modules_of(layer)} - {"penstock.fleet.ray.driver"}
    assert not loaded_by(sorted(modules)) & {"torch", "ray"}


def test_the_native_cpu_path_does_not_load_torch() -> None:
    """220 MiB of a server that should stay small; what uses torch is imported once it is needed."""
    modules = ["startup", "native_runner", "packed", "quality", "progress"]
    assert "torch" not in loaded_by(["penstock.worker.main", *(f"penstock.runner.{name}" for name in modules)])


def test_engine_half_needs_no_server_packages() -> None:
    assert not loaded_by([name for layer in ENGINE_HALF for name in modules_of(layer)]) & SERVER_ONLY


def test_commands_are_parsed_without_server_packages() -> None:
    """`penstock bench engine` runs where only the engine is installed."""
    assert not loaded_by(["penstock.cli.main"]) & SERVER_ONLY
