# SPDX-License-Identifier: Apache-2.0
"""The ASGI application: Starlette routes requests to the handlers, and pydantic validates them."""

from __future__ import annotations

import base64
import functools
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from anyaccel._version import __version__
from anyaccel.serve.api.chat import chat
from anyaccel.serve.api.completions import completions
from anyaccel.serve.api.responses import responses
from anyaccel.serve.api.security import OPEN, Guard, Keys
from anyaccel.serve.api.sending import ClientGoneError, Events, error_answer, json_answer, read, unless_gone
from anyaccel.serve.protocol.chat import ChatRequest, TokenizeRequest
from anyaccel.serve.protocol.common import DetokenizeRequest, EmbeddingRequest
from anyaccel.serve.protocol.completions import CompletionRequest
from anyaccel.serve.protocol.errors import ApiError, wrong
from anyaccel.serve.protocol.openapi import document
from anyaccel.serve.protocol.responses import ResponsesRequest
from anyaccel.serve.requests.conversation import described_tools
from anyaccel.serve.requests.frontend import Frontend
from anyaccel.serve.requests.metrics import MEDIA_TYPE
from anyaccel.serve.requests.rendering import ending_of, rendered

PAGE = Path(__file__).parents[1] / "page"
B = TypeVar("B", bound=BaseModel)


class Generated(Protocol):
    """A checked request, which can be answered at once or as a stream."""

    async def whole(self) -> dict[str, Any]: ...
    def stream(self) -> Any: ...


Endpoint = Callable[[Request], Awaitable[Any]]


def _with_error_responses(work: Endpoint) -> Endpoint:
    """The handler, with its errors turned into responses in OpenAI's shape."""

    @functools.wraps(work)
    async def answer(request: Request) -> Any:
        try:
            return await work(request)
        except ClientGoneError:
            return Response(status_code=499)  # nginx's status for this; nobody reads the response
        except Exception as error:  # noqa: BLE001  no error of one request may end the server
            return error_answer(error)

    return answer


