# SPDX-License-Identifier: Apache-2.0
"""What the guardian and those that it works for agree on: the launcher that forked it, and one on another host."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from anyaccel.launch.failure import Failure, Report
from anyaccel.launch.output import Output

# What the guardian is called, as `ps -o comm` shows it.
GUARDIAN_NAME = "anyaccel-guard"
# Added to a signal number on the control pipe: the workers have it already, it went to the whole group.
DELIVERED = 0x80
# A byte on the connection to a launcher that is no signal: what workers write to standard error arrives nowhere.
DEAF = 0x7F
# Shared memory for the report: the tail of a worker takes at most 40 kB of it, immortal processes as much.
REPORT_BYTES = 1 << 17
# Behind it, in the same memory: when the guardian has something to do at the latest, so that the launcher can tell
# whether one that is stopped is missed. Seconds of time.monotonic(), 0 for nothing; one store of the processor.
DUE = struct.Struct("d")
# What counts as the same moment: a worker dies of Ctrl-C before the launcher has told us of it.
SAME_MOMENT = 0.1
# Seconds after SIGKILL until we stop waiting: much memory takes a while to free, a stuck disk takes for ever.
KILL_TIMEOUT = 30.0
# Seconds that left-over processes have between SIGTERM and SIGKILL.
LEFTOVER_GRACE = 0.8


@dataclass
class Link:
    """The connection to a launcher on another host.

    Attributes:
        descriptor: gets one byte a signal, 0 now and then as a sign of life, end of file when that launcher is gone.
        patience: seconds without a byte after which it counts as gone.
        output: where that launcher reads what happens.
        announce: what to write there about the first failure, at once.
        conclude: what to write there about how the job ended here.
    """

    descriptor: int
    patience: float
    output: Output
    announce: Callable[[Failure], bytes]
    conclude: Callable[[Report], bytes]
