# SPDX-License-Identifier: Apache-2.0
"""Constants and messages that the guardian shares with the launcher that forked it, and with one on another host."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from anyaccel.launch.failure import Failure, Report
from anyaccel.launch.output import Output

# The guardian's process name, as `ps -o comm` shows it.
GUARDIAN_NAME = "anyaccel-guard"
# Added to a signal's number on the control pipe: the signal went to the whole process group, workers included.
DELIVERED = 0x80
# A byte to the agent in place of a signal's number: nobody reads the workers' standard error any more.
DEAF = 0x7F
# Shared memory for the report: the tail of a worker takes at most 40 kB of it, immortal processes as much.
REPORT_BYTES = 1 << 17
# Behind it, in the same memory: when the guardian has something to do at the latest, so that the launcher can tell
# whether one that is stopped is missed. Seconds of time.monotonic(), 0 for nothing; one store of the processor.
DUE = struct.Struct("d")
# Seconds that count as the same moment: a worker dies of Ctrl-C before the launcher has forwarded the signal.
SAME_MOMENT = 0.1
# Seconds to wait after SIGKILL: freeing much memory takes a while, and a stuck disk would take for ever.
KILL_TIMEOUT = 30.0
# Seconds that processes which the workers left behind have between SIGTERM and SIGKILL.
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
