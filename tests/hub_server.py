"""A Hugging Face hub with one repository, as far as downloads ask for it: the hub's own library talks to it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

FIRST_COMMIT = "a" * 40


class HubServer:
    def __init__(self, repository: str, folder: Path) -> None:
        self.repository, self.folder = repository, folder
        self.commit = FIRST_COMMIT  # of its branch
        self.downloaded: list[str] = []  # files, in the order in which they were asked for
        self.breaks_after: int | None = None  # bytes of a file; then the connection ends
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        about, files = f"/api/models/{self.repository}/", f"/{self.repository}/resolve/"
        content: bytes | None = None
        headers: dict[str, str] = {}
        if path.startswith(about):
            what, _, revision = path.removeprefix(about).partition("/")
            if revision in ("main", self.commit):
                content = json.dumps(self._tree() if what == "tree" else self._summary()).encode()
            headers = {"X-Error-Code": "RevisionNotFound"} if content is None else {}
        elif path.startswith(files):
            name = path.removeprefix(files).partition("/")[2]
            if (self.folder / name).is_file():
                content = (self.folder / name).read_bytes()
                headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": self.commit}
                self.downloaded += [name] if with_body else []
        request.send_response(404 if content is None else 200)
        for header, value in {**headers, "Content-Length": str(len(content or b""))}.items():
            request.send_header(header, value)
        request.end_headers()
        if with_body:
            request.wfile.write((content or b"")[: self.breaks_after])

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _files(self) -> list[Path]:
        return [path for path in sorted(self.folder.rglob("*")) if path.is_file()]

    def _summary(self) -> dict[str, object]:
        siblings = [{"rfilename": str(path.relative_to(self.folder))} for path in self._files()]
        return {"id": self.repository, "sha": self.commit, "private": False, "tags": [], "siblings": siblings}

    def _tree(self) -> list[dict[str, object]]:
        return [
            {
                "type": "file",
                "path": str(path.relative_to(self.folder)),
                "size": path.stat().st_size,
                "oid": _digest(path.read_bytes()),
            }
            for path in self._files()
        ]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def hub_of(repository: str, folder: Path) -> Iterator[HubServer]:
    server = HubServer(repository, folder)
    try:
        yield server
    finally:
        server.stop()
