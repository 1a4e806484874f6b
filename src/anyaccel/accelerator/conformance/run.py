# SPDX-License-Identifier: Apache-2.0
"""Runs the checks on an accelerator, and leaves the process as it was."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Iterator
from typing import NamedTuple

import torch

from anyaccel.accelerator.base import Accelerator
from anyaccel.accelerator.conformance.absence import does_nothing, is_declared, lacking, verify_absent
from anyaccel.accelerator.conformance.checking import Check, ConformanceError, UncheckedError
from anyaccel.accelerator.conformance.checks import CHECKS
from anyaccel.accelerator.spec import Capability
from anyaccel.errors import CapabilityError

logger = logging.getLogger(__name__)


class Result(NamedTuple):
    """What a check found.

    Attributes:
        subject: as the check's.
        check: its title.
        outcome: ``"pass"``, ``"absent"`` or ``"fail"``.
        detail: why it is absent, or what is wrong; for a pass, what is worth knowing, if anything.
        seconds: that it took.
        traceback: of a failure; empty otherwise.
    """

    subject: str
    check: str
    outcome: str
    detail: str
    seconds: float
    traceback: str = ""


def run_checks(accelerator: Accelerator, only: str | None = None) -> list[Result]:
    """Run the checks, or those that `only` selects.

    Args:
        accelerator: any live one; it need not be the one that get_accelerator() returns.
        only: as for select_checks.
    """
    return [run_check(check, accelerator) for check in select_checks(only)]


def select_checks(only: str | None = None) -> list[Check]:
    """The checks that have this text in "subject title" or in the name of a method they cover, in any case."""
    text = (only or "").lower()
    return [
        check
        for check in CHECKS
        if any(text in name.lower() for name in (f"{check.subject} {check.title}", check.id, *check.methods))
    ]


def run_check(check: Check, accelerator: Accelerator) -> Result:
    """Run one check. Whatever it raises is its result."""
    started = time.perf_counter()
    outcome, detail, trace = "pass", "", ""
    try:
        with _as_found(accelerator):
            outcome, detail = _judge(check, accelerator)
    except UncheckedError as error:
        outcome, detail = "absent", str(error)
    except ConformanceError as error:
        outcome, detail, trace = "fail", str(error), traceback.format_exc()
    except (Exception, SystemExit) as error:  # a vendor's driver may raise anything
        outcome, detail, trace = "fail", f"raised {type(error).__name__}: {error}", traceback.format_exc()
        logger.debug("check %s raised", check.id, exc_info=True)
    seconds = time.perf_counter() - started
    return Result(check.subject, check.title, outcome, " ".join(detail.split()), seconds, trace)


def uncovered_methods() -> set[str]:
    """Public names of the interface that no check covers: empty, or the kit is behind the interface."""
    methods = {name for name, value in vars(Accelerator).items() if callable(value) or hasattr(value, "__get__")}
    names = {name for name in methods if not name.startswith("_")}
    return names - {name for check in CHECKS for name in check.methods}


def _judge(check: Check, accelerator: Accelerator) -> tuple[str, str]:
    """Outcome and detail, where the accelerator is right."""
    capabilities, methods = lacking(check, accelerator)
    nothing_done = does_nothing(accelerator, capabilities)
    if (capabilities or methods) and not nothing_done:
        reasons = [verify_absent(accelerator, method) for method in sorted(methods)]
        return "absent", reasons[0] if reasons else _reason(accelerator, min(capabilities))
    try:
        note = check.function(accelerator)
    except CapabilityError as error:
        if nothing_done:
            raise ConformanceError(f"expected objects that do nothing, got CapabilityError: {error}") from error
        if not is_declared(accelerator, error):
            message = f"raised CapabilityError, and spec.capabilities does not declare that absent: {error}"
            raise ConformanceError(message) from error
        return "absent", str(error)
    return "pass", f"does nothing here: {_reason(accelerator, min(capabilities))}" if nothing_done else note or ""


def _reason(accelerator: Accelerator, capability: Capability) -> str:
    return accelerator.spec.capabilities.why_absent(capability) or f"there is no {capability}"


@contextlib.contextmanager
def _as_found(accelerator: Accelerator) -> Iterator[None]:
    """Put back the current device and the random generators; checks put back what else they change.

    A method that fails here has a check of its own, which tells.
    """
    host = torch.get_rng_state()
    device: int | None = None
    states: dict[int, torch.Tensor] = {}
    with contextlib.suppress(Exception):
        device = accelerator.current_device()
    with contextlib.suppress(Exception):
        if accelerator.has(Capability.RNG):
            states = {index: accelerator.get_rng_state(index) for index in range(accelerator.device_count())}
    try:
        yield
    finally:
        for index, state in states.items():
            with contextlib.suppress(Exception):
                accelerator.set_rng_state(state, index)
        with contextlib.suppress(Exception):
            if device is not None:
                accelerator.set_device(device)
        torch.set_rng_state(host)
