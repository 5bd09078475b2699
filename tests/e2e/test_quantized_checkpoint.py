"""`penstock quantize --output`: a folder that serves what the original would, without it and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import LLM, SamplingParams
from penstock.core.errors import StartupError
from tests.conftest import Server, start_server

MOBY_DICK = Path(__file__).parents[1] / "data" / "moby-dick.txt"
MESSAGES = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("quantized") / "smol-int4"
    text = target.with_suffix(".txt")
    text.write_text(MOBY_DICK.read_text()[:2000])
    command = [sys.executable, "-m", "penstock.cli.main", "quantize", "--scheme", "int4", "--output", str(target)]
    said = subprocess.run([*command, "--check", str(text)], capture_output=True, text=True, check=True).stdout
    assert "serve it with" in said
    assert all(measure in said for measure in ("perplexity  ", "top-1 agreement", "KL divergence"))
    return target


@pytest.fixture(scope="module")
def quantized_server(folder: Path) -> Iterator[Server]:
    running = start_server("--kv-memory-gib", "0.1", "--max-model-len", "1024", str(folder))
    yield running
    running.process.kill()


def test_it_serves_what_the_original_would(quantized_server: Server) -> None:
    body = {"model": "smol-int4", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{quantized_server.base_url}/chat/completions", json=body, timeout=60).json()
    with LLM("smollm2-135m", quantization="int4", kv_memory_gib=0.1, max_model_len=1024) as original:
        expected = original.chat(MESSAGES, SamplingParams(max_tokens=24, temperature=0)).text
        defaults = original.sampling_defaults
    assert answer["choices"][0]["message"]["content"] == expected
    (card,) = httpx.get(f"{quantized_server.base_url}/models").json()["data"]
    assert card["sampling_defaults"]["temperature"] == defaults.temperature == 0.2


def test_weights_that_could_not_be_kept_are_not_announced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    command = [sys.executable, "-m", "penstock.cli.main", "quantize"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "cannot keep packed weights" in run.stderr
    assert run.stdout.startswith("int8: ")
    assert "packed" not in run.stdout


def test_the_worker_has_no_torch_and_says_what_it_uses(quantized_server: Server) -> None:
    listing = subprocess.run(["pgrep", "-P", str(quantized_server.process.pid)], capture_output=True, text=True)
    worker = listing.stdout.split()[0]
    assert "libtorch" not in Path(f"/proc/{worker}/maps").read_text()
    quantized_server.stop()
    assert any("memory:" in line and "MiB in all" in line for line in quantized_server.log)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "int8"}, "holds int4 weights, not int8"),
        ({"dtype": "float32"}, "packed in int4; leave dtype out"),
        ({"device": "cuda"}, "packed for the CPU"),
    ],
)
def test_other_precisions_are_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        LLM(str(folder), **settings)


def test_weights_of_another_layout_are_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes().replace(b'{"version": ', b'{"version":9'))
    with pytest.raises(StartupError, match="write it again"):
        LLM(str(tmp_path))
