"""The files of the web page, read once into memory: all of them are smaller than 150 KB together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

PAGE = "index.html"
DOCS = "docs.html"
MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    media: bytes
    etag: bytes


@cache
def files() -> dict[str, File]:
    """By name."""
    folder = Path(__file__).parent / "static"
    return {path.name: _file(path) for path in folder.iterdir() if path.suffix in MEDIA}


def _file(path: Path) -> File:
    content = path.read_bytes()
    digest = blake2b(content, digest_size=12).hexdigest()
    return File(content, MEDIA[path.suffix].encode(), f'"{digest}"'.encode())
