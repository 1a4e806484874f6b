# SPDX-License-Identifier: Apache-2.0
"""What a check is, and how it states what it expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from anyaccel.accelerator.base import Accelerator
from anyaccel.accelerator.spec import CAPABILITY_OF, Capability

# May return what is worth knowing about a pass, for its result.
CheckFunction = Callable[[Accelerator], str | None]


class ConformanceError(AssertionError):
    """The accelerator does not do what the interface says."""


class UncheckedError(Exception):
    """This cannot be looked at here; the message is the reason that the result gives."""


class Check(NamedTuple):
    """One check.

    Attributes:
        subject: what it belongs to, such as ``"memory"``.
        title: what it checks, in a few words; with the subject it is unique.
        methods: the names of the interface that it covers.
        needs: the capabilities without which it has nothing to check.
        function: raises ConformanceError when the accelerator is wrong.
    """

    subject: str
    title: str
    methods: tuple[str, ...]
    needs: frozenset[Capability]
    function: CheckFunction

    @property
    def id(self) -> str:
        """Subject and title in one word."""
        return f"{self.subject}-{self.title}".replace(" ", "_")


CHECKS: list[Check] = []


def check(subject: str, *methods: str, needs: Sequence[Capability] = ()) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function ``check_some_words``, whose title is "some words".

    Args:
        subject: see Check.
        methods: names of the interface that it covers.
        needs: capabilities it needs beside those that METHODS_OF gives for `methods`.
    """

    def register(function: CheckFunction) -> CheckFunction:
        title = function.__name__.removeprefix("check_").replace("_", " ")
        of_methods = {CAPABILITY_OF[name] for name in methods if name in CAPABILITY_OF}
        CHECKS.append(Check(subject, title, methods, frozenset({*needs, *of_methods}), function))
        return function

    return register


def expect(holds: object, expected: str, seen: object) -> None:
    """Fail with what was expected and what was seen unless `holds`."""
    if not holds:
        raise ConformanceError(f"expected {expected}, got {_short(seen)}")


def expect_type(what: str, value: object, kind: type[Any]) -> None:
    """Fail unless `value` is exactly of this type: a bool is no int, and a tensor is no bool."""
    expect(type(value) is kind, f"{what} of type {kind.__name__}", f"{_short(value)} of type {type(value).__name__}")


def expect_none(what: str, call: Callable[..., object], *arguments: object) -> None:
    """Make the call, and fail unless it returns None."""
    value = call(*arguments)
    expect(value is None, f"{what} to return None", value)


def expect_equal(what: str, value: object, expected: object) -> None:
    """Fail unless both are equal; not for tensors."""
    expect(value == expected, f"{what} {_short(expected)}", value)


def expect_strings(what: str, values: object) -> None:
    """Fail unless this is a list of strings, none of them empty."""
    expect_type(what, values, list)
    assert isinstance(values, list)
    expect(all(isinstance(item, str) and item for item in values), f"{what} a list of strings", values)


def expect_error(
    what: str, call: Callable[[], object], error_type: type[BaseException], *mentioned: str
) -> BaseException:
    """Fail unless the call raises this error, with these words in its message; returns the error."""
    try:
        value = call()
    except error_type as error:
        missing = [word for word in mentioned if word not in str(error)]
        expect(not missing, f"{what} to raise {error_type.__name__} with {missing} in its message", str(error))
        return error
    except (Exception, SystemExit) as error:
        seen = f"{type(error).__name__}: {_short(str(error))}"
        raise ConformanceError(f"expected {what} to raise {error_type.__name__}, got {seen}") from error
    raise ConformanceError(f"expected {what} to raise {error_type.__name__}, got {_short(value)} returned")


def _short(value: object) -> str:
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= 300 else f"{text[:300]}..."
