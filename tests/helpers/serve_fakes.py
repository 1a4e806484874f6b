# SPDX-License-Identifier: Apache-2.0
"""An engine and a tokenizer for tests of the server's frontend, and a client that is an ASGI server's other side.

The tokens are bytes, so that a test says in plain words what the model answers; nothing here waits for a clock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from anyaccel.inference.text.chat_template import ChatTemplate
from anyaccel.serve.api.application import application
from anyaccel.serve.api.models import Models
from anyaccel.serve.interface import (
    Chunk,
    EngineStoppedError,
    GenerationRequest,
    ModelFacts,
    Stats,
    TokenLogprob,
)
from anyaccel.serve.requests.frontend import Frontend
from anyaccel.serve.requests.tokenizer import ServerTokenizer

END = 256
SPECIAL = {END: "<|end|>", 257: "[TOOL_CALLS]", 258: "<|python_tag|>"}
TEMPLATE = """\
{% for message in messages %}<{{ message.role }}>{{ message.content }}\
{{ message.tool_calls | tojson if message.tool_calls }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


class ByteTokenizer:
    """Each byte is a token."""

    has_chat_template = True
    special = {"eos_token": SPECIAL[END]}  # noqa: RUF012
    end_tokens = (END,)

    def __init__(self, template: str = TEMPLATE) -> None:
        self._template = template

    def template(self, tools: bool = False) -> str:
        return self._template

    def encode(self, text: str, special: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            token, mark = next(((t, m) for t, m in SPECIAL.items() if text.startswith(m)), (None, text[:1]))
            ids += list(mark.encode()) if token is None else [token]
            text = text[len(mark) :]
        return ids

    def decode(self, tokens: list[int], special: bool = False) -> str:
        parts = [
            bytes([token]) if token < 256 else SPECIAL.get(token, "").encode() if special else b"" for token in tokens
        ]
        return b"".join(parts).decode("utf-8", "replace")

    def token_of(self, text: str) -> int | None:
        return next((token for token, mark in SPECIAL.items() if mark == text), None)

    def piece(self, token: int) -> str | None:
        return f"<0x{token:02X}>" if token < 256 else SPECIAL.get(token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
        continue_answer: bool = False,
    ) -> str:
        return ChatTemplate(self._template, {"eos_token": SPECIAL[END]}, "fake").render(
            messages, continue_answer, tools, more
        )


Script = Callable[[GenerationRequest], str | Sequence[int]]


class FakeEngine:
    """Answers what `script` says, a token a chunk, and remembers what it was asked.

    Attributes:
        gate: where it is set, each chunk waits for a permit.
        error: raised before the chunk of this number.
        ended: how each request ended: "stop", "length", "closed" (the frontend went away).
    """

    def __init__(self, script: Script | str = "Hello!", facts: ModelFacts | None = None) -> None:
        self.facts = facts or ModelFacts(context=2048, vocabulary=259, ends=frozenset((END,)), hidden=4, dtype="fp32")
        self.script: Script = (lambda _: script) if isinstance(script, str) else script
        self.requests: list[GenerationRequest] = []
        self.embedded: list[tuple[list[list[int]], str]] = []
        self.ended: list[str] = []
        self.gate: asyncio.Semaphore | None = None
        self.error: tuple[int, Exception] | None = None
        self.grouped = 1
        self.live = True
        self.drained: list[float] = []

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        said = self.script(request)
        tokens = [*ByteTokenizer().encode(said), END] if isinstance(said, str) else list(said)
        if END in tokens and END not in request.ends:
            tokens = tokens[: tokens.index(END)] * request.max_tokens
        tokens = tokens[: request.max_tokens]
        how = "closed"
        try:
            for number, place in enumerate(range(0, len(tokens) or 1, self.grouped)):
                if self.gate is not None:
                    await self.gate.acquire()
                await asyncio.sleep(0)
                if self.error is not None and number == self.error[0]:
                    raise self.error[1]
                part = tuple(tokens[place : place + self.grouped])
                finish: Literal["stop", "length"] | None = None
                if place + self.grouped >= len(tokens):
                    finish = "stop" if part and part[-1] in request.ends else "length"
                    how = finish
                yield Chunk(
                    part,
                    self._logprobs(part, request.sampling.logprobs),
                    self._prompt(request) if not number else None,
                    cached_tokens=3,
                    finish=finish,
                )
        finally:
            self.ended.append(how)

    def _prompt(self, request: GenerationRequest) -> tuple[TokenLogprob, ...] | None:
        return None if request.prompt_logprobs is None else self._logprobs(request.prompt[1:], request.prompt_logprobs)

    @staticmethod
    def _logprobs(tokens: Sequence[int], count: int | None) -> tuple[TokenLogprob, ...]:
        if count is None:
            return ()
        return tuple(
            TokenLogprob(token, -0.5, tuple(((token + more) % 256, -0.5 - more) for more in range(count)))
            for token in tokens
        )

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Literal["mean", "last"], key: str = ""
    ) -> list[list[float]]:
        self.embedded.append(([list(prompt) for prompt in prompts], pooling))
        return [[0.5, -0.5, 0.5, float(len(prompt))] for prompt in prompts]

    def stats(self) -> Stats:
        return Stats(running=2, waiting=1, cache_used=25, cache_total=100, prefix_hits=3, generation_tokens=7)

    def ready(self) -> bool:
        return self.live

    async def drain(self, seconds: float) -> None:
        self.drained.append(seconds)

    async def close(self) -> None:
        self.live = False

    def stop(self) -> None:
        self.error = (0, EngineStoppedError("the engine has ended"))


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, without the [DONE] that it has to end with."""
        data = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        if "chat" in str(data) or "text_completion" in str(data):
            assert data[-1] == "[DONE]"
        return [json.loads(each) for each in data if each != "[DONE]"]


class Client:
    """Sends requests to the application in this loop."""

    def __init__(
        self,
        engine: FakeEngine,
        tokenizer: ByteTokenizer | None = None,
        options: Mapping[str, Any] | None = None,
        served: Models | None = None,
        **more: Any,
    ) -> None:
        self.engine = engine
        self.frontend = Frontend(engine, ServerTokenizer(tokenizer or ByteTokenizer()), ("fake", "other"), **more)
        self.app = application(served or self.frontend, **(options or {}))

    async def send(
        self,
        method: str,
        path: str,
        value: Any = None,
        *,
        body: bytes | Sequence[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        leave: asyncio.Event | None = None,
        answer: Answer | None = None,
    ) -> Answer:
        """One request.

        Args:
            body: as it is, instead of `value` as JSON; in several parts where it is a list.
            leave: the client goes when it is set.
            answer: filled while it comes.
        """
        answer = Answer() if answer is None else answer
        whole = json.dumps(value).encode() if body is None and value is not None else body or b""
        parts = [whole] if isinstance(whole, bytes) else list(whole)
        given = {
            "host": "127.0.0.1:8000",
            **({"content-type": "application/json"} if parts != [b""] else {}),
            **(headers or {}),
        }
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8000),
            "headers": [(name.lower().encode(), text.encode()) for name, text in given.items()],
        }
        never = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            await (leave or never).wait()
            return {"type": "http.disconnect"}

        async def sent(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                assert not answer.status, "an answer has begun twice"
                answer.status = message["status"]
                answer.headers = {name.decode(): text.decode() for name, text in message["headers"]}
            else:
                assert answer.status and not answer.complete
                answer.parts.append(message.get("body", b""))
                answer.complete = not message.get("more_body", False)

        await self.app(scope, receive, sent)
        return answer

    async def post(self, path: str, value: Any, **more: Any) -> Answer:
        return await self.send("POST", path, value, **more)

    async def get(self, path: str, **more: Any) -> Answer:
        return await self.send("GET", path, **more)


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until something holds; they have to bring it about by themselves."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come about")


def post(engine: FakeEngine, path: str, value: Any, **more: Any) -> Answer:
    """One request to a server of its own."""

    async def ask() -> Answer:
        client = Client(engine, **more)
        answer = await client.post(path, value)
        with suppress(RuntimeError):
            assert len(asyncio.all_tasks()) == 1, "a request leaves tasks behind"
        return answer

    return asyncio.run(ask())


def chat(engine: FakeEngine, more: Mapping[str, Any] | None = None, **client: Any) -> Answer:
    """One conversation with a server of its own."""
    value = {"messages": [{"role": "user", "content": "Hi"}], **(more or {})}
    return post(engine, "/v1/chat/completions", value, **client)
