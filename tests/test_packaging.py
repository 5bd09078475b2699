"""What is shipped: a source distribution that builds, a wheel for every Python of a platform, kernels compiled once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "penstock")

# Takes no time, notes what it compiles, and writes the files that it is asked for, by what stands in a header.
COMPILER = """#!/bin/sh
case " $* " in *" -c "*) echo "$*" >> "$(dirname "$0")/compiled";; esac
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then cksum penstock/kernels/native/simd.h > "$2"; fi
    shift
done
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The sources alone, without what was built from them here."""
    folder = tmp_path / "tree"
    folder.mkdir()
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    path = tmp_path / "compiler"
    path.write_text(COMPILER)
    path.chmod(0o755)
    return path


def build(tree: Path, what: str, compiler: Path) -> tuple[Path, str]:
    """A wheel or an sdist as pip builds it, and what was said."""
    code = f"from setuptools.build_meta import build_{what}; print(build_{what}('..'))"
    environ = {**os.environ, "CXX": str(compiler)}
    built = subprocess.run([sys.executable, "-c", code], cwd=tree, env=environ, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return tree.parent / built.stdout.splitlines()[-1], built.stdout


def files(*patterns: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / "penstock").rglob(pattern)}


def test_a_wheel_from_the_sdist_has_everything_and_fits_every_python(
    tree: Path, compiler: Path, tmp_path: Path
) -> None:
    sdist, _ = build(tree, "sdist", compiler)
    shutil.unpack_archive(sdist, tmp_path)
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    needed = files("*.py", "*.cu", "*.cuh", "py.typed")
    assert files("*.h", "*.cpp") | needed <= {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    wheel, _ = build(unpacked, "wheel", compiler)
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    assert needed | {"penstock/kernels/native/_native.so"} <= set(zipfile.ZipFile(wheel).namelist())


def test_the_kernels_are_compiled_once_and_again_when_a_source_changes(tree: Path, compiler: Path) -> None:
    def built() -> tuple[bytes, int]:
        """The library, and how many compilations there were."""
        wheel, _ = build(tree, "wheel", compiler)
        library = zipfile.ZipFile(wheel).read("penstock/kernels/native/_native.so")
        return library, len((compiler.parent / "compiled").read_text().splitlines())

    library, first = built()
    assert first > 5
    assert built() == (library, first)
    header = tree / "penstock/kernels/native/simd.h"
    before = header.read_text()
    header.write_text(before + "// changed\n")
    changed, second = built()
    assert (changed != library, second) == (True, 2 * first)
    header.write_text(before)
    assert built() == (library, second)  # though the other one is newer


def test_without_a_compiler_it_installs_and_says_what_to_do(tree: Path, tmp_path: Path) -> None:
    wheel, said = build(tree, "wheel", tmp_path / "no-compiler")
    assert "penstock/kernels/native/_native.so" not in zipfile.ZipFile(wheel).namelist()
    assert "install g++ 11 or newer and Penstock again, or pip install 'penstock[torch]'" in said
