# SPDX-License-Identifier: Apache-2.0
"""Gathers the facts of a report: values that json.dumps takes, sizes in bytes, times in seconds.

A report is for machines on which something is broken: a part that fails has its reason under "error", and the others
are there all the same.
"""

from __future__ import annotations

import importlib.util
import logging
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from anyaccel import env
from anyaccel._version import __version__
from anyaccel.errors import AnyAccelError, CapabilityError
from anyaccel.topology import format_cpu_list, read_machine
from anyaccel.vendors import VENDORS

logger = logging.getLogger(__name__)

# Shown even when they are missing.
_PACKAGES = ("torch", "numpy", "transformers", "safetensors", "gguf")
# Shown when they are there: they change which accelerator or backend is chosen.
_VENDOR_PACKAGES = sorted(
    {"deepspeed", "triton", *(name for vendor in VENDORS.values() for name in vendor.distributions)}
)


def collect(with_torch: bool = True) -> dict[str, Any]:
    """The whole report.

    Args:
        with_torch: False leaves out the accelerator, and imports neither torch nor any vendor package.
    """
    return {
        "versions": _versions(),
        "accelerator": _part(_accelerator_apart, name=None, candidates=[]) if with_torch else None,
        "cpu": _part(_cpu, isa=None, features={}),
        "topology": _part(_topology, summary=None, nodes=[]),
    }


def _part(ask: Callable[[], dict[str, Any]], **otherwise: Any) -> dict[str, Any]:
    """What `ask` returns; where it fails, `otherwise` and the reason."""
    try:
        return ask()
    except (Exception, SystemExit) as error:  # whatever is broken may raise anything
        logger.debug("a part of the report failed", exc_info=True)
        return {**otherwise, "error": _reason(error)}


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, AnyAccelError) else f"{type(error).__name__}: {text}"


def _cpu() -> dict[str, Any]:
    from anyaccel import _llm, _native

    _llm.isa()
    return {"isa": _native.isa(), "features": _native.cpu_features()}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "anyaccel": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for package in (*_PACKAGES, *_VENDOR_PACKAGES):
        try:
            found[package] = _version(package)
        except metadata.PackageNotFoundError:
            if package in _PACKAGES:
                found[package] = None
        except Exception as error:  # noqa: BLE001  a damaged installation: its METADATA is missing or no text
            found[package] = f"unknown ({_reason(error)})"
    return found


def _version(package: str) -> str:
    """The version of what an import would find, which need not be what is installed first under that name."""
    version = metadata.version(package)
    try:
        spec = importlib.util.find_spec(package) if package in _PACKAGES else None
    except (ImportError, ValueError):  # the part of the report that needs the package says that it is broken
        return version
    if spec is None or not spec.submodule_search_locations:
        return version
    installed = metadata.distribution(package)
    place = Path(next(iter(spec.submodule_search_locations))).resolve()
    editable = '"editable"' in (installed.read_text("direct_url.json") or "")
    if editable or place == Path(str(installed.locate_file(package))).resolve():
        return version
    beside = next(iter(metadata.distributions(name=package, path=[str(place.parent)])), None)
    return beside.version if beside else f"unknown ({place} is imported, not the installed {version})"


def _accelerator_apart() -> dict[str, Any]:
    from anyaccel.accelerator.isolated import run_isolated

    what = "importing torch, or asking a vendor's package for its device,"
    # _part runs in the other process: its exception might not be one that can be sent back.
    part: dict[str, Any] = run_isolated(lambda: _part(_accelerator, name=None, candidates=[]), what)
    return part


def _accelerator() -> dict[str, Any]:
    from anyaccel.accelerator import select

    forced = env.DS_ACCELERATOR.get() or None
    try:
        detection = select.detection_report(probe_all=True)
    except AnyAccelError as error:
        try:
            rows = select.probe_candidates()
        except AnyAccelError:  # torch cannot be imported, as `error` says already
            rows = ()
        return {
            "name": None,
            "forced": forced,
            "error": str(error),
            "candidates": [_candidate(row) for row in rows],
        }
    accelerator = select.get_accelerator()
    facts, unknown = _ask(
        {
            "device": accelerator.current_device_name,
            "device_count": accelerator.device_count,
            "total_memory_bytes": accelerator.total_memory,
            "available_memory_bytes": accelerator.available_memory,
            "dtypes": lambda: [str(dtype).removeprefix("torch.") for dtype in accelerator.supported_dtypes()],
            "communication_backend": accelerator.communication_backend_name,
            "runtime_versions": accelerator.runtime_versions,
        }
    )
    return {
        "name": detection.chosen,
        "forced": forced,
        "why": detection.how,
        **facts,
        "unknown": unknown,
        "candidates": [_candidate(row) for row in detection.candidates],
    }


def _ask(questions: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The answer to each question, by name, and the reason of each that is None because asking failed."""
    answers: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, ask in questions.items():
        try:
            answers[name] = ask()
        except CapabilityError as error:
            answers[name], reasons[name] = None, str(error)
        except (Exception, SystemExit) as error:  # a vendor's driver may raise anything
            logger.debug("asking for %s failed", name, exc_info=True)
            answers[name], reasons[name] = None, _reason(error)
    return answers, reasons


def _candidate(row: Any) -> dict[str, Any]:
    fields = ("name", "origin", "order", "why", "available", "reason", "probe_s", "chosen")
    return {field: getattr(row, field) for field in fields}


def _topology() -> dict[str, Any]:
    machine = read_machine()
    with_cores = machine.nodes_with_cores()
    return {
        "summary": machine.summary(),
        "nodes": [
            {
                "id": node.id,
                "cpus": format_cpu_list(node.cpus),
                "allowed_cores": format_cpu_list(cpu.id for cpu in with_cores.get(node.id, ())),
                "memory_bytes": node.memory_bytes,
            }
            for node in machine.nodes
        ],
    }
