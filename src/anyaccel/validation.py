# SPDX-License-Identifier: Apache-2.0
"""The reader of values from outside: JSON of model folders, metadata of GGUF files; opens such files. Torch-free.

A value is taken through here once, with the type and the range that it must have; what comes out needs no check where
it is used. An error names the place, the value (cut where it is long) and what it has to be. docs/adr/0011 says why
this is not pydantic or msgspec.
"""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from anyaccel.errors import ModelError

MAX_INT: Final = (1 << 31) - 1  # of whole numbers: what fits the native code
_MOST_JSON = 64 << 20  # bytes
_MOST_TOLD = 300  # characters of what another package says

_repr = reprlib.Repr()
_repr.maxlevel = 2
_repr.maxstring = _repr.maxother = 120
_repr.maxlong = 60  # digits


def short_repr(value: Any) -> str:
    """A value for a message: one short line, whatever it is."""
    return " ".join(_repr.repr(value).split())


def one_line(said: str) -> str:
    """A text as a part of a line of ours: without breaks and what terminals obey, and cut where it is long."""
    words = "".join(filter(str.isprintable, " ".join(said[: 2 * _MOST_TOLD].split())))
    return words if len(words) <= _MOST_TOLD else f"{words[:_MOST_TOLD]}…"


def error_text(error: BaseException) -> str:
    """What another package's error says, for a line of ours."""
    return one_line(str(error)) or type(error).__name__


def check_integer(value: Any, what: str, minimum: int = 0, maximum: int = MAX_INT) -> int:
    """A whole number; JSON's 64.0 is one too.

    Args:
        what: the value's place and name, for the message.

    Raises:
        ModelError: it is something else, or out of range.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not minimum <= value <= maximum or int(value) != value:
        raise ModelError(f"{what}={short_repr(value)} is not a whole number of {minimum} to {maximum}")
    return int(value)


def check_number(
    value: Any, what: str, minimum: float = -math.inf, maximum: float = 1e30, above: float = -math.inf
) -> float:
    """A finite number from `minimum` to `maximum`, and greater than `above`."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not max(minimum, -1e30) <= value <= maximum or value <= above:
        bounds = [f" above {above:g}"] if above > -math.inf else [f" of at least {minimum:g}"] * (minimum > -math.inf)
        bounds += [f", at most {maximum:g}"] * (maximum < 1e30 or (good and value > maximum))
        raise ModelError(f"{what}={short_repr(value)} is not a number{''.join(bounds)}")
    return float(value)


def check_bool(value: Any, what: str) -> bool:
    """True or false; some configs say 0 and 1."""
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise ModelError(f"{what}={short_repr(value)} is neither true nor false")
    return bool(value)


def check_text(value: Any, what: str, known: Collection[str] | None = None) -> str:
    """A text; one of `known`."""
    if not isinstance(value, str):
        raise ModelError(f"{what}={short_repr(value)} is not a text")
    if known is not None and value not in known:
        raise ModelError(f"{what}={short_repr(value)} is none of {', '.join(known)}")
    return value


def check_list(value: Any, what: str, count: int | None = None) -> list[Any]:
    """A list, of `count` entries."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ModelError(f"{what}={short_repr(value)} is not a list")
    if count is not None and len(value) != count:
        raise ModelError(f"{what} has {len(value)} entries, not {count}")
    return list(value)


def check_mapping(value: Any, what: str) -> dict[str, Any]:
    """An object of JSON."""
    if not isinstance(value, Mapping):
        raise ModelError(f"{what}={short_repr(value)} is not an object")
    return dict(value)


def open_file(path: str | Path) -> BinaryIO:
    """A file to read; a pipe could be waited for without an end, and a device has none.

    Raises:
        OSError: it cannot be opened, or is no file.
    """
    # Without O_NONBLOCK a named pipe would be waited for until somebody opens it to write.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, f"it is {'a pipe' if stat.S_ISFIFO(mode) else 'a device'}, no file", str(path))
    return os.fdopen(descriptor, "rb")


def create_file(path: str | Path) -> BinaryIO:
    """A file to write, emptied where it is there; a pipe, such as that of `>(command)`, when somebody reads it.

    Raises:
        OSError: it cannot be opened, or is a pipe that nobody reads.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "it is a pipe or socket that nobody reads", str(path)) from None
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb")


