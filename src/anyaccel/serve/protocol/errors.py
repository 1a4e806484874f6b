# SPDX-License-Identifier: Apache-2.0
"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, with an HTTP status."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.serve.interface import DeadlineError, EngineFullError, EngineStoppedError, GrammarError, TooLongError
from anyaccel.validation import one_line, short_repr

_FIELD = re.compile(r"(?:\w+\.)*(\w+)\s*[=:]")
# Our messages instead of those of pydantic that say less, or that use Python's names.
_MESSAGES = {"missing": "is required", "none_required": "must be null"}


class ApiError(Exception):
    """A request that is answered by an error.

    Attributes:
        status: of HTTP.
        param: the field that is wrong.
        retry_after_s: seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def wrong(param: str, message: str, code: str | None = None) -> ApiError:
    """The error for a field with an invalid value."""
    return ApiError(400, f"{param}: {message}", param, code)


def invalid(error: ValidationError, given: Any) -> ApiError:
    """The error for a body that pydantic has refused; it names the field as the client wrote it."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # For a field with several allowed forms pydantic lists an error of each. The one with the longest path is of the
    # form that was meant, except that a length is only checked if the form is right.
    paths = [_path(each["loc"], given, each["type"] == "missing") for each in found]
    first = paths[0][:1]
    place, chosen = max(
        ((path, each) for path, each in zip(paths, found, strict=True) if path[:1] == first),
        key=lambda pair: (pair[1]["type"] == "too_long", len(pair[0]), not pair[1]["type"].endswith("_type")),
    )
    param = _written(place)
    text = _MESSAGES.get(chosen["type"], chosen["msg"][:1].lower() + chosen["msg"][1:]).replace(" after validation", "")
    show_value = chosen["type"] not in ("missing", "too_long", "too_short")  # pydantic's text has the length
    value = f", not {short_repr(_at(given, place))}" if show_value else ""
    return ApiError(400, one_line(f"{param or 'the body'}: {text}{value}"), param or None)


def _path(loc: Sequence[int | str], given: Any, missing: bool) -> tuple[int | str, ...]:
    """The path of an error within the body; pydantic's own paths also contain the names of forms."""
    path: list[int | str] = []
    for part in loc:
        named = isinstance(given, Mapping) and isinstance(part, str) and part in given
        counted = isinstance(given, list) and isinstance(part, int) and part < len(given)
        if named or counted:
            given = given[part]
            path.append(part)
    if missing and isinstance(loc[-1], str):
        path.append(loc[-1])
    return tuple(path)


def _at(given: Any, path: Sequence[int | str]) -> Any:
    for part in path:
        given = given[part]
    return given


def _written(path: Sequence[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return one_line(text.removeprefix("."))


def api_error(error: BaseException) -> ApiError:
    """The response to any error; one for an unexpected error reveals nothing of the server."""
    text = str(error)
    match error:
        case ApiError():
            return error
        case EngineFullError():
            return ApiError(
                429, text, None, "rate_limit_exceeded", "rate_limit_error", retry_after_s=error.retry_after_s
            )
        case EngineStoppedError():
            # The reason stays in the log, as it may name files.
            return ApiError(503, text.partition(": ")[0], None, "engine_stopped", "server_error", retry_after_s=2)
        case DeadlineError():
            return ApiError(504, text, None, "timeout", "server_error")
        case TooLongError():
            return ApiError(400, text, None, "context_length_exceeded")
        case GrammarError():
            return ApiError(400, text, error.param)
        case UsageError():
            named = _FIELD.match(text)
            return ApiError(400, text, named[1] if named else None)
        case AnyAccelError():
            return ApiError(500, text, None, None, "server_error")
        case _:
            return ApiError(500, "the server has failed; its log says more", None, None, "server_error")
