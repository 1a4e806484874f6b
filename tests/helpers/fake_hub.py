# SPDX-License-Identifier: Apache-2.0
"""A server that answers as the Hugging Face Hub does, as far as its client library asks when it downloads."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Attributes:
    repositories: name -> file -> bytes. Files of weights are large files, with a sha256.
    damaged: files that are sent with another content of the same length, so many times.
    cut: files of which a GET sends so many bytes, once.
    asked: each request, as (method, path, range).
    """

    url: str
    repositories: dict[str, dict[str, bytes]]
    damaged: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin"))


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def hub_of(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Within the context, a hub with these repositories is at its `url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append((self.command, path, self.headers.get("range", "")))
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/\w+)?", path):
                self._describe(found[1])
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path):
                self._send_file(found[1], found[2], with_body)
            else:
                self._refuse("EntryNotFound")

        def _describe(self, repository: str) -> None:
            if repository not in hub.repositories:
                self._refuse("RepoNotFound")
                return
            siblings = []
            for name, content in hub.repositories[repository].items():
                each = {"rfilename": name, "size": len(content), "blobId": _blob(content)}
                if _is_large(name):
                    digest = hashlib.sha256(content).hexdigest()
                    each["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
                siblings.append(each)
            body = json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
            self._send(200, {"content-type": "application/json"}, body)

        def _send_file(self, repository: str, name: str, with_body: bool) -> None:
            content = hub.repositories.get(repository, {}).get(name)
            if content is None:
                self._refuse("EntryNotFound")
                return
            tag = hashlib.sha256(content).hexdigest() if _is_large(name) else _blob(content)
            headers = {"etag": f'"{tag}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
            if not with_body:
                self._send(200, headers, content, send=0)
                return
            if hub.damaged.get(name, 0) > 0:
                hub.damaged[name] -= 1
                content = bytes(byte ^ 1 for byte in content)
            status = 200
            if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", "")):
                headers["content-range"] = f"bytes {found[1]}-{len(content) - 1}/{len(content)}"
                content, status = content[int(found[1]) :], 206
            self._send(status, headers, content, send=hub.cut.pop(name, None))

        def _refuse(self, code: str) -> None:
            self._send(404, {"x-error-code": code, "x-error-message": "not here"}, b"")

        def _send(self, status: int, headers: Mapping[str, str], body: bytes, send: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:send])
            self.close_connection = send not in (None, 0) or self.close_connection

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", {name: dict(files) for name, files in repositories.items()})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
