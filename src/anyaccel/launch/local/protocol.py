# SPDX-License-Identifier: Apache-2.0
"""Constants and data that the guardian shares with the launcher that forked it, or with one on another host."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from anyaccel.launch.failure import Failure, Report
from anyaccel.launch.output import Output

# The guardian's process name, as `ps -o comm` shows it.
GUARDIAN_NAME = "anyaccel-guard"
# Added to a signal's number on the control pipe if the whole process group, including the workers, got the signal.
DELIVERED = 0x80
# Sent to an agent in place of a signal's number when nobody reads the workers' standard error any more.
STDERR_CLOSED = 0x7F
# Sent to an agent of an elastic job that goes on without another host, and the seconds that its workers then have to
# notice that by themselves: a collective waits for a host whose network is silent until it times out.
HOST_LOST = 0x7E
HOST_LOST_GRACE = 10.0
# Shared memory for the report: the tail of a worker takes at most 40 kB of it, unkillable processes as much.
REPORT_BYTES = 1 << 17
# Behind it, in the same memory: the guardian's next deadline in time.monotonic(), 0 for none. It tells the launcher
# whether a guardian that is stopped has to be woken up. It is written by a single store.
DUE = struct.Struct("d")
# Seconds that count as the same moment: a worker may die of Ctrl-C before the launcher has forwarded the signal.
SAME_MOMENT = 0.1
# Seconds within which a signal for the workers that the launcher and the guardian both get has been sent to all
# processes of the job, so that it is not passed on. On a busy machine the sender may pause between the two.
SENT_TO_ALL = 1.0
# Seconds to wait after SIGKILL: freeing much memory takes a while, and a stuck disk may take for ever.
KILL_TIMEOUT = 30.0
# Seconds that processes which the workers left behind have between SIGTERM and SIGKILL.
LEFTOVER_GRACE = 0.8


@dataclass
class Link:
    """The connection to a launcher on another host.

    Attributes:
        descriptor: receives a byte for each signal, 0 as a heartbeat, and end of file when that launcher is gone.
        timeout_s: seconds without a byte after which the launcher counts as gone.
        output: the connection on which that launcher reads.
        announce: the frame about the first failure.
        conclude: the frame about how the job has ended here.
    """

    descriptor: int
    timeout_s: float
    output: Output
    announce: Callable[[Failure], bytes]
    conclude: Callable[[Report], bytes]