def read_text(path: Path) -> str:
    """A file of reasonable size in UTF-8.

    Raises:
        ModelError: it is none, or cannot be read.
    """
    try:
        with open_file(path) as file:
            content = file.read(_MOST_JSON + 1)
        if len(content) > _MOST_JSON:
            raise ModelError(f"{path}: more than {_MOST_JSON >> 20} MiB are too many for a configuration")
        return content.decode("utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path}: not a text in UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x})"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file of reasonable size.

    Raises:
        ModelError: it is none, or cannot be read.
    """
    content = read_text(path)
    try:
        found = json.loads(content)
    except RecursionError:
        raise ModelError(f"{path}: not JSON that can be read (nested too deeply)") from None
    except ValueError as error:
        raise ModelError(f"{path}: not JSON that can be read ({error_text(error)})") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: not a JSON object")
    return found


class Fields:
    """An object of JSON, or what is like one; a value that is null is missing.

    Args:
        values: by name.
        where: what comes before a name in messages, for example "config: ".
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def _value(self, name: str) -> Any:
        """The value as it is; None when it is missing."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        return self._value(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether it is there, and null."""
        return name in self._values and self._values[name] is None

    def is_list(self, name: str) -> bool:
        """For values that are one number, or one for each layer."""
        return isinstance(self._value(name), list)

    def is_mapping(self, name: str) -> bool:
        """For values that are an object, or a text for short."""
        return isinstance(self._value(name), Mapping)

    def required(self, name: str) -> Any:
        value = self._value(name)
        if value is None:
            raise ModelError(f"{self.where}{name} is missing")
        return value

    def get_int(self, name: str, default: int | None = None, minimum: int = 0, maximum: int = MAX_INT) -> int:
        """A whole number; without a default it must be there. The others are alike."""
        if default is not None and not self.has(name):
            return default
        return check_integer(self.required(name), self.where + name, minimum, maximum)

    def number(
        self,
        name: str,
        default: float | None = None,
        minimum: float = -math.inf,
        maximum: float = 1e30,
        above: float = -math.inf,
    ) -> float:
        if default is not None and not self.has(name):
            return default
        return check_number(self.required(name), self.where + name, minimum, maximum, above)

    def get_bool(self, name: str, default: bool = False) -> bool:
        return check_bool(self._value(name), self.where + name) if self.has(name) else default

    def text(self, name: str, default: str | None = None, known: Collection[str] | None = None) -> str:
        if default is not None and not self.has(name):
            return default
        return check_text(self.required(name), self.where + name, known)

    def items(self, name: str) -> list[Any]:
        """A list, empty when it is missing."""
        return check_list(self._value(name), self.where + name) if self.has(name) else []

    def numbers(self, name: str, count: int | None = None, above: float = -math.inf) -> list[float]:
        """Numbers, `count` of them."""
        what = self.where + name
        found = check_list(self.required(name), what, count)
        good = set(map(type, found)) == {float} and not any(map(math.isnan, found))
        if good and above < min(found) and -1e30 <= min(found) <= max(found) <= 1e30:
            return found  # most lists are long and right
        return [check_number(each, f"{what}[{at}]", above=above) for at, each in enumerate(found)]

    def get_ints(self, name: str, minimum: int = 0, maximum: int = MAX_INT) -> list[int]:
        what = self.where + name
        found = check_list(self.required(name), what)
        if set(map(type, found)) == {int} and minimum <= min(found) <= max(found) <= maximum:
            return found
        return [check_integer(each, f"{what}[{at}]", minimum, maximum) for at, each in enumerate(found)]

    def mapping(self, name: str) -> Fields:
        """An object, empty when it is missing."""
        return Fields(
            check_mapping(self._value(name), self.where + name) if self.has(name) else {}, f"{self.where}{name}: "
        )

    def known(self) -> dict[str, Any]:
        """All values that are there."""
        return {name: value for name, value in self._values.items() if value is not None}
