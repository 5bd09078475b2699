"""Run the clients that people use, as they are, against `penstock serve`: text, streams, tools, structured output.

    python benchmarks/clients.py --url http://127.0.0.1:8000 --model smollm2-135m > docs/clients.md

It needs openai, anthropic, ollama, langchain-openai, langchain-anthropic, llama-index-llms-openai-like,
llama-index-llms-ollama, litellm (with mcp) and instructor, which may want other versions of what Penstock's tests use:
install them into an environment of their own. With `--node FOLDER`, where `npm install openai ai @ai-sdk/openai
@ai-sdk/anthropic` was run, `client_checks/npm.mjs` runs there too. The output is a page of Markdown; the exit code is 1
if something failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from client_checks import of_openai, of_others

PACKAGES = (
    "openai",
    "anthropic",
    "ollama",
    "langchain-openai",
    "langchain-anthropic",
    "llama-index-llms-openai-like",
    "llama-index-llms-ollama",
    "litellm",
    "instructor",
)
CHECKS: dict[str, Callable[[str, str], str]] = {**of_openai.CHECKS, **of_others.CHECKS}


def run_python(url: str, model: str) -> int:
    """Print a row for each check, and return how many failed."""
    failed = 0
    for name, check in CHECKS.items():
        try:
            seen = check(url, model)
        except Exception as error:
            failed += 1
            seen = f"**failed**: {error!r}"
            traceback.print_exc(file=sys.stderr)
        print_row(name, seen)
    return failed


def run_node(url: str, model: str, folder: Path) -> int:
    """The same for clients in JavaScript: the script is copied to where their packages are."""
    script = shutil.copy(Path(__file__).parent / "client_checks" / "npm.mjs", folder / "penstock-clients.mjs")
    ran = subprocess.run(["node", script, url, model], cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    outcomes = [json.loads(line) for line in ran.stdout.splitlines()]
    for outcome in outcomes:
        print_row(outcome["name"], outcome["seen"])
    return sum(outcome["failed"] for outcome in outcomes)


def print_row(name: str, seen: str) -> None:
    cell = seen.replace("|", "\\|").replace("\n", " ")[:200]
    print(f"| {name} | {cell} |", flush=True)


def node_packages(folder: Path) -> list[str]:
    wanted = json.loads((folder / "package.json").read_text())["dependencies"]
    names = [name for name in wanted if name in ("openai", "ai", "@ai-sdk/openai", "@ai-sdk/anthropic")]
    found = [json.loads((folder / "node_modules" / name / "package.json").read_text()) for name in names]
    return [f"{package['name']} {package['version']}" for package in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--node", type=Path, help="a folder with node_modules")
    args = parser.parse_args()
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    print(f"# Clients\n\nWhat `benchmarks/clients.py` saw of clients as they are, with {args.model}.")
    print("Answers are those of a very small model: what counts is that they have the form that was asked for.\n")
    print(f"Python: {packages}.\n")
    if args.node is not None:
        print(f"npm: {', '.join(node_packages(args.node))}.\n")
    print("| client | outcome |\n|---|---|")
    failed = run_python(args.url, args.model)
    if args.node is not None:
        failed += run_node(args.url, args.model, args.node)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
