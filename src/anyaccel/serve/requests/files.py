# SPDX-License-Identifier: Apache-2.0
"""Files that clients have uploaded, and batches of requests, in a folder of the server's own (`--files-dir`)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.errors import ApiError
from anyaccel.serve.requests.frontend import new_id

_ID = re.compile(r"(?:file|batch)_[0-9a-f]{24}")


class FileStore:
    """Objects as `<id>.json`, and the content of files as `<id>.data`.

    Args:
        folder: made for its owner only.
        most_bytes: of all contents together.

    Raises:
        UsageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, most_bytes: int = limits.MOST_FILE_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise UsageError(f"--files-dir {folder}: {error.strerror}") from None

    def add(self, owner: str, name: str, purpose: str, content: bytes) -> dict[str, Any]:
        """Keep a file for the client that sends it.

        Raises:
            ApiError: there is no room for it.
        """
        used = sum(path.stat().st_size for path in self._folder.glob("*.data"))
        if used + len(content) > self._most_bytes:
            raise ApiError(
                413,
                f"file: {len(content)} bytes, and all files may have {self._most_bytes}, of which {used} are used: "
                "delete others",
                "file",
            )
        identity = new_id("file_")
        self._write(self._folder / f"{identity}.data", content)
        about = {
            "id": identity,
            "object": "file",
            "bytes": len(content),
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        self.put(owner, about)
        return about

    def put(self, owner: str, about: dict[str, Any]) -> None:
        """Keep an object, in place of the one of its id."""
        self._write(self._folder / f"{about['id']}.json", json.dumps({"owner": owner, "object": about}).encode())

    def get(self, owner: str, identity: str, kind: str) -> dict[str, Any]:
        """An object of this client.

        Raises:
            ApiError: there is none.
        """
        found = self._read(identity) if _ID.fullmatch(identity) and identity.startswith(f"{kind}_") else None
        if found is None or found["owner"] != owner:
            raise ApiError(404, f"no {kind} {identity[:100]!r} here", None, f"{kind}_not_found", "not_found_error")
        about: dict[str, Any] = found["object"]
        return about

    def listed(self, kind: str, owner: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Objects with their owners, the newest first; of one client or of all."""
        found = [self._read(path.stem) for path in self._folder.glob(f"{kind}_*.json")]
        there = [each for each in found if each is not None and owner in (None, each["owner"])]
        for each in sorted(there, key=lambda each: (each["object"]["created_at"], each["object"]["id"]), reverse=True):
            yield each["owner"], each["object"]

    def content(self, identity: str) -> bytes:
        """The content of a file that is there."""
        return (self._folder / f"{identity}.data").read_bytes()

    def remove(self, identity: str) -> None:
        """Delete a file that is there."""
        for ending in ("json", "data"):
            (self._folder / f"{identity}.{ending}").unlink(missing_ok=True)

    def _read(self, identity: str) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self._folder / f"{identity}.json").read_bytes())
            if isinstance(found, dict) and isinstance(found.get("object"), dict) and "owner" in found:
                return found
        return None

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        """Write a file as a whole, or not at all."""
        part = path.with_suffix(".part")
        part.write_bytes(content)
        part.replace(path)
