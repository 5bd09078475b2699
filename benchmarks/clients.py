"""Run the clients that people use, as they are, against `penstock serve`: text, streams, tools, structured output.

    python benchmarks/clients.py --url http://127.0.0.1:8000 --model smollm2-135m \
        --python NEWEST/bin/python --python OLDER/bin/python --python CREWAI/bin/python --node FOLDER > docs/clients.md

`PACKAGES` says what each module of `client_checks` needs, beside openai. Some of these packages exclude each other, and
they may want other versions of what Penstock's tests use, so they are in environments of their own: a module runs in
the first one that has all of its packages. `--node` is the folder where `npm install` was run with `NPM_PACKAGES`, for
`client_checks/npm.mjs`; their newest versions need Node.js 22. The server has to serve a model for embeddings too. The
output is a page of Markdown; the exit code is 1 if something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = {
    "of_openai": ("langchain-openai",),
    "of_others": (
        "anthropic",
        "langchain-anthropic",
        "ollama",
        "langchain-ollama",
        "cohere",
        "litellm",
    ),  # litellm[mcp]
    "of_frameworks": (
        "openai-agents",
        "pydantic-ai-slim",  # pydantic-ai-slim[openai]
        "smolagents",  # smolagents[openai]
        "autogen-ext",  # autogen-ext[openai]
        "haystack-ai",
        "dspy",
        "google-adk",
        "outlines",
        "agno",
    ),
    "of_older": (
        "instructor",
        "llama-index-llms-openai-like",
        "llama-index-llms-ollama",
        "strands-agents",  # strands-agents[openai]
        "semantic-kernel",
        "huggingface_hub",
    ),
    "of_crewai": ("crewai",),
}
NPM_PACKAGES = (
    "openai",
    "@openai/agents",
    "@langchain/openai",
    "ai",
    "@ai-sdk/openai",
    "@ai-sdk/anthropic",
    "@anthropic-ai/sdk",
    "ollama",
    "cohere-ai",
    "@mastra/core",
    "zod",
)
LIST_VERSIONS = """
import importlib.metadata, json
print(json.dumps({found.name: found.version for found in importlib.metadata.distributions()}))
"""
HERE = Path(__file__).parent
# Clients that ask for prices or send statistics would wait for a network that is perhaps not there.
NOTHING_ELSEWHERE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
}


def run_checks(command: Sequence[str], folder: Path) -> int:
    """Print a row for each line of JSON that the command writes, and return how many checks failed."""
    failed = 0
    environment = {**os.environ, **NOTHING_ELSEWHERE}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as checks:
        assert checks.stdout is not None
        for line in checks.stdout:
            outcome = json.loads(line)
            print_row(outcome["name"], outcome["seen"])
            failed += outcome["failed"]
    if checks.returncode:
        raise subprocess.CalledProcessError(checks.returncode, command)
    return failed


def print_row(name: str, seen: str) -> None:
    cell = seen.replace("|", "\\|").replace("\n", " ")[:200]
    print(f"| {name} | {cell} |", flush=True)


def choose_environments(pythons: Sequence[str]) -> dict[str, str]:
    """For each module the Python that runs it; prints the versions of what it runs there."""
    installed: dict[str, dict[str, str]] = {
        python: json.loads(subprocess.run([python, "-c", LIST_VERSIONS], stdout=subprocess.PIPE, check=True).stdout)
        for python in pythons
    }
    chosen: dict[str, str] = {}
    for module, packages in PACKAGES.items():
        complete = [python for python in pythons if installed[python].keys() >= {"openai", *packages}]
        if not complete:
            sys.exit(f"no environment has all of openai, {', '.join(packages)}, for client_checks/{module}.py")
        chosen[module] = complete[0]
    for python, found in installed.items():
        names = ["openai", *(name for module in PACKAGES if chosen[module] == python for name in PACKAGES[module])]
        print(f"Python: {', '.join(f'{name} {found[name]}' for name in names)}.\n")
    return chosen


def node_packages(folder: Path) -> list[str]:
    found = [json.loads((folder / "node_modules" / name / "package.json").read_text()) for name in NPM_PACKAGES]
    return [f"{package['name']} {package['version']}" for package in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--python", action="append", help="of an environment with clients; may be repeated")
    parser.add_argument("--node", type=Path, help="a folder with node_modules")
    args = parser.parse_args()
    print(f"# Clients\n\nWhat `benchmarks/clients.py` saw of clients as they are, with {args.model}.")
    print("Answers are those of a very small model: what counts is that they have the form that was asked for.\n")
    chosen = choose_environments(args.python or [sys.executable])
    if args.node is not None:
        print(f"npm: {', '.join(node_packages(args.node))}.\n")
    print("| client | outcome |\n|---|---|")
    failed = 0
    for module, python in chosen.items():
        failed += run_checks([python, "-m", "client_checks", module, args.url, args.model], HERE)
    if args.node is not None:
        script = shutil.copy(HERE / "client_checks" / "npm.mjs", args.node / "penstock-clients.mjs")
        failed += run_checks(["node", script, args.url, args.model], args.node)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
