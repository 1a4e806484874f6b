# SPDX-License-Identifier: Apache-2.0
"""Which accelerator this process uses: one loop over the candidates, lazy, with a reason for each answer."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from anyaccel import env
from anyaccel._registry import Entry, Registry
from anyaccel.accelerator.spec import API_VERSION, BackendSpec
from anyaccel.errors import AcceleratorUnavailableError, UsageError

if TYPE_CHECKING:
    from anyaccel.accelerator.base import Accelerator

logger = logging.getLogger(__name__)

REGISTRY: Registry[Callable[[], Accelerator]] = Registry(
    "anyaccel.accelerators",
    {
        "cuda": "anyaccel.accelerator.backends.cuda:CudaAccelerator",
        "cpu": "anyaccel.accelerator.backends.cpu:CpuAccelerator",
    },
)


@dataclass(frozen=True)
class Candidate:
    """What detection knows about one accelerator.

    Attributes:
        name: as DS_ACCELERATOR takes it.
        origin: ``"anyaccel"`` or the distribution that brought it.
        order: its place; low numbers are tried first.
        why: the reason for that place.
        available: None when it was not probed.
        reason: why it is not available, or why it was not probed; empty when it is available.
        probe_s: seconds that importing and probing it took.
        chosen: this one won.
        installed: it is not available although something for it is installed, which deserves a warning.
    """

    name: str
    origin: str
    order: int = 0
    why: str = ""
    available: bool | None = None
    reason: str = ""
    probe_s: float = 0.0
    chosen: bool = False
    installed: bool = False


class Detection(NamedTuple):
    """How the accelerator was chosen, and every candidate in detection order."""

    chosen: str
    how: str
    candidates: tuple[Candidate, ...]


_accelerator: Accelerator | None = None
_detection: Detection | None = None
_detecting = False
# Re-entrant, so that a vendor package which asks for the accelerator while it is being probed gets an error
# instead of waiting for itself.
_lock = threading.RLock()


def _unlock_in_child() -> None:
    # The thread that held the lock does not exist in the child.
    global _lock, _detecting
    _lock = threading.RLock()
    _detecting = False


os.register_at_fork(after_in_child=_unlock_in_child)


def get_accelerator() -> Accelerator:
    """The accelerator of this process, chosen on the first call: DS_ACCELERATOR, else the first available.

    Raises:
        UsageError: DS_ACCELERATOR is no known name; the message lists those there are.
        AcceleratorUnavailableError: DS_ACCELERATOR names one that cannot be used; the message says what it
            needs.
    """
    if _accelerator is not None:
        return _accelerator
    return _choose()


def set_accelerator(accelerator: Accelerator) -> None:
    """Use this accelerator from now on, without detection.

    Raises:
        TypeError: it is no `anyaccel.accelerator.Accelerator`.
    """
    global _accelerator, _detection
    from anyaccel.accelerator.base import Accelerator

    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"set_accelerator() takes an anyaccel.accelerator.Accelerator, not {accelerator!r}")
    with _lock:
        _accelerator = accelerator
        _detection = Detection(accelerator._name, "set by set_accelerator()", ())


def is_current_accelerator_supported() -> bool:
    """Whether the accelerator in use is one that anyaccel, or an installed extension, registers by name."""
    return get_accelerator()._name in REGISTRY


def detection_report(probe_all: bool = False) -> Detection:
    """How the accelerator was chosen; chooses it if that has not happened yet.

    Args:
        probe_all: also probe the candidates that the choice did not need, for a report. Changes nothing.

    Raises:
        As get_accelerator.
    """
    get_accelerator()
    with _lock:
        assert _detection is not None
        return _detection._replace(candidates=probe_candidates(_detection)) if probe_all else _detection


def probe_candidates(detection: Detection | None = None) -> tuple[Candidate, ...]:
    """Every candidate in detection order, probed now unless `detection` has probed it; chooses nothing."""
    known = {item.name: item for item in detection.candidates} if detection else {}
    rows = []
    for entry in REGISTRY:
        row = known.get(entry.name)
        if row is None or row.available is None:
            row = _probe(_load(entry))
        rows.append(replace(row, chosen=detection is not None and row.name == detection.chosen))
    return tuple(sorted(rows, key=lambda row: row.order))


def describe_choice() -> str:
    """One line: the name of the accelerator in use, and why it is that one."""
    detection = detection_report()
    passed_over = [item for item in detection.candidates if item.available is False]
    because = f" ({_reasons(passed_over)})" if passed_over else ""
    return f"{detection.chosen}, {detection.how}{because}"


def _reasons(candidates: Iterable[Candidate]) -> str:
    return "; ".join(f"{item.name}: {item.reason}" for item in candidates)


def _choose() -> Accelerator:
    global _accelerator, _detection, _detecting
    with _lock:
        if _accelerator is not None:
            return _accelerator
        if _detecting:
            raise RuntimeError("get_accelerator() was called while the accelerator is being detected")
        _detecting = True
        try:
            name = env.DS_ACCELERATOR.get()
            _accelerator, _detection = _forced(name) if name else _detected()
        finally:
            _detecting = False
        return _accelerator


class _Loaded(NamedTuple):
    """A candidate whose module is imported; `factory` is None when that failed."""

    row: Candidate
    factory: Any = None


def _forced(name: str) -> tuple[Accelerator, Detection]:
    if name not in REGISTRY:
        known = ", ".join(REGISTRY.names())
        raise UsageError(f"DS_ACCELERATOR={name!r} is not known; known accelerators: {known}")
    loaded = _load(REGISTRY[name])
    row, accelerator = _build(loaded)
    if accelerator is None:
        spec = getattr(loaded.factory, "spec", None)
        install = f"; {spec.install}" if isinstance(spec, BackendSpec) and spec.install else ""
        raise AcceleratorUnavailableError(f"DS_ACCELERATOR={name}: {row.reason}{install}")
    return accelerator, Detection(name, f"DS_ACCELERATOR={name} is set", (row,))


def _detected() -> tuple[Accelerator, Detection]:
    winner: Accelerator | None = None
    rows: list[Candidate] = []
    for loaded in sorted(map(_load, REGISTRY), key=lambda loaded: loaded.row.order):
        if winner is not None:
            skipped = f"not probed: {winner._name} comes first"
            rows.append(replace(loaded.row, reason=loaded.row.reason or skipped))
            continue
        row, winner = _build(loaded)
        rows.append(row)
    failed = [row for row in rows if row.available is False]
    chosen = next((row.name for row in rows if row.chosen), "")
    if winner is None:
        raise AcceleratorUnavailableError(f"no accelerator can be used: {_reasons(failed)}")
    if failed:
        # Plain CPU torch was installed for the CPU; a warning at each of its starts would be noise.
        level = logging.WARNING if any(row.installed for row in failed) else logging.INFO
        logger.log(level, "Setting accelerator to %s. Passed over: %s", chosen.upper(), _reasons(failed))
    return winner, Detection(chosen, "the first that is available in detection order", tuple(rows))


def _load(entry: Entry[Any]) -> _Loaded:
    """Import what is registered; its own failure is a row with the reason."""
    importlib.import_module("anyaccel.accelerator.torch_device")  # with torch: not to be counted as a probe
    started = time.perf_counter()
    row = Candidate(entry.name, entry.origin)
    try:
        factory = entry.load()
    except (Exception, SystemExit) as error:  # an extension may raise anything at import
        logger.debug("import of %s failed", entry.target, exc_info=True)
        return _Loaded(_failed(row, f"import of {entry.target} raised {_text(error)}", started))
    spec = getattr(factory, "spec", None)
    if isinstance(spec, BackendSpec):
        row = replace(row, order=spec.order, why=spec.why)
        if spec.api_version > API_VERSION:
            versions = f"version {spec.api_version} of the interface, this anyaccel has {API_VERSION}"
            return _Loaded(_failed(row, f"{entry.origin} needs {versions}; upgrade anyaccel", started))
    return _Loaded(replace(row, probe_s=time.perf_counter() - started), factory)


def _probe(loaded: _Loaded) -> Candidate:
    """Ask a candidate whether its device is there."""
    from anyaccel.accelerator.base import Accelerator

    factory, row = loaded.factory, loaded.row
    if factory is None:
        return row
    started = time.perf_counter() - row.probe_s
    try:
        kind = factory if isinstance(factory, type) else type(factory())
        if not issubclass(kind, Accelerator):
            return _failed(row, f"{row.origin} registers {kind!r}, which is no Accelerator", started)
        missing = kind.probe()
    except (Exception, SystemExit) as error:  # a vendor's module may raise anything
        logger.debug("probe of %s failed", row.name, exc_info=True)
        return _failed(row, f"its probe raised {_text(error)}", started)
    if missing is not None:
        return _failed(row, missing.reason, started, missing.installed)
    return replace(row, available=True, reason="", probe_s=time.perf_counter() - started)


def _build(loaded: _Loaded) -> tuple[Candidate, Accelerator | None]:
    """Probe a candidate and make its accelerator."""
    row = _probe(loaded)
    if not row.available:
        return row, None
    started = time.perf_counter() - row.probe_s
    try:
        accelerator: Accelerator = loaded.factory()
    except (Exception, SystemExit) as error:  # as above
        logger.debug("construction of %s failed", row.name, exc_info=True)
        return _failed(row, f"its constructor raised {_text(error)}", started), None
    return replace(row, chosen=True, probe_s=time.perf_counter() - started), accelerator


def _failed(row: Candidate, reason: str, started: float, installed: bool = True) -> Candidate:
    seconds = time.perf_counter() - started
    return replace(row, available=False, reason=reason, installed=installed, probe_s=seconds)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
