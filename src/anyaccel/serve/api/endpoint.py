# SPDX-License-Identifier: Apache-2.0
"""An address of the server, and the OpenAPI document that is made of all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request

from anyaccel._version import __version__
from anyaccel.serve.api.sending import OPENAI, Dialect
from anyaccel.serve.protocol.common import ErrorAnswer

Handler = Callable[[Request], Awaitable[Any]]

_REFERENCE = "#/components/schemas/{model}"
_FAILURES = {
    "400": "A field is wrong; the error names it",
    "401": "No API key, or a wrong one",
    "403": "The request comes from a page of another site",
    "404": "There is no such model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not declared as JSON, or is compressed",
    "429": "Too many requests wait; Retry-After says when to try again",
    "500": "The server has failed",
    "503": "The engine cannot answer now; Retry-After says when to try again",
    "504": "The answer was not complete in time",
}


@dataclass(frozen=True)
class Endpoint:
    """An address.

    Attributes:
        path: in Starlette's form, such as /v1/models/{model:path}.
        summary: what it is, for the OpenAPI document.
        body: the shape of the request's body; None: it has none.
        streams: whether the response may be a stream of events.
        public: whether it needs no API key.
        media_type: of the response.
        dialect: how it writes errors and streams.
        verb: the method; "": POST with a body, otherwise GET.
    """

    path: str
    summary: str
    handler: Handler
    body: type[BaseModel] | None = None
    streams: bool = False
    public: bool = False
    media_type: str = "application/json"
    dialect: Dialect = OPENAI
    verb: str = ""

    @property
    def method(self) -> str:
        return self.verb or ("GET" if self.body is None else "POST")


def document(endpoints: Iterable[Endpoint], root: str = "") -> dict[str, Any]:
    """The OpenAPI document of a server below the path `root`."""
    paths: dict[str, Any] = {}
    shapes: list[type[BaseModel]] = [ErrorAnswer]
    for each in endpoints:
        described = _operation(each)
        if each.body is not None:
            shapes.append(each.body)
        path, _, parameter = each.path.partition("{")
        name = parameter.removesuffix("}").partition(":")[0]
        if name:
            path += f"{{{name}}}"
            described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path, {})[each.method.lower()] = described
    _, definitions = models_json_schema([(shape, "validation") for shape in shapes], ref_template=_REFERENCE)
    keys = {"type": "http", "scheme": "bearer", "description": "Only where the server was started with keys."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "anyaccel", "version": __version__, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {"schemas": definitions["$defs"], "securitySchemes": {"key": keys}},
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    kind = "object" if endpoint.media_type == "application/json" else "string"
    content: dict[str, Any] = {endpoint.media_type: {"schema": {"type": kind}}}
    if endpoint.streams:
        content[endpoint.dialect.media_type] = {"schema": {"type": "string"}}
    failed: dict[str, Any] = _reference(ErrorAnswer) if endpoint.dialect is OPENAI else {"type": "object"}
    error = {"application/json": {"schema": failed}}
    described: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            **{status: {"description": why, "content": error} for status, why in _FAILURES.items()},
        },
    }
    if endpoint.body is not None:
        body = {"application/json": {"schema": _reference(endpoint.body)}}
        described["requestBody"] = {"required": True, "content": body}
    return described


def _reference(shape: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=shape.__name__)}
