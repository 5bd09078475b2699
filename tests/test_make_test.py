"""`make test` says what every test does, also when one takes its process down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[1] / "Makefile"
# The first test of its process: the report of one before it could still be on its way, and that one be blamed.
CRASH = "import os, signal\ndef test_crash(): os.kill(os.getpid(), signal.SIGILL)\n"
MORE = "".join(f"def test_{i}(): pass\n" for i in range(10))


def make_test(folder: Path) -> subprocess.CompletedProcess[str]:
    """The recipe of `make test` over the tests in `folder`."""
    variables = [f"BIN={Path(sys.executable).parent}", "SERVERS=tests/servers"]
    command = ["make", "-f", str(MAKEFILE), "-o", "lint", "-o", "programs", "test", *variables]
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"}  # all others: 5 s more
    return subprocess.run(command, cwd=folder, env={**os.environ, **plugins}, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("part", ["others", "servers"])
def test_a_crash_hides_no_other_test(tmp_path: Path, part: str) -> None:
    for name in ("others", "servers"):
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / f"test_{name}.py").write_text((CRASH if name == part else "") + MORE)
    run = make_test(tmp_path)
    assert run.returncode != 0
    assert f"crashed while running 'tests/{part}/test_{part}.py::test_crash'" in run.stdout
    assert "1 failed, 10 passed" in run.stdout
    assert run.stdout.count("10 passed") == 2, "the other part"
    assert "Fatal Python error: Illegal instruction" in run.stderr
