"""One folder per peer: its environment, a log, and a stamp for every installation step that is done."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

TORCH = "torch==2.13.0"


class InstallError(Exception):
    """A step failed. The message names the log."""


class Workshop:
    """Steps that are done stay done: a second run goes on where the first one stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "install.log"

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def once(self, about: str, action: Callable[[], None]) -> None:
        """`about` is shown and identifies the step, so it names the version of what it makes."""
        stamp = self.folder / "done" / hashlib.sha256(about.encode()).hexdigest()[:16]
        if stamp.exists():
            return
        stamp.parent.mkdir(parents=True, exist_ok=True)
        print(f"  {about} ...", file=sys.stderr, flush=True)
        action()
        stamp.write_text(about + "\n")

    def run(self, *command: str | Path, environment: Mapping[str, str] | None = None) -> None:
        """At the lowest priority, its output in the log."""
        words = ["nice", "-n", "19", *map(str, command)]
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(words)}\n".encode())
            log.flush()
            try:
                status = subprocess.run(
                    words, cwd=self.folder, env={**os.environ, **(environment or {})}, stdout=log, stderr=log
                ).returncode
            except OSError as error:
                raise InstallError(f"{words[3]}: {error.strerror}") from error
        if status:
            raise InstallError(f"{Path(words[3]).name} exited with {status}; see {self.log}")

    def venv(self) -> None:
        self.once("environment", lambda: self.run(sys.executable, "-m", "venv", "--clear", "venv"))

    def pip(self, *arguments: str | Path) -> None:
        self.run(self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def torch(self) -> None:
        """First, so that no package pulls in another version. Where pip finds no CPU build it brings CUDA along."""
        self.venv()
        self.once(f"{TORCH} (200 MB)", lambda: self.pip(TORCH))

    def packages(self, *requirements: str) -> None:
        self.once(f"packages {' '.join(requirements)}", lambda: self.pip(*requirements))

    def debian_library(self, package: str, file_name: str) -> Path | None:
        """A shared library of a Debian package, unpacked here without root; None where that cannot be had."""
        if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
            return None
        root = self.folder / "debian"
        if not root.exists():
            root.mkdir(parents=True)
            try:
                self.run("sh", "-c", f"cd debian && apt-get download {package} && dpkg-deb -x {package}_*.deb .")
            except InstallError as error:
                print(f"  without {package}: {error}", file=sys.stderr)
        return next(iter(sorted(root.rglob(file_name))), None)
