from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from penstock.checkpoint.block_formats import FORMATS
from penstock.checkpoint.gguf import GGUFFile
from penstock.core.errors import StartupError

HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
ROWS, COLUMNS = 700, 512  # more than one chunk


def random_blocks(kind: int, rng: np.random.Generator) -> np.ndarray:
    """Any bits are valid quants; the float16 fields must be finite."""
    block = FORMATS[kind]
    if block.name == "F32":
        return rng.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    if block.name == "F16":
        return rng.standard_normal((ROWS, COLUMNS)).astype(np.float16)
    if block.name == "BF16":
        return gguf.quants.quantize(rng.standard_normal((ROWS, COLUMNS), dtype=np.float32), Kind.BF16)
    data = rng.integers(0, 256, (ROWS * COLUMNS // block.values, block.nbytes), dtype=np.uint8)
    for offset in HALVES[block.name]:
        data[:, offset : offset + 2] = rng.standard_normal((len(data), 1)).astype(np.float16).view(np.uint8)
    return data.reshape(ROWS, -1)


Tensors = dict[str, tuple[int, np.ndarray]]


def write_gguf(path: Path, tensors: Tensors, **metadata: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=Kind(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: FORMATS[kind].name)
def test_unpacks_like_the_reference(kind: int, tmp_path: Path) -> None:
    data = random_blocks(kind, np.random.default_rng(kind))
    expected = gguf.quants.dequantize(data, Kind(kind))
    read = GGUFFile(write_gguf(tmp_path / "m.gguf", {"odd": (0, np.ones(3, np.float32)), "w": (kind, data)})).read("w")
    assert read.dtype == np.float32
    assert read.shape == (ROWS, COLUMNS)
    assert read.flags.writeable
    np.testing.assert_allclose(read, expected, rtol=1e-6, atol=1e-6)


def test_metadata_comes_as_python_values(tmp_path: Path) -> None:
    values = {
        "name": "Größe",
        "on": True,
        "count": 7,
        "negative": -7,
        "ratio": 0.5,
        "words": ["a", "", "ü€"],
        "ids": [3, 1, 2],
        "floats": [0.5, -2.0],
        "flags": [True, False],
    }
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", {}, **values))
    for key, value in values.items():
        assert file.metadata[key] == value
        assert type(file.metadata[key]) is type(value)


def test_shape_is_row_major_and_alignment_is_honoured(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(128)
    arrays = {name: np.random.default_rng(0).random((2, 3, n), dtype=np.float32) for n, name in enumerate("abc", 5)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "m.gguf")
    for name, array in arrays.items():
        assert file.tensors[name].shape == array.shape
        np.testing.assert_array_equal(file.read(name), array)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    rng = np.random.default_rng(1)
    tensors: Tensors = {"a": (8, rng.integers(0, 64, (4, 68), dtype=np.uint8)), "b": (0, np.ones((3, 5), np.float32))}
    path = tmp_path_factory.mktemp("small") / "m.gguf"
    return write_gguf(path, tensors, words=["one", "two"], ids=[1, 2, 3], name="small").read_bytes()


def test_every_truncation_is_refused(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data_end = end_of_tensors(small, path)
    for length in range(data_end):
        path.write_bytes(small[:length])
        with pytest.raises(StartupError, match=r"m\.gguf"):
            GGUFFile(path)


def end_of_tensors(content: bytes, path: Path) -> int:
    path.write_bytes(content)
    return max(tensor.offset + tensor.nbytes for tensor in GGUFFile(path).tensors.values())


def test_flipped_bytes_never_crash(small: bytes, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    path = tmp_path / "m.gguf"
    refused = 0
    for _ in range(600):
        data = bytearray(small)
        for at in rng.integers(0, len(small) - 400, rng.integers(1, 4)):
            data[at] = rng.integers(0, 256)
        path.write_bytes(data)
        try:
            file = GGUFFile(path)
            for name in file.tensors:
                file.read(name)
        except StartupError:
            refused += 1
    assert refused > 100


def test_other_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(StartupError, match="cannot open"):
        GGUFFile(path)
    path.write_bytes(b"")
    with pytest.raises(StartupError, match="cannot open"):
        GGUFFile(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(StartupError, match="begins with b'PK"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(StartupError, match="version 1; supported"):
        GGUFFile(path)


def test_unsupported_content_is_named(tmp_path: Path) -> None:
    q2_k = np.zeros((2, 84), dtype=np.uint8)
    with pytest.raises(StartupError, match=r"tensor w has ggml type 10; supported: .*Q4_K"):
        GGUFFile(write_gguf(tmp_path / "m.gguf", {"w": (Kind.Q2_K, q2_k)}))
    with pytest.raises(StartupError, match="split"):
        GGUFFile(write_gguf(tmp_path / "part.gguf", {}, **{"split.count": 3}))
