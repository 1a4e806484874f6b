# SPDX-License-Identifier: Apache-2.0
"""`/v1/files` and `/v1/batches`: what is uploaded, answered, and kept from others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from anyaccel.errors import UsageError
from anyaccel.serve.api.models import Models, ServedModel
from anyaccel.serve.requests.files import FileStore
from anyaccel.serve.requests.frontend import Frontend
from anyaccel.serve.requests.tokenizer import ServerTokenizer
from serve_fakes import Answer, ByteTokenizer, Client, FakeEngine

FORM = "multipart/form-data; boundary=xyz"


class Office:
    """A server with files, and a client of it."""

    def __init__(self, folder: Path, keys: tuple[str, ...] = (), most_bytes: int = 1 << 20) -> None:
        self.engine = FakeEngine(lambda request: "about " + bytes(request.prompt[-24:-11]).decode("utf-8", "replace"))
        frontend = Frontend(self.engine, ServerTokenizer(ByteTokenizer()), ("fake",))
        store = FileStore(folder, most_bytes)
        self.models = Models([ServedModel(("fake",), frontend=frontend)], files=store)
        self.client = Client(self.engine, served=self.models, options={"keys": keys})

    async def upload(self, content: bytes, key: str = "", purpose: str = "batch") -> Answer:
        head = b'--xyz\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n'
        parts = [head % (b"purpose", b"") + purpose.encode() + b"\r\n"]
        parts += [head % (b"file", b'; filename="a.jsonl"') + content + b"\r\n", b"--xyz--\r\n"]
        headers = {"content-type": FORM, **self.headers(key)}
        return await self.client.send("POST", "/v1/files", body=b"".join(parts), headers=headers)

    @staticmethod
    def headers(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"} if key else {}

    async def start(self, lines: list[dict[str, Any]], endpoint: str = "/v1/chat/completions") -> Answer:
        kept = await self.upload("\n".join(map(json.dumps, lines)).encode())
        value = {"input_file_id": kept.json["id"], "endpoint": endpoint, "completion_window": "24h"}
        return await self.client.post("/v1/batches", value)

    async def ended(self, identity: str) -> Any:
        while True:
            batch = (await self.client.get(f"/v1/batches/{identity}")).json
            if batch["status"] not in ("in_progress", "cancelling"):
                return batch
            await asyncio.sleep(0.002)

    async def lines(self, identity: str) -> list[Any]:
        content = await self.client.get(f"/v1/files/{identity}/content")
        return [json.loads(line) for line in content.body.splitlines()]


def line(number: int, text: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": f"n{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def in_office(folder: Path, test: Callable[[Office], Awaitable[None]], **options: Any) -> Office:
    office = Office(folder, **options)

    async def run() -> None:
        try:
            await asyncio.wait_for(test(office), 30)
        finally:
            await office.models.close()

    asyncio.run(run())
    return office


def test_a_batch_answers_each_line_as_if_it_had_come_alone(tmp_path: Path) -> None:
    async def test(office: Office) -> None:
        lines = [line(number, f"question {number:2}") for number in range(50)] + [line(50, "x", temperature=-1)]
        begun = (await office.start(lines)).json
        assert begun["status"] == "in_progress" and begun["request_counts"]["total"] == 51
        batch = await office.ended(begun["id"])
        assert batch["status"] == "completed" and batch["completed_at"] >= batch["created_at"]
        assert batch["request_counts"] == {"total": 51, "completed": 50, "failed": 1}
        answers = {each["custom_id"]: each["response"] for each in await office.lines(batch["output_file_id"])}
        assert answers.keys() == {f"n{number}" for number in range(50)}
        for number in (0, 49):
            content = answers[f"n{number}"]["body"]["choices"][0]["message"]["content"]
            assert answers[f"n{number}"]["status_code"] == 200 and f"{number:2}" in content
        (failed,) = await office.lines(batch["error_file_id"])
        assert failed["custom_id"] == "n50" and failed["response"]["status_code"] == 400
        assert failed["response"]["body"]["error"]["param"] == "temperature"
        listed = (await office.client.get("/v1/batches")).json
        assert [each["id"] for each in listed["data"]] == [batch["id"]] and listed["has_more"] is False
        assert office.models.named(None).users == 0

    in_office(tmp_path, test)


def test_a_batch_that_is_cancelled_keeps_what_was_answered(tmp_path: Path) -> None:
    async def test(office: Office) -> None:
        office.engine.gate = asyncio.Semaphore(0)
        begun = (await office.start([line(0, "a"), line(1, "b")])).json
        while len(office.engine.requests) < 2:
            await asyncio.sleep(0.001)
        cancelled = await office.client.send("POST", f"/v1/batches/{begun['id']}/cancel")
        assert cancelled.json["status"] == "cancelling"
        batch = await office.ended(begun["id"])
        assert batch["status"] == "cancelled" and batch["output_file_id"] is None
        assert office.engine.ended == ["closed", "closed"]

    in_office(tmp_path, test)


def test_a_batch_of_a_server_that_has_ended_says_so(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("127.0.0.1", {"id": "batch_" + "0" * 24, "object": "batch", "status": "in_progress", "created_at": 1})

    async def test(office: Office) -> None:
        batch = (await office.client.get("/v1/batches/batch_" + "0" * 24)).json
        assert batch["status"] == "failed" and "restarted" in batch["errors"]["data"][0]["message"]

    in_office(tmp_path, test)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"custom_id": "a"}], "line 1 needs"),
        ([line(0, "a"), line(0, "b")], "line 2: custom_id"),
        ([line(0, "a") | {"url": "/v1/embeddings"}], "line 1: url"),
        ([line(0, "a", stream=True)], "line 1: stream"),
        ([line(0, "a") | {"method": "GET"}], "line 1 needs"),
        ([], "the file has no requests"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_by_its_line(tmp_path: Path, lines: list[Any], said: str) -> None:
    async def test(office: Office) -> None:
        answer = await office.start(lines)
        assert answer.status == 400 and said in answer.json["error"]["message"]

    in_office(tmp_path, test)


def test_files_are_those_of_their_owner(tmp_path: Path) -> None:
    async def test(office: Office) -> None:
        kept = (await office.upload(b"\x00\xffcontent\r\n", "one")).json
        assert (kept["bytes"], kept["filename"], kept["purpose"]) == (11, "a.jsonl", "batch")
        for key, status in (("one", 200), ("two", 404)):
            headers = office.headers(key)
            content = await office.client.get(f"/v1/files/{kept['id']}/content", headers=headers)
            assert content.status == status and (status == 404 or content.body == b"\x00\xffcontent\r\n")
            listed = (await office.client.get("/v1/files", headers=headers)).json["data"]
            assert len(listed) == (status == 200)
        gone = await office.client.send("DELETE", f"/v1/files/{kept['id']}", headers=office.headers("two"))
        assert gone.status == 404
        gone = await office.client.send("DELETE", f"/v1/files/{kept['id']}", headers=office.headers("one"))
        assert gone.json["deleted"] and not list(tmp_path.glob("file_*"))
        value = {"input_file_id": kept["id"], "endpoint": "/v1/chat/completions"}
        assert (await office.client.post("/v1/batches", value, headers=office.headers("one"))).status == 404

    in_office(tmp_path, test, keys=("one", "two"))


@pytest.mark.parametrize("identity", ["file_..", "..%2f..%2fetc", "batch_" + "0" * 24, "file_" + "0" * 24, "x"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, identity: str) -> None:
    async def test(office: Office) -> None:
        assert (await office.client.get(f"/v1/files/{identity}")).status == 404

    in_office(tmp_path / "files", test)


def test_what_is_too_large_or_no_form_is_refused(tmp_path: Path) -> None:
    async def test(office: Office) -> None:
        assert (await office.upload(b"x" * 600)).status == 200
        full = await office.upload(b"x" * 600)
        assert full.status == 413 and "delete others" in full.json["error"]["message"]
        for headers, body in (({"content-type": FORM}, b"no form"), ({}, b"{}")):
            answer = await office.client.send("POST", "/v1/files", body=body, headers=headers)
            assert answer.status in (400, 415), answer.json
        origin = {"content-type": FORM, "origin": "https://other.example"}
        assert (await office.client.send("POST", "/v1/files", body=b"--xyz--", headers=origin)).status == 403

    in_office(tmp_path, test, most_bytes=1000)


def test_without_a_folder_there_are_no_files(tmp_path: Path) -> None:
    async def ask() -> Answer:
        return await Client(FakeEngine()).get("/v1/files")

    assert asyncio.run(ask()).status == 404
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--files-dir"):
        FileStore(tmp_path / "file")
