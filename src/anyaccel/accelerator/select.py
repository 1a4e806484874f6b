# SPDX-License-Identifier: Apache-2.0
"""Which accelerator this process uses: one loop over the candidates, lazy, with a reason for each answer."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from anyaccel import env
from anyaccel._registry import Registry, RegistryEntry
from anyaccel.accelerator import autoload, deadline
from anyaccel.accelerator.spec import API_VERSION, BackendSpec, Unavailable
from anyaccel.errors import AcceleratorUnavailableError, UsageError
from anyaccel.terminal import did_you_mean
from anyaccel.vendors import ENTRY_POINTS, FAMILIES, FIRST_AVAILABLE, VENDORS

if TYPE_CHECKING:
    from anyaccel.accelerator.base import Accelerator

logger = logging.getLogger(__name__)

REGISTRY: Registry[Callable[[], Accelerator]] = Registry(
    ENTRY_POINTS,
    {
        name: f"anyaccel.accelerator.backends.{target}"
        for vendor in VENDORS.values()
        for name, (target, _) in vendor.backends.items()
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


_TOO_EARLY = "get_accelerator() was called while the accelerator is being detected"

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
        AcceleratorUnavailableError: DS_ACCELERATOR names one that cannot be used, or torch cannot be imported; the
            message says what it needs.
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
    name = get_accelerator()._name
    return name in REGISTRY or name in FAMILIES


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
    """Every candidate in detection order, probed now unless `detection` has probed it; chooses nothing.

    Raises:
        AcceleratorUnavailableError: torch, which all of them need, cannot be imported.
    """
    autoload.import_torch()
    known = {item.name: item for item in detection.candidates} if detection else {}
    rows = []
    for entry in REGISTRY:
        row = known.get(entry.name)
        if row is None or row.available is None:
            row = _probe(_load(entry))
        rows.append(replace(row, chosen=detection is not None and row.name == detection.chosen))
    return tuple(sorted(rows, key=lambda row: row.order))


def silence_detection() -> None:
    """No warning that the accelerator is the CPU: for commands, which say themselves which one they use."""
    logger.setLevel(logging.ERROR)


def describe_choice() -> str:
    """One line: the name of the accelerator in use, and why it is that one."""
    detection = detection_report()
    passed_over = _passed_over(detection.candidates, "any other")
    return f"{detection.chosen}, {detection.how}{f' ({passed_over})' if passed_over else ''}"


def _reasons(candidates: Iterable[Candidate]) -> str:
    return "; ".join(f"{item.name}: {item.reason}" for item in candidates)


def _choose() -> Accelerator:
    global _accelerator, _detection, _detecting
    if deadline.is_probing():  # in another thread than the one that holds the lock
        raise RuntimeError(_TOO_EARLY)
    with _lock:
        if _accelerator is not None:
            return _accelerator
        if _detecting:
            raise RuntimeError(_TOO_EARLY)
        _detecting = True
        try:
            autoload.import_torch()
            name = env.DS_ACCELERATOR.get()
            _accelerator, _detection = _forced(name) if name else _detected()
        finally:
            _detecting = False
        return _accelerator


class _Loaded(NamedTuple):
    """A candidate whose module is imported; `factory` is None when that failed, `spec` when it has none."""

    row: Candidate
    factory: Any = None
    spec: BackendSpec | None = None


def _forced(name: str) -> tuple[Accelerator, Detection]:
    if name not in REGISTRY and name not in FAMILIES:
        known = sorted([*REGISTRY.names(), *FAMILIES])
        near = did_you_mean(name, known)
        raise UsageError(f"DS_ACCELERATOR={name!r} is not known{near}; known accelerators: {', '.join(known)}")
    rows: list[Candidate] = []
    install: list[str] = []
    for member in FAMILIES.get(name, (name,)):
        loaded = _load(REGISTRY[member])
        row, accelerator = _build(loaded, _probe(loaded))
        rows.append(row)
        if accelerator is not None:
            return accelerator, Detection(member, f"DS_ACCELERATOR={name} is set", tuple(rows))
        install += [loaded.spec.install] if loaded.spec and loaded.spec.install else []
    reasons = "; ".join([*(row.reason for row in rows), " or ".join(install)])
    raise AcceleratorUnavailableError(f"DS_ACCELERATOR={name}: {reasons.removesuffix('; ')}")


def _detected() -> tuple[Accelerator, Detection]:
    candidates = sorted(map(_load, REGISTRY), key=lambda loaded: loaded.row.order)
    by_name = {loaded.row.name: loaded for loaded in candidates}
    probe = functools.cache(lambda name: _probe(by_name[name]))
    winner: Accelerator | None = None
    chosen = ""
    rows: list[Candidate] = []
    for loaded in candidates:
        if winner is not None:
            rows.append(replace(loaded.row, reason=loaded.row.reason or f"not probed: {chosen} comes first"))
            continue
        row = probe(loaded.row.name)
        yields_to = loaded.spec.yields_to if row.available and loaded.spec else ()
        preferred = [name for name in yields_to if name in by_name and probe(name).available]
        if preferred:
            rows.append(replace(row, reason=f"passed over: {preferred[0]} has a device and is preferred to it"))
            continue
        row, winner = _build(loaded, row)
        chosen = row.name
        rows.append(row)
    if winner is None:
        raise AcceleratorUnavailableError(f"no accelerator can be used: {_reasons(rows)}")
    _announce(chosen, rows, fallback=chosen == candidates[-1].row.name)
    return winner, Detection(chosen, FIRST_AVAILABLE, tuple(rows))


def _announce(chosen: str, rows: list[Candidate], fallback: bool) -> None:
    """Say what was passed over: a warning where a device or a package is there and not what belongs to it."""
    passed_over = _passed_over(rows)
    if not passed_over:
        return
    devices = _devices_here() if fallback else ""
    found = f"{devices} is in this machine; " if devices else ""
    first = os.environ.get("LOCAL_RANK", "0") == "0"  # one process of a job is enough to warn
    level = logging.WARNING if first and (devices or any(row.installed for row in rows)) else logging.INFO
    text = "Setting accelerator to %s. Passed over: %s. `anyaccel report` shows more; DS_ACCELERATOR=%s settles it."
    logger.log(level, text, chosen.upper(), found + passed_over, chosen)


def _devices_here() -> str:
    """Devices that could compute, whatever is installed for them; the graphics unit of a processor is no such one."""
    from anyaccel.topology import details  # few processes need it

    found = [device for device in details.read_devices() if not (device.is_console or device.is_integrated)]
    return ", ".join(dict.fromkeys(device.label for device in found))


def _passed_over(rows: Iterable[Candidate], absent: str = "") -> str:
    """What came before the choice and why not: in full for what is installed, else by name, or as `absent` says."""
    before = [row for row in rows if row.reason and row.available is not None]
    names = ", ".join(row.name for row in before if row.available is False and not row.installed)
    absent = names and (absent or names)
    present = _reasons(row for row in before if row.available or row.installed)
    return "; ".join(filter(None, [present, f"nothing is installed for {absent}" if absent else ""]))


def _load(entry: RegistryEntry[Any]) -> _Loaded:
    """Import what is registered; its own failure is a row with the reason."""
    importlib.import_module("anyaccel.accelerator.torch_device")  # with torch: not to be counted as a probe
    started = time.perf_counter()
    row = Candidate(entry.name, entry.origin)
    try:
        if entry.target.startswith("anyaccel."):
            factory = entry.load()
        else:
            factory = deadline.run(entry.load, _seconds(BackendSpec.probe_deadline_s), entry.target)
    except (Exception, SystemExit) as error:  # an extension may raise anything at import
        logger.debug("import of %s failed", entry.target, exc_info=True)
        return _Loaded(_failed(row, f"import of {entry.target} raised {_text(error)}", started))
    spec = getattr(factory, "spec", None)
    if not isinstance(spec, BackendSpec):
        return _Loaded(replace(row, probe_s=time.perf_counter() - started), factory)
    row = replace(row, order=spec.order, why=spec.why)
    if spec.api_version > API_VERSION:
        versions = f"version {spec.api_version} of the interface, this anyaccel has {API_VERSION}"
        return _Loaded(_failed(row, f"{entry.origin} needs {versions}; upgrade anyaccel", started), None, spec)
    return _Loaded(replace(row, probe_s=time.perf_counter() - started), factory, spec)


def _seconds(declared: float) -> float:
    return env.ANYACCEL_PROBE_TIMEOUT.get() or declared


def _probe(loaded: _Loaded) -> Candidate:
    """Ask a candidate whether its device is there."""
    from anyaccel.accelerator.base import Accelerator

    row, factory, spec = loaded
    if factory is None:
        return row
    started = time.perf_counter() - row.probe_s

    def ask() -> str | Unavailable | None:
        kind = factory if isinstance(factory, type) else type(factory())
        return kind.probe() if issubclass(kind, Accelerator) else f"{row.origin} registers {kind!r}, no Accelerator"

    try:
        missing = _bounded(ask, spec)
    except (Exception, SystemExit) as error:  # a vendor's module may raise anything
        logger.debug("probe of %s failed", row.name, exc_info=True)
        return _failed(row, f"its probe raised {_text(error)}", started)
    if isinstance(missing, str):
        return _failed(row, missing, started)
    if missing is not None:
        return _failed(row, missing.reason, started, missing.installed)
    return replace(row, available=True, reason="", probe_s=time.perf_counter() - started)


def _build(loaded: _Loaded, row: Candidate) -> tuple[Candidate, Accelerator | None]:
    """Make the accelerator of a candidate that was probed."""
    if not row.available:
        return row, None
    started = time.perf_counter() - row.probe_s
    try:
        accelerator: Accelerator = _bounded(loaded.factory, loaded.spec)
    except (Exception, SystemExit) as error:  # as above
        logger.debug("construction of %s failed", row.name, exc_info=True)
        return _failed(row, f"its constructor raised {_text(error)}", started), None
    return replace(row, chosen=True, probe_s=time.perf_counter() - started), accelerator


def _bounded(work: Callable[[], Any], spec: BackendSpec | None) -> Any:
    """The result of a candidate's own code, within its deadline."""
    declared = spec.probe_deadline_s if spec else BackendSpec.probe_deadline_s
    return deadline.run(work, _seconds(declared), spec.package if spec else "")


def _failed(row: Candidate, reason: str, started: float, installed: bool = True) -> Candidate:
    seconds = time.perf_counter() - started
    return replace(row, available=False, reason=reason, installed=installed, probe_s=seconds)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
