# SPDX-License-Identifier: Apache-2.0
"""The ASGI application: Starlette routes requests to the endpoints of all APIs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from anyaccel.serve.api import (
    batches,
    chat,
    completions,
    embeddings,
    messages,
    ollama,
    pooling,
    rerank,
    responses,
    status,
    tokenization,
)
from anyaccel.serve.api.access import AccessMiddleware, ApiKeys
from anyaccel.serve.api.endpoint import Endpoint, Handler, document
from anyaccel.serve.api.models import Models
from anyaccel.serve.api.sending import OPENAI, ClientGoneError, error_answer, json_answer
from anyaccel.serve.api.traces import Traces
from anyaccel.serve.protocol.errors import ApiError
from anyaccel.serve.requests.frontend import Frontend

APIS = (status, chat, completions, responses, messages, ollama, embeddings, rerank, pooling, tokenization, batches)
PAGE = Path(__file__).parents[1] / "page"


def application(
    served: Models | Frontend,
    *,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    hosts: Sequence[str] = (),
    page: bool = True,
    traces: Traces | None = None,
) -> Starlette:
    """The server as an ASGI application.

    Args:
        served: the models; one that is loaded and stays may stand for itself.
        keys: one of which a request needs; none: it needs none.
        origins: sites whose pages may send requests; "*": all.
        hosts: names of this server, whose pages may send requests without a key.
        page: whether there is the chat page at /.
        traces: where requests are recorded.
    """
    models = Models.of(served) if isinstance(served, Frontend) else served
    endpoints = [endpoint for api in APIS for endpoint in api.endpoints(models)]

    @functools.cache
    def openapi_document(root: str) -> dict[str, Any]:
        return document(endpoints, root)

    async def openapi(request: Request) -> Response:
        return json_answer(openapi_document(request.scope.get("root_path", "")))

    addresses = [
        *endpoints,
        Endpoint("/openapi.json", "This document", openapi, public=True),
        Endpoint("/docs", "This document for people", _file("docs.html"), public=True),
        *([Endpoint("/", "The chat page", _file("index.html"), public=True)] if page else []),
    ]
    routes: list[BaseRoute] = [Route(each.path, _with_errors(each), methods=[each.method]) for each in addresses]
    models.inner = _without_access(Router(routes))
    routes.append(Mount("/page", StaticFiles(directory=PAGE)))
    middleware = [Middleware(AccessMiddleware, ApiKeys(keys), origins, hosts, models, addresses, traces)]
    if origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # what the preflight asks for: clients have headers of their own
            expose_headers=["retry-after", "x-request-id", "request-id"],
        )
        middleware.insert(0, cors)
    handlers = {HTTPException: _refused_by_starlette, Exception: _failed}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


def _without_access(router: Router) -> ASGIApp:
    """The endpoints for the server's own requests, whose client is known."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as scope["anyaccel.held"]:
            await router(scope, receive, send)

    return answer


def _with_errors(endpoint: Endpoint) -> Handler:
    """The endpoint's handler, with its errors turned into responses."""

    async def answer(request: Request) -> Any:
        try:
            return await endpoint.handler(request)
        except ClientGoneError:
            return Response(status_code=499)  # nginx's status for this; nobody reads the response
        except Exception as error:  # noqa: BLE001  no error of one request may end the server
            return error_answer(error, endpoint.dialect)

    return answer


def _file(name: str) -> Handler:
    async def send(request: Request) -> Response:
        return FileResponse(PAGE / name, headers={"cache-control": "no-cache"})

    return send


def _refused_by_starlette(request: Request, error: Exception) -> Response:
    """The response for what Starlette itself refuses: an unknown path or a wrong method."""
    status = getattr(error, "status_code", 500)
    texts = {404: f"no address {request.url.path[:200]!r}", 405: f"{request.method} is not for this address"}
    refused = ApiError(status, texts.get(status, "the request cannot be answered"), None, None)
    answer = error_answer(refused, request.scope["anyaccel.dialect"])
    for name, value in (getattr(error, "headers", None) or {}).items():
        answer.headers[name] = value
    return answer


def _failed(request: Request, error: Exception) -> Response:
    return error_answer(error, request.scope.get("anyaccel.dialect", OPENAI))
