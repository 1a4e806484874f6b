# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document, made from the pydantic models that validate requests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from anyaccel._version import __version__
from anyaccel.serve.protocol import chat as protocol_chat
from anyaccel.serve.protocol import common as protocol
from anyaccel.serve.protocol import completions as protocol_completions
from anyaccel.serve.protocol import responses as protocol_responses

_REFERENCE = "#/components/schemas/{model}"
_JSON = "application/json"

Shape = type[BaseModel]
# Path -> summary, and the models of the request, of the response, and of a stream's events.
_POSTS: dict[str, tuple[str, Shape, Shape, Shape | None]] = {
    "/v1/chat/completions": (
        "The next message of a conversation",
        protocol_chat.ChatRequest,
        protocol_chat.ChatCompletion,
        protocol_chat.ChatChunk,
    ),
    "/v1/completions": (
        "Texts or tokens that go on",
        protocol_completions.CompletionRequest,
        protocol_completions.Completion,
        protocol_completions.Completion,
    ),
    "/v1/responses": (
        "The next message of a conversation, as items",
        protocol_responses.ResponsesRequest,
        protocol_responses.ResponsesAnswer,
        protocol_responses.ResponsesAnswer,
    ),
    "/v1/embeddings": ("Vectors of texts", protocol.EmbeddingRequest, protocol.Embeddings, None),
    "/tokenize": ("Tokens of a text or a conversation", protocol_chat.TokenizeRequest, protocol.Tokenized, None),
    "/detokenize": ("The text of tokens", protocol.DetokenizeRequest, protocol.Detokenized, None),
}
_STATUS = {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
_GETS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/models": ("The models that are served", {"$ref": _REFERENCE.format(model="Models")}),
    "/tokenizer_info": ("Special tokens and the chat template", {"type": "object"}),
    "/health": ("Whether the server lives", _STATUS),
    "/ready": ("Whether a request would be computed now", _STATUS),
    "/version": (
        "The server's version",
        {"type": "object", "properties": {"version": {"type": "string"}}, "required": ["version"]},
    ),
}
_FAILURES = {
    "400": "A field is wrong; the error names it",
    "401": "No API key, or a wrong one",
    "403": "A page of another site asks",
    "404": "There is no such model",
    "408": "The body did not come in time",
    "413": "The body is too large",
    "415": "The body is not said to be JSON, or is compressed",
    "429": "Too many requests wait; Retry-After says when to come again",
    "500": "The server has failed",
    "503": "The engine is not there; Retry-After says when to come again",
    "504": "The answer was not complete in time",
}


def _failures(statuses: Sequence[str]) -> dict[str, Any]:
    content = {_JSON: {"schema": {"$ref": _REFERENCE.format(model="ErrorAnswer")}}}
    return {status: {"description": _FAILURES[status], "content": content} for status in statuses}


def _success(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "The answer", "content": {_JSON: {"schema": schema}}}


def _reference_to(shape: Shape) -> dict[str, Any]:
    return {"$ref": _REFERENCE.format(model=shape.__name__)}


@functools.lru_cache(maxsize=4)
def document(root: str = "") -> dict[str, Any]:
    """The document, for a server below the path `root`."""
    shapes: list[Shape] = [protocol.Models, protocol.Model, protocol.ErrorAnswer]
    paths: dict[str, Any] = {}
    for path, (summary, schema) in _GETS.items():
        failures = {"/ready": ("503",), "/v1/models": ("401", "403"), "/tokenizer_info": ("401", "403")}.get(path, ())
        paths[path] = {"get": {"summary": summary, "responses": {"200": _success(schema), **_failures(failures)}}}
    paths["/v1/models/{model}"] = {
        "get": {
            "summary": "One model",
            "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
            "responses": {"200": _success(_reference_to(protocol.Model)), **_failures(("401", "403", "404"))},
        }
    }
    for path, (summary, takes, answers, events) in _POSTS.items():
        shapes += [each for each in (takes, answers, events) if each is not None and each not in shapes]
        answer = _success(_reference_to(answers))
        if events is not None:
            answer["content"]["text/event-stream"] = {"schema": _EVENT}
            answer["description"] = f"Complete, or with stream: true as events, each of whose data is {events.__name__}"
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {_JSON: {"schema": _reference_to(takes)}}},
                "responses": {"200": answer, **_failures(list(_FAILURES))},
            }
        }
    paths["/metrics"] = {
        "get": {
            "summary": "Counters for Prometheus",
            "responses": {
                "200": {"description": "Text format 0.0.4", "content": {"text/plain": {"schema": {"type": "string"}}}}
            },
        }
    }
    _, made = models_json_schema([(shape, "validation") for shape in shapes], ref_template=_REFERENCE)
    keys = {"type": "http", "scheme": "bearer", "description": "Only where the server was started with keys."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "anyaccel", "version": __version__, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {"schemas": made["$defs"], "securitySchemes": {"key": keys}},
        "security": [{}, {"key": []}],
    }
