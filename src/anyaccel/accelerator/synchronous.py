# SPDX-License-Identifier: Apache-2.0
"""Streams, events and graphs of a synchronous device: real objects that have nothing to do.

An operation of such a device is complete when its call returns, so there is never anything to wait for.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any


class Stream:
    """The one queue of a synchronous device. All of them are the same queue, so they compare equal.

    Args:
        device: accepted and kept, as `torch.Stream` does.
        priority: accepted and kept.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_unused: Any) -> None:
        self.device = device
        self.priority = priority

    def query(self) -> bool:
        """Always True: nothing is pending."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash(Stream)


class Event:
    """A point in time on a synchronous device.

    Args:
        enable_timing: accepted; time is always taken, it costs nothing here.
        blocking: accepted, without effect.
        interprocess: accepted, without effect.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_unused: Any
    ) -> None:
        self._time_ns: int | None = None

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        self._time_ns = time.perf_counter_ns()

    def query(self) -> bool:
        """Always True: what was recorded is complete."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`.

        Raises:
            RuntimeError: one of the two was not recorded.
        """
        if self._time_ns is None or end_event._time_ns is None:
            raise RuntimeError("elapsed_time() needs two recorded events; call record() on both first")
        return (end_event._time_ns - self._time_ns) / 1e6


class Graph:
    """A captured graph of a device that has none: the work runs while it is "captured", replay does nothing.

    A caller that needs the work repeated asks `accelerator.has("graphs")` first.
    """

    def capture_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing is captured."""

    def capture_end(self) -> None:
        """Nothing was captured."""

    def replay(self) -> None:
        """Nothing is replayed."""

    def reset(self) -> None:
        """Nothing is held."""

    def pool(self) -> tuple[int, int]:
        """The memory pool of no graph."""
        return (0, 0)

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
