#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/vendor_api/NAME.json: what the tests need of the recorded surfaces of vendors' torch modules.

The records have each signature as lists, with evidence and notes; here a signature is one line of Python, as in
`"get_rng_state": "device='cuda'"`. All functions are kept, so that the fake lacks what the vendor lacks and nothing
else; of the classes those that accelerators use, of the submodules those with random numbers and profiler ranges.

    python tools/trim_vendor_api.py FOLDER_WITH_THE_RECORDS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "tests" / "data" / "vendor_api"
SUBMODULES = ("brtx", "cnpx", "mstx", "nvtx", "random")
# What the modules' runtime functions return is compiled, so its functions are in the notes of the records only.
# pybind11 binds them without names of arguments.
RUNTIMES = {
    "cuda": ("cudart", ("cudaHostRegister", "cudaHostUnregister")),
    "npu": ("npurt", ("npuHostRegister", "npuHostUnregister")),
    "supa": ("supart", ("supaHostRegister", "supaHostUnregister")),
}


def signature(recorded: Mapping[str, Any]) -> str:
    """The arguments as Python writes them; any are taken where the record does not know them."""
    if recorded["args"] is None:
        return "*args, **kwargs"
    defaults = recorded.get("defaults", {})
    positional_only = recorded.get("positional_only", [])
    if positional_only is True:
        positional_only = recorded["args"]
    parts = []
    for position, name in enumerate(recorded["args"]):
        parts.append(name if position < recorded["required"] else f"{name}={defaults.get(name)!r}")
        if positional_only and name == positional_only[-1]:
            parts.append("/")
    keyword_only = recorded.get("kwonly", [])
    if "vararg" in recorded:
        parts.append(f"*{recorded['vararg']}")
    elif keyword_only:
        parts.append("*")
    for name in keyword_only:
        required = name in recorded.get("kwonly_required", [])
        parts.append(name if required else f"{name}={defaults.get(name)!r}")
    if "varkw" in recorded:
        parts.append(f"**{recorded['varkw']}")
    return ", ".join(parts)


def signatures(functions: Mapping[str, Any]) -> dict[str, str]:
    return {name: signature(functions[name]) for name in sorted(functions)}


def methods_of(kind: Mapping[str, Any], bases: Mapping[str, Any]) -> dict[str, str]:
    """Methods, those of recorded base classes too; `__init__` and `__new__` are the constructor, named `()`."""
    found: dict[str, Any] = {}
    for base in kind.get("bases", []):
        found |= bases.get(base.rpartition(".")[2], {}).get("methods", {})
    found |= kind["methods"]
    constructor = next((kind["methods"][name] for name in ("__init__", "__new__") if kind["methods"].get(name)), None)
    constructor = constructor or found.get("__new__") or {"args": [], "required": 0}
    if {"__init__", "__new__"} <= kind["methods"].keys():  # both take what the call gives; the shorter one decides
        constructor = min((kind["methods"][name] for name in ("__init__", "__new__")), key=lambda item: len(str(item)))
    kept = {name: item for name, item in found.items() if not name.startswith("_") or name in ("__enter__", "__exit__")}
    return {"()": signature(constructor), **signatures(kept)}


def names(recorded: Iterable[str] | None) -> list[str]:
    """Without remarks: `total_memory (several callers)` is `total_memory`, `(others not listed)` is none."""
    return sorted(text.split()[0] for text in recorded or () if not text.startswith("("))


def trimmed(name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    source = record["source"]
    bases = record.get("base_classes") or {}
    classes = dict(record["classes"])
    for alias, target in (record.get("aliases") or {}).items():  # mtia's Stream is torch.Stream
        classes[alias] = bases[target.rpartition(".")[2]]
    submodules = {part: details["functions"] for part, details in record["submodules"].items()}
    if "mstx" in classes:  # a class with static methods, in the place of the submodule that has its name
        submodules["mstx"] = classes["mstx"]["methods"]
    result: dict[str, Any] = {
        "source": f"{source['package']} {source['version']}",
        "stability": record["stability"],
        "functions": signatures(record["functions"]),
        "classes": {
            kind: methods_of(details, bases)
            for kind, details in sorted(classes.items())
            if kind in ("Stream", "Event", "graph") or kind.endswith("Graph")
        },
        "submodules": {part: signatures(submodules[part]) for part in SUBMODULES if part in submodules},
        "values": names(record["values"]),
        "properties": names(record.get("device_properties_attributes")),
    }
    if name == "hpu":
        result["lazy_mode_only"] = names(record["conditional_names"])
        result["memory_stats"] = record["memory_stats_keys"]
    if name in RUNTIMES:
        function, (register, unregister) = RUNTIMES[name]
        result["runtimes"] = {function: {register: "ptr, size, flags, /", unregister: "ptr, /"}}
    return result


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    for path in sorted(Path(sys.argv[1]).glob("*.json")):
        name, record = path.stem, json.loads(path.read_text())
        text = json.dumps(trimmed(name, record), indent=1) + "\n"
        (TARGET / f"{name}.json").write_text(text)
        print(f"{name}.json: {len(text) >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
