"""The fingerprint of a checkpoint: the same for the same contents, whatever they are called and wherever they lie."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from penstock.checkpoint import revision as module
from penstock.checkpoint.revision import revision
from penstock.checkpoint.source import Checkpoint


def test_a_copy_has_the_same_revision_and_a_change_another(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    os.utime(copy / "model.safetensors", (1, 1))
    found = [revision(Checkpoint(path.name, "folder", path)) for path in (folder, copy)]
    assert found[0] == found[1]
    (copy / "model.safetensors").write_bytes(bytes(500) + b"\x01" + bytes(499))
    (folder / "config.json").write_text('{"rope_theta": 1}')
    found += [revision(Checkpoint(path.name, "folder", path)) for path in (folder, copy)]
    assert len(set(found)) == 3


def test_of_a_large_file_every_stride_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    size = module.WHOLE_BYTES + 3 * module.STRIDE_BYTES + 123
    path.write_bytes(bytes(size))
    found = {revision(Checkpoint("m", "gguf", path))}
    for start in (0, 5 * module.STRIDE_BYTES + 17, size - 1):  # the last byte, and one in the middle of the file
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"\x01")
        found.add(revision(Checkpoint("m", "gguf", path)))
    assert len(found) == 4
