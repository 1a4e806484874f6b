# SPDX-License-Identifier: Apache-2.0
"""Streams keep the order that they are told to keep, events mark points in it and measure milliseconds.

A synchronous device has streams and events that do nothing; the same code gives the same results with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from anyaccel.accelerator.base import HOST, Accelerator
from anyaccel.accelerator.conformance.checking import check, expect, expect_equal, expect_type
from anyaccel.accelerator.spec import Capability

_PAUSE_S = 0.05
# Seconds that the work should take at least; a fast device may need less even with the largest matrices.
_BUSY_S = 0.01
_MOST_ROWS = 4096


class _Work:
    """Work long enough to be still running when the host goes on, with a result that is known.

    All of it writes into memory that is there before, so that a missing wait shows as the old contents.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        seconds, size = 0.0, 64
        while seconds < _BUSY_S and size < _MOST_ROWS:
            size *= 2
            self._make(size, accelerator.current_device_name())
            self._run()  # loads kernels, which may wait for the whole device
            accelerator.synchronize()
            started = time.perf_counter()
            self._run()
            accelerator.synchronize()
            seconds = time.perf_counter() - started
        self.result.zero_()
        accelerator.synchronize()

    def _make(self, size: int, device: str) -> None:
        self._identity = torch.eye(size, device=device)
        self._values = torch.full((size, size), 3.0, device=device)
        self._product = torch.zeros_like(self._values)
        self.result = torch.zeros_like(self._values)

    def _run(self) -> None:
        for _ in range(8):
            torch.mm(self._values, self._identity, out=self._product)
            torch.mm(self._product, self._identity, out=self._values)
        self.result.copy_(self._values)

    def start(self) -> None:
        """Queue it in the current stream."""
        self._run()

    def expect_complete(self, accelerator: Accelerator, after: str) -> None:
        """What the current stream reads now is the result."""
        seen = self.result.clone()
        accelerator.synchronize()
        wrong = int((seen.to(HOST) != 3.0).sum())
        expect(wrong == 0, f"the work on another stream to be complete after {after}", f"{wrong} old values")


def _on_side_stream(accelerator: Accelerator, join: Callable[[Any, Any], object], after: str) -> None:
    """Work on a side stream, joined to the current one by `join(current, side)`."""
    work = _Work(accelerator)
    side, current = accelerator.Stream(), accelerator.current_stream()
    side.wait_stream(current)
    with accelerator.stream(side):
        work.start()
    join(current, side)
    work.expect_complete(accelerator, after)


@check("streams", "Stream", "stream")
def check_a_stream_waits_for_another(accelerator: Accelerator) -> None:
    """wait_stream orders the work of two streams."""
    _on_side_stream(accelerator, lambda current, side: current.wait_stream(side), "wait_stream()")


@check("streams", "Stream", "stream")
def check_a_stream_is_waited_for_by_the_host(accelerator: Accelerator) -> None:
    """synchronize() of the stream, after which query() is true."""

    def join(current: Any, side: Any) -> None:
        side.synchronize()
        done = side.query()
        expect_type("Stream.query()", done, bool)
        expect(done, "Stream.query() True after synchronize()", done)

    _on_side_stream(accelerator, join, "Stream.synchronize()")


@check("streams", "Stream", "synchronize")
def check_synchronize_waits_for_every_stream(accelerator: Accelerator) -> None:
    """The device's synchronize() does not look at the current stream only."""
    _on_side_stream(accelerator, lambda current, side: accelerator.synchronize(), "the device's synchronize()")


@check("streams", "stream", "current_stream", "default_stream")
def check_stream_is_a_context(accelerator: Accelerator) -> None:
    """Inside it the stream is the current one; afterwards the former is. None changes nothing."""
    before = accelerator.current_stream()
    for what, stream in (("current_stream()", before), ("default_stream()", accelerator.default_stream())):
        for method in ("wait_stream", "wait_event", "record_event", "synchronize", "query"):
            expect(callable(getattr(stream, method, None)), f"{what} with the method {method}", stream)
    expect_equal("current_stream() by index", accelerator.current_stream(accelerator.current_device()), before)
    side = accelerator.Stream()
    with accelerator.stream(side):
        expect_equal("inside stream(side), current_stream()", accelerator.current_stream(), side)
        with accelerator.stream(None):
            expect_equal("inside stream(None), current_stream()", accelerator.current_stream(), side)
    expect_equal("after stream(side), current_stream()", accelerator.current_stream(), before)


@check("events", "Event", needs=[Capability.STREAMS])
def check_a_stream_waits_for_an_event(accelerator: Accelerator) -> None:
    """One recorded by the stream, one recorded on it, and both ways to wait."""

    def by_stream(current: Any, side: Any) -> None:
        event = side.record_event()
        expect(event is not None, "record_event() to return an event", event)
        current.wait_event(event)

    def by_event(current: Any, side: Any) -> None:
        event = accelerator.Event()
        event.record(side)
        event.wait(current)

    _on_side_stream(accelerator, by_stream, "record_event() and wait_event()")
    _on_side_stream(accelerator, by_event, "Event.record() and Event.wait()")


@check("events", "Event")
def check_the_host_waits_for_an_event(accelerator: Accelerator) -> None:
    """synchronize(), after which query() is true."""
    work = _Work(accelerator)
    event = accelerator.Event()
    work.start()
    event.record()
    event.synchronize()
    done = event.query()
    expect_type("Event.query()", done, bool)
    expect(done, "Event.query() True after synchronize()", done)
    work.expect_complete(accelerator, "Event.synchronize()")


@check("events", "Event")
def check_elapsed_time_is_in_milliseconds(accelerator: Accelerator) -> None:
    """Compared with the host's clock across a pause."""
    start, end = accelerator.Event(enable_timing=True), accelerator.Event(enable_timing=True)
    accelerator.synchronize()
    began = time.perf_counter()
    start.record()
    start.synchronize()
    time.sleep(_PAUSE_S)
    end.record()
    end.synchronize()
    most_ms = (time.perf_counter() - began) * 1e3
    measured = start.elapsed_time(end)
    expect_type("elapsed_time()", measured, float)
    least_ms = _PAUSE_S * 1e3
    fits = 0.9 * least_ms <= measured <= 1.1 * most_ms + 1
    expect(fits, f"elapsed_time() from {least_ms:.0f} to {most_ms:.0f} milliseconds", measured)
