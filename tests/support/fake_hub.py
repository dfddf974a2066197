"""A Hugging Face hub on this host, as far as uploading a folder of a model needs one."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """Keeps what is committed to it with its token."""

    token = "hf_writes"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, Any]] = {}  # what each was created with
        self.files: dict[str, dict[str, bytes]] = {}  # by repository and path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
            return
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            self._create(json.loads(content))
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in path:
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            self._answer(200, {"files": [{"path": one["path"], **plain} for one in json.loads(content)["files"]]})
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], content)
        else:
            self._answer(404, {"error": f"nothing at {path}"})

    def _create(self, wanted: dict[str, Any]) -> None:
        name = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
        status = 409 if name in self.server.repositories else 200
        self.server.repositories.setdefault(name, wanted)
        self._answer(status, {"url": f"{self.server.address}/{name}"})

    def _commit(self, name: str, content: bytes) -> None:
        if name not in self.server.repositories:
            self._answer(404, {"error": "Repository not found"})
            return
        for line in content.splitlines():
            operation = json.loads(line)
            if operation["key"] == "file":
                value = operation["value"]
                self.server.files.setdefault(name, {})[value["path"]] = base64.b64decode(value["content"])
        self._answer(200, {"commitUrl": f"{self.server.address}/{name}/commit/1", "commitOid": "1" * 40})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        pass


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub for as long as a block lasts."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
