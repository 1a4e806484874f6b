# SPDX-License-Identifier: Apache-2.0
"""Access: API keys compared in constant time, the origins of pages, security headers for browsers, and the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import get_path_with_query_string

from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.models import Models
from anyaccel.serve.api.sending import OPENAI, discard_body, error_answer
from anyaccel.serve.api.traces import Traces
from anyaccel.serve.interface import EngineStoppedError
from anyaccel.serve.protocol.errors import ApiError
from anyaccel.serve.requests.frontend import new_id

logger = logging.getLogger("anyaccel.serve.access")

_REQUEST_ID = re.compile(r"[\w.:\-]{1,128}", re.ASCII)
_PAGE = "/page/"  # the files of the chat page, which has no data of its own

_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}


class ApiKeys:
    """The API keys of the server; without any, no request needs one."""

    def __init__(self, keys: Collection[str]) -> None:
        self._digests = [self._digest(key) for key in keys]

    @staticmethod
    def _digest(key: str) -> bytes:
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holder(self, given: str) -> str | None:
        """A name for the holder of this key that does not reveal it; None if the key is not known.

        All bytes of all keys are compared, so that the time reveals nothing of them.
        """
        digest = self._digest(given)
        matches = sum([hmac.compare_digest(digest, each) for each in self._digests])
        return digest.hex()[:16] if matches else None


class AccessMiddleware:
    """Refuses unauthorised requests, and counts and logs responses.

    Args:
        origins: sites whose pages may send requests; "*": all.
        hosts: names of this server, whose pages may send requests too.
        endpoints: those of the server; requests for anything else are counted together, as "other".
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        origins: Sequence[str],
        hosts: Sequence[str],
        models: Models,
        endpoints: Sequence[Endpoint],
        traces: Traces | None = None,
    ) -> None:
        self._app = app
        self._traces = traces
        self._keys = keys
        self._origins = frozenset(origins)
        self._hosts = frozenset(hosts)
        self._requests = models.requests
        self._limits = models.limits
        self._paths = frozenset(each.path for each in endpoints)
        self._dialects = sorted({each.dialect for each in endpoints}, key=lambda each: -len(each.root))
        self._public = frozenset(each.path for each in endpoints if each.public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = _path(scope)
        dialect = next((each for each in self._dialects if path.startswith(each.root)), OPENAI)
        scope["anyaccel.dialect"] = dialect
        scope["anyaccel.id"] = identity = _request_id(scope)
        scope["anyaccel.start"], status = time.monotonic(), 0

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers[dialect.request_id] = identity
                method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
                self._requests.answered(method, path if path in self._paths else "other", status)
            await send(message)

        scope["anyaccel.parts"] = send  # lets the parts of a stream bypass the middleware, which only needs the head
        try:
            scope["anyaccel.key"] = self._client_name(scope, path)
        except ApiError as error:
            await discard_body(scope, receive, self._limits)
            answer = error_answer(error, dialect)
            answer.headers["connection"] = "close"
            await answer(scope, receive, counted_send)
            self._ended(scope, path, status)
            return
        try:
            with ExitStack() as scope["anyaccel.held"]:  # the model of the request, which stays until then
                await self._app(scope, receive, counted_send)
        except asyncio.CancelledError:  # the server stops, and draining has not ended the request
            if status:
                scope.get("anyaccel.abort", lambda: None)()
            else:
                stopped = EngineStoppedError("the server is shutting down")
                await error_answer(stopped, dialect)(scope, receive, counted_send)
        finally:
            self._ended(scope, path, status)

    def _ended(self, scope: Scope, path: str, status: int) -> None:
        """Log and record a request after its response."""
        seconds = time.monotonic() - scope["anyaccel.start"]
        _log(scope, status, seconds)
        if self._traces is not None and path in self._paths and path not in self._public:
            self._traces.record(scope, path, status, seconds)

    def _client_name(self, scope: Scope, path: str) -> str:
        """The name of the client, for fair queueing.

        Raises:
            ApiError: the key is missing or wrong, or the page of another site sends the request.
        """
        headers = Headers(scope=scope)
        client = scope.get("client")
        address = client[0] if client else ""
        if path in self._public or path.startswith(_PAGE) or scope["method"] == "OPTIONS":
            return address
        if self._keys:
            kind, _, given = headers.get("authorization", "").partition(" ")
            given = given.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
            if not given:
                raise ApiError(401, "an API key is required: Authorization: Bearer KEY", None, "invalid_api_key")
            if (holder := self._keys.holder(given)) is None:
                raise ApiError(401, "the API key is not known here", None, "invalid_api_key")
            return holder
        self._check_origin(headers.get("origin", ""), headers.get("host", ""))
        return address

    def _check_origin(self, origin: str, host: str) -> None:
        """Refuse the pages of other sites on a server without keys.

        An attacker can make a name of theirs resolve to this machine (DNS rebinding); to a browser their page is then
        of the same site. So only addresses and localhost count as the same site; other names have to be allowed.
        Those count whatever the Host header is: nginx replaces it by its own address of the server.
        """
        if not origin or origin in self._origins or "*" in self._origins:
            return
        try:
            site = urlsplit(origin)
            name = site.hostname or ""
        except ValueError:  # not a URL; no browser sends that
            name = ""
        same = name in self._hosts or (name and site.netloc == host and _is_address(name))
        if not same:
            raise ApiError(
                403,
                f"the page at {origin[:200]} may not use this server: start it with --allowed-hosts {name[:200]} if "
                "that is one of its own names, with --allowed-origins for another site, or with an API key",
                None,
                "origin_not_allowed",
            )


def _is_address(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _request_id(scope: Scope) -> str:
    """The id that the client has given its request, or a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else new_id("req_")


def _log(scope: Scope, status: int, seconds: float) -> None:
    """Log a request after its response; the line begins as uvicorn's do."""
    usage = scope.get("anyaccel.usage")
    fields: dict[str, object] = {
        "client": ":".join(map(str, scope.get("client") or ["-"])),
        "method": scope["method"],
        "path": get_path_with_query_string(scope),  # type: ignore[arg-type]  # uvicorn's own type of the same
        "status": status or 499,  # as in nginx's log, of a client that has gone before the response
        "seconds": round(seconds, 3),
        "request_id": scope["anyaccel.id"],
    }
    text = '{client} - "{method} {path} HTTP/{version}" {status}, {seconds:.3f} s'
    if usage is not None:
        fields |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        text += ", {prompt_tokens} + {completion_tokens} tokens"
    logger.info("%s", text.format(**fields, version=scope["http_version"]), extra={"fields": fields})


def _path(scope: Scope) -> str:
    """The path below --root-path."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] or "/" if root and path.startswith(root + "/") else path
