# SPDX-License-Identifier: Apache-2.0
"""Runs code that may end the process it runs in, such as the import of a damaged torch, in a process of its own.

That is a fork of this one, so that nothing is imported twice that is imported already. It is for commands, which have
no other threads; where torch is imported already there is nothing left to fear from its import.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from anyaccel.errors import AcceleratorUnavailableError

# Seconds; importing torch takes two, on a loaded machine or from a slow disk many more. Detection has its own limits.
_PATIENCE = 900.0


def run_isolated(work: Callable[[], Any], what: str) -> Any:
    """What `work()` returns, which JSON can hold.

    Args:
        what: for messages: what the work begins with, such as "importing torch".

    Raises:
        AcceleratorUnavailableError: the process that did it ended without a result, or not at all, or the work raised.
    """
    if "torch" in sys.modules:
        return work()
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _be_the_child(work, writer)
    os.close(writer)
    try:
        answer = _read(reader, what)
    except BaseException:  # of Ctrl-C, which the child may have got too, or not
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        outcome = json.loads(answer)
    except ValueError:
        raise AcceleratorUnavailableError(f"{what} ended the process that tried it ({_how(status)})") from None
    if "raised" in outcome:
        raise AcceleratorUnavailableError(f"{what} failed: {outcome['raised']}")
    return outcome["result"]


def _be_the_child(work: Callable[[], Any], writer: int) -> None:
    code = 1
    try:
        _end_with_parent()
        try:
            outcome = {"result": work()}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told by the other process
            outcome = {"raised": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        answer = json.dumps(outcome).encode()
        sys.stdout.flush()
        sys.stderr.flush()
        while answer:
            answer = answer[os.write(writer, answer) :]
        code = 0
    except KeyboardInterrupt:
        code = 130  # the other process says it
    finally:
        os._exit(code)


def _end_with_parent() -> None:
    try:
        from anyaccel import _native
    except ImportError:  # a source tree that was not built, or a damaged module: the report says so itself
        return
    _native.set_parent_death_signal(signal.SIGKILL)


def _read(reader: int, what: str) -> bytes:
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    answer, deadline = b"", time.monotonic() + _PATIENCE
    while True:
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise AcceleratorUnavailableError(f"{what} did not finish within {_PATIENCE:g} s")
        piece = os.read(reader, 1 << 16)
        if not piece:
            return answer
        answer += piece


def _how(status: int) -> str:
    if status >= 0:
        return f"by an exit with code {status}"
    return f"by {signal.Signals(-status).name}"
