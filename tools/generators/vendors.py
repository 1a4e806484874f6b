# SPDX-License-Identifier: Apache-2.0
"""Writes the table of vendors in src/anyaccel/vendors.py, from what the files in accelerator/backends/ declare."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from anyaccel.accelerator import backends
from anyaccel.accelerator.spec import BackendSpec
from generators import ROOT, fill

TABLE = ROOT / "src" / "anyaccel" / "vendors.py"


class Backend(NamedTuple):
    """The class that one file in accelerator/backends/ defines, as "file:class", and what it declares."""

    target: str
    spec: BackendSpec

    @property
    def choice(self) -> str:
        return self.spec.without_torch.choice or self.spec.name


def backends_in_tree() -> list[Backend]:
    """Those of all files that the package consists of, in detection order."""
    found = []
    for file in (file for folder in backends.__path__ for file in Path(folder).glob("*.py")):
        if file.stem != "__init__":
            module = importlib.import_module(f"{backends.__name__}.{file.stem}")
            own = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
            (kind,) = (each for each in own if isinstance(getattr(each, "spec", None), BackendSpec))
            found.append(Backend(f"{file.stem}:{kind.__name__}", kind.spec))
    return sorted(found, key=lambda each: each.spec.order)


def _text(value: Any) -> str:
    """Python for a text, or for a tuple of them, with the quotes that ruff takes."""
    if isinstance(value, str):
        return f'"{value}"'
    return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"


def rows(found: list[Backend]) -> Iterator[str]:
    """The lines of the generated part."""
    vendors: dict[str, list[Backend]] = {}
    for each in sorted(found, key=lambda each: (each.spec.without_torch.place, each.spec.name)):
        vendors.setdefault(each.spec.name, []).append(each)
    yield "VENDORS = {"
    for name, members in vendors.items():
        specs = [each.spec for each in members]
        own = [spec.without_torch for spec in specs]
        fields = {
            "visible": joined(spec.visible_devices for spec in specs),
            "environment": joined([*(spec.export_prefixes for spec in specs), *(each.environment for each in own)]),
            "distributions": joined(each.distributions for each in own),
            "of_a_host": joined(each.of_a_host for each in own),
            "device_files": next((each.device_files for each in own if each.device_files), ()),
        }
        yield f'    "{name}": Vendor('
        yield "        backends={"
        yield from (f'            "{each.choice}": {_text((each.target, each.spec.package))},' for each in members)
        yield "        },"
        yield from (f"        {field}={_text(value)}," for field, value in fields.items() if value)
        yield "    ),"
    yield "}"


def joined(several: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The values of all of them, each once."""
    return tuple(dict.fromkeys(value for values in several for value in values))


def files() -> dict[Path, str]:
    return {TABLE: fill(TABLE.read_text(), "vendors", rows(backends_in_tree()))}
