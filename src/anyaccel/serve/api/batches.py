# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/files` and `/v1/batches`: requests of a file, answered in the background into another one."""

from __future__ import annotations

import asyncio
import email.parser
import email.policy
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.models import Models
from anyaccel.serve.api.sending import json_answer, read, read_body
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import Shape
from anyaccel.serve.protocol.errors import ApiError, wrong
from anyaccel.serve.requests.files import FileStore
from anyaccel.serve.requests.frontend import new_id

logger = logging.getLogger("anyaccel.serve")

_AT_ONCE = 32  # requests of a batch; the engine's queue orders them among others
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")

# Answers a request of a batch, given the client, the address and the body: the status and the response.
Answer = Callable[[str, str, bytes], Awaitable[tuple[int, Any]]]


class FileUpload(Shape):
    """`POST /v1/files`, which is a form (multipart/form-data)."""

    file: str
    purpose: str


class BatchRequest(Shape):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: str | None = None  # taken, and of no effect: a batch is answered as soon as it can be
    metadata: dict[str, str] | None = None


class BatchCancel(Shape):
    """`POST /v1/batches/{id}/cancel`, which has no fields."""


class Batches:
    """The batches of a server.

    Args:
        answer: answers one request.
    """

    def __init__(self, store: FileStore, answer: Answer) -> None:
        self._store = store
        self._answer = answer
        self._tasks: dict[str, asyncio.Task[None]] = {}
        for owner, batch in store.listed("batch"):
            if batch["status"] in _OPEN:  # of a server that has ended
                self._end(owner, batch, "failed", [{"code": "server_ended", "message": "the server was restarted"}])

    def start(self, owner: str, request: BatchRequest) -> dict[str, Any]:
        """Begin a batch.

        Raises:
            ApiError: its file is not there, or has lines that are no requests.
        """
        self._store.get(owner, request.input_file_id, "file")
        lines = _parse(self._store.content(request.input_file_id), request.endpoint)
        if len(self._tasks) >= limits.MOST_BATCHES:
            raise ApiError(429, f"{len(self._tasks)} batches are under way already", None, "rate_limit_exceeded")
        now = int(time.time())
        batch: dict[str, Any] = {
            "id": new_id("batch_"),
            "object": "batch",
            "endpoint": request.endpoint,
            "errors": None,
            "input_file_id": request.input_file_id,
            "completion_window": request.completion_window or "24h",
            "status": "in_progress",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": now,
            "request_counts": {"total": len(lines), "completed": 0, "failed": 0},
            "metadata": request.metadata,
        }
        self._store.put(owner, batch)
        task = asyncio.get_running_loop().create_task(self._run(owner, batch, lines))
        self._tasks[batch["id"]] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch["id"], None))
        return batch

    def cancel(self, owner: str, identity: str) -> dict[str, Any]:
        """End a batch; what it has answered is kept."""
        batch = self._store.get(owner, identity, "batch")
        if identity in self._tasks:
            batch = {**batch, "status": "cancelling", "cancelling_at": int(time.time())}
            self._store.put(owner, batch)
            self._tasks[identity].cancel()
        return batch

    async def close(self) -> None:
        """End all of them."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, owner: str, batch: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        good: list[dict[str, Any]] = []
        bad: list[dict[str, Any]] = []
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(line: dict[str, Any]) -> None:
            async with places:
                status, body = await self._answer(owner, line["url"], json.dumps(line["body"]).encode())
            response = {"status_code": status, "request_id": new_id("req_"), "body": body}
            (good if status == 200 else bad).append(
                {"id": new_id("batch_req_"), "custom_id": line["custom_id"], "response": response, "error": None}
            )
            counts = batch["request_counts"]
            counts["completed" if status == 200 else "failed"] += 1
            self._store.put(owner, {**self._store.get(owner, batch["id"], "batch"), "request_counts": counts})

        status = "completed"
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    group.create_task(one(line))
        except asyncio.CancelledError:
            status = "cancelled"
        except Exception:
            logger.exception("batch %s has failed", batch["id"])
            status = "failed"
        for name, answers in (("output_file_id", good), ("error_file_id", bad)):
            if answers:
                content = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in answers).encode()
                kept = self._store.add(owner, f"{batch['id']}_{name[:-8]}.jsonl", "batch_output", content)
                batch[name] = kept["id"]
        self._end(owner, batch, status)

    def _end(self, owner: str, batch: dict[str, Any], status: str, errors: list[dict[str, Any]] | None = None) -> None:
        found = {"object": "list", "data": errors} if errors else None
        self._store.put(owner, {**batch, "status": status, f"{status}_at": int(time.time()), "errors": found})


def _parse(content: bytes, endpoint: str) -> list[dict[str, Any]]:
    """The requests of a file.

    Raises:
        ApiError: a line is none; the error says which.
    """
    lines: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            raise wrong("input_file_id", f"line {number} is no JSON") from None
        if not isinstance(line, dict) or not isinstance(line.get("body"), dict) or line.get("method") != "POST":
            raise wrong("input_file_id", f"line {number} needs custom_id, method (POST), url and body")
        identity = line.get("custom_id")
        if not isinstance(identity, str) or identity in seen:
            raise wrong("input_file_id", f"line {number}: custom_id must be a text that no other line has")
        if line.get("url") != endpoint:
            raise wrong("input_file_id", f"line {number}: url must be {endpoint}, as the batch's endpoint")
        if line["body"].get("stream"):
            raise wrong("input_file_id", f"line {number}: stream is not possible in a batch")
        seen.add(identity)
        lines.append(line)
        if len(lines) > limits.MOST_BATCH_LINES:
            raise wrong("input_file_id", f"more than {limits.MOST_BATCH_LINES} requests")
    if not lines:
        raise wrong("input_file_id", "the file has no requests")
    return lines


def endpoints(models: Models) -> list[Endpoint]:
    """The endpoints of this API; none without a folder for the files."""
    if models.files is None:
        return []
    store = models.files
    batches = models.batches = Batches(store, lambda *request: _answer(models, *request))

    async def upload(request: Request) -> Response:
        content = await read_body(request, replace(models.limits, body=limits.MOST_UPLOAD), form=True)
        fields = _form(request.headers.get("content-type", ""), content)
        name, data = fields.get("file", ("", b""))
        purpose = fields.get("purpose", ("", b""))[1].decode("utf-8", "replace").strip()
        if "file" not in fields or not purpose:
            raise wrong("file" if purpose else "purpose", "is required")
        owner = request.scope["anyaccel.key"]
        return json_answer(await asyncio.to_thread(store.add, owner, name or "file", purpose[:64], data))

    async def files(request: Request) -> Response:
        found = [about for _, about in store.listed("file", request.scope["anyaccel.key"])]
        return json_answer(_page(request, found))

    async def one_file(request: Request) -> Response:
        return json_answer(store.get(request.scope["anyaccel.key"], request.path_params["file"], "file"))

    async def content_of(request: Request) -> Response:
        about = store.get(request.scope["anyaccel.key"], request.path_params["file"], "file")
        return Response(await asyncio.to_thread(store.content, about["id"]), media_type="application/octet-stream")

    async def delete(request: Request) -> Response:
        about = store.get(request.scope["anyaccel.key"], request.path_params["file"], "file")
        store.remove(about["id"])
        return json_answer({"id": about["id"], "object": "file", "deleted": True})

    async def start(request: Request) -> Response:
        body = await read(request, BatchRequest, models.limits)
        return json_answer(batches.start(request.scope["anyaccel.key"], body))

    async def listed(request: Request) -> Response:
        found = [about for _, about in store.listed("batch", request.scope["anyaccel.key"])]
        return json_answer(_page(request, found))

    async def one_batch(request: Request) -> Response:
        return json_answer(store.get(request.scope["anyaccel.key"], request.path_params["batch"], "batch"))

    async def cancel(request: Request) -> Response:
        return json_answer(batches.cancel(request.scope["anyaccel.key"], request.path_params["batch"]))

    return [
        Endpoint("/v1/files", "Upload a file", upload, FileUpload),
        Endpoint("/v1/files", "The files of the client", files),
        Endpoint("/v1/files/{file}", "A file", one_file),
        Endpoint("/v1/files/{file}", "Delete a file", delete, verb="DELETE"),
        Endpoint(
            "/v1/files/{file}/content", "The content of a file", content_of, media_type="application/octet-stream"
        ),
        Endpoint("/v1/batches", "Answer the requests of a file in the background", start, BatchRequest),
        Endpoint("/v1/batches", "The batches of the client", listed),
        Endpoint("/v1/batches/{batch}", "A batch", one_batch),
        Endpoint("/v1/batches/{batch}/cancel", "End a batch", cancel, verb="POST"),
    ]


def _page(request: Request, found: list[dict[str, Any]]) -> dict[str, Any]:
    """A part of a list, behind the entry that the client has had last."""
    after = request.query_params.get("after")
    limit = request.query_params.get("limit", "")
    count = min(int(limit), 10_000) if limit.isascii() and limit.isdigit() and len(limit) < 9 else 100
    if after is not None:
        place = next((i for i, each in enumerate(found) if each["id"] == after), len(found))
        found = found[place + 1 :]
    part = found[:count]
    ends = {"first_id": part[0]["id"], "last_id": part[-1]["id"]} if part else {"first_id": None, "last_id": None}
    return {"object": "list", "data": part, "has_more": len(found) > len(part), **ends}


def _form(kind: str, content: bytes) -> dict[str, tuple[str, bytes]]:
    """The fields of a form: name -> the file's name, and the content.

    Raises:
        ApiError: it is no form.
    """
    head = b"Content-Type: " + kind.encode("latin-1") + b"\r\n\r\n"
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + content)
    if not message.is_multipart():
        raise ApiError(400, "the body is no form (multipart/form-data)")
    fields = {}
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        if isinstance(name, str):
            data = part.get_payload(decode=True)
            fields[name] = (part.get_filename() or "", data if isinstance(data, bytes) else b"")
    return fields


async def _answer(models: Models, key: str, url: str, body: bytes) -> tuple[int, Any]:
    """Answer a request as if it had come by itself, but for its client's key, which is known."""
    assert models.inner is not None
    scope = {
        "type": "http",
        "method": "POST",
        "path": url,
        "raw_path": url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "anyaccel.key": key,
    }
    parts: list[bytes] = []
    status = 0
    sent = False
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await never.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await models.inner(scope, receive, send)
    return status, json.loads(b"".join(parts))
