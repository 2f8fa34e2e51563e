"""A Hugging Face cache in a folder of its own, filled by hand; and a Hub to download from."""

import hashlib
import http.server
import json
import shutil
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

COMMIT = "a" * 40


@dataclass(frozen=True)
class Cache:
    """The cache's folder."""

    folder: Path

    def put(self, repository: str, source: Path, *, commit: str = COMMIT, ref: str | None = "main") -> Path:
        """A snapshot with the files of `source`."""
        there = self.folder / f"models--{repository.replace('/', '--')}"
        shutil.copytree(source, there / "snapshots" / commit)
        if ref is not None:
            (there / "refs").mkdir(exist_ok=True)
            (there / "refs" / ref).write_text(commit)
        return there / "snapshots" / commit


@contextmanager
def serve(repository: str, files: dict[str, bytes]) -> Iterator[str]:
    """The address of a Hub with one model."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            path = urllib.parse.urlsplit(self.path).path
            if path.startswith(f"/api/models/{repository}/revision/"):
                self.send(json.dumps({"id": repository, "sha": COMMIT}).encode())
            elif path.startswith(f"/api/models/{repository}/tree/"):
                entries = [
                    {"type": "file", "path": name, "size": len(content), "oid": digest(content)}
                    for name, content in files.items()
                ]
                self.send(json.dumps(entries).encode())
            elif path.startswith(f"/{repository}/resolve/{COMMIT}/"):
                content = files[path.partition(f"{COMMIT}/")[2]]
                self.send(content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT})
            else:
                self.send(b"{}", {"X-Error-Code": "RepoNotFound"}, code=404)

        do_GET = do_HEAD = answer  # noqa: N815

        def send(self, body: bytes, headers: dict[str, str] | None = None, code: int = 200) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def digest(content: bytes) -> str:
    """Git's way of naming a file, near enough."""
    return hashlib.sha1(content).hexdigest()