class Api:
    """The handlers of one server."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def routes(self) -> dict[str, tuple[str, Endpoint]]:
        """Path -> method and handler."""
        return {
            "/v1/models": ("GET", self.models),
            "/v1/models/{model:path}": ("GET", self.model),
            "/v1/chat/completions": ("POST", self._generating(ChatRequest, chat)),
            "/v1/completions": ("POST", self._generating(CompletionRequest, completions)),
            "/v1/responses": ("POST", self._generating(ResponsesRequest, responses, b"")),
            "/v1/embeddings": ("POST", self.embeddings),
            "/tokenize": ("POST", self.tokenize),
            "/detokenize": ("POST", self.detokenize),
            "/tokenizer_info": ("GET", self.tokenizer_info),
            "/health": ("GET", self.health),
            "/ready": ("GET", self.ready),
            "/metrics": ("GET", self.metrics),
            "/version": ("GET", self.version),
            "/openapi.json": ("GET", self.openapi),
        }

    def _generating(
        self, shape: type[B], prepare: Callable[[Frontend, B, str], Awaitable[Generated]], done: bytes | None = None
    ) -> Endpoint:
        async def generate(request: Request) -> Any:
            frontend = self._frontend
            asked = await read(request, shape, frontend.limits)
            work = await prepare(frontend, asked, request.scope["anyaccel.key"])
            if getattr(asked, "stream", None):
                events = work.stream()
                return Events(events, frontend.limits) if done is None else Events(events, frontend.limits, done)
            return json_answer(await unless_gone(request.receive, work.whole()))

        return generate

    # The model ---------------------------------------------------------------------------------------------

    def _describe_model(self, name: str) -> dict[str, Any]:
        frontend = self._frontend
        return {
            "id": name,
            "object": "model",
            "created": frontend.created,
            "owned_by": "anyaccel",
            "root": frontend.root or name,
            "max_model_len": frontend.engine.facts.context or None,
            "default_sampling_params": asdict(frontend.defaults),
        }

    async def models(self, request: Request) -> Response:
        return json_answer({"object": "list", "data": [self._describe_model(name) for name in self._frontend.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._frontend.check_model(name)
        return json_answer(self._describe_model(name))

    async def embeddings(self, request: Request) -> Response:
        frontend = self._frontend
        asked = await read(request, EmbeddingRequest, frontend.limits)
        vectors, count = await unless_gone(request.receive, frontend.embed(asked, request.scope["anyaccel.key"]))
        packed = asked.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": _base64_of(vector) if packed else vector}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return json_answer({"object": "list", "model": asked.model or frontend.model, "data": data, "usage": usage})

    async def tokenize(self, request: Request) -> Response:
        frontend = self._frontend
        asked = await read(request, TokenizeRequest, frontend.limits)
        frontend.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise wrong("prompt", "either prompt or messages is required, and not both")
        if asked.messages is not None:
            tools = described_tools(asked.tools)
            text = rendered(frontend, asked.messages, tools, asked.chat_template_kwargs, ending_of(asked))
        else:
            text = asked.prompt or ""
        special = asked.messages is None if asked.add_special_tokens is None else asked.add_special_tokens
        tokens = await frontend.texts.encode(text, special)
        told: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": frontend.engine.facts.context}
        if asked.return_token_strs:
            told["token_strs"] = [frontend.texts.token(token)[0] for token in tokens]
        return json_answer(told)

    async def detokenize(self, request: Request) -> Response:
        asked = await read(request, DetokenizeRequest, self._frontend.limits)
        return json_answer({"prompt": await self._frontend.detokenize(asked)})

    async def tokenizer_info(self, request: Request) -> Response:
        return json_answer(self._frontend.texts.info())

    # The server --------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        return json_answer({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self._frontend.engine.ready():
            return json_answer({"status": "ready"})
        raise ApiError(503, "the engine is not ready", None, "not_ready", "server_error", retry_after_s=2)

    async def metrics(self, request: Request) -> Response:
        text = self._frontend.metrics.text(self._frontend.model, self._frontend.engine.stats())
        return Response(text, media_type=MEDIA_TYPE)

    async def version(self, request: Request) -> Response:
        return json_answer({"version": __version__})

    async def openapi(self, request: Request) -> Response:
        return json_answer(document(request.scope.get("root_path", "")))


def _base64_of(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


def _file(name: str) -> Endpoint:
    async def send(request: Request) -> Response:
        return FileResponse(PAGE / name, headers={"cache-control": "no-cache"})

    return send


def _refused_by_starlette(request: Request, error: Exception) -> Response:
    """The response for what Starlette itself refuses: an unknown path or a wrong method."""
    status = getattr(error, "status_code", 500)
    said = {404: f"no address {request.url.path[:200]!r}", 405: f"{request.method} is not for this address"}
    answer = error_answer(ApiError(status, said.get(status, "the request cannot be answered"), None, None))
    for name, value in (getattr(error, "headers", None) or {}).items():
        answer.headers[name] = value
    return answer


def _failed(request: Request, error: Exception) -> Response:
    return error_answer(error)


def application(
    frontend: Frontend, *, keys: Sequence[str] = (), origins: Sequence[str] = (), page: bool = True
) -> Starlette:
    """The server as an ASGI application.

    Args:
        keys: one of which a request needs; none: it needs none.
        origins: sites whose pages may ask; "*": all.
        page: whether there is the chat page at /.
    """
    from starlette.exceptions import HTTPException

    api = Api(frontend)
    routes: list[BaseRoute] = [
        Route(path, _with_error_responses(work), methods=[method]) for path, (method, work) in api.routes().items()
    ]
    routes.append(Route("/docs", _file("docs.html")))
    if page:
        routes.append(Route("/", _file("index.html")))
    routes.append(Mount("/page", StaticFiles(directory=PAGE)))
    guard = Middleware(
        Guard, Keys(keys), origins, frontend.metrics, {*OPEN, *api.routes()} - {"/v1/models/{model:path}"}
    )
    middleware = [guard]
    if origins:
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # what the preflight asks for: clients have headers of their own
                expose_headers=["retry-after"],
            ),
        )
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _refused_by_starlette, Exception: _failed},
    )
