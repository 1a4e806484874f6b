# SPDX-License-Identifier: Apache-2.0
"""A worker without torch: says who it is, and waits, fails or ends as asked.

wait.py FOLDER [--fail-rank R] [--fail-host NAME] [--exit N] [--signal N] [--after S] [--ignore] [--child] [--end]

It writes FOLDER/rankN with its process number, host and CPUs, then FOLDER/rankN.signal with the signals that it gets.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--fail-rank", type=int)
    parser.add_argument("--exit", type=int, default=7)
    parser.add_argument("--signal", type=int)
    parser.add_argument("--after", type=float, default=0.2, help="seconds after all have started")
    parser.add_argument("--ignore", action="store_true", help="take no notice of signals that can be ignored")
    parser.add_argument("--child", action="store_true", help="have a child in a session of its own")
    parser.add_argument("--end", action="store_true", help="end well instead of waiting")
    given = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = given.folder / f"rank{rank}.signal"

    def note(number: int, frame: object) -> None:
        with open(log, "a") as file:
            file.write(f"{signal.Signals(number).name}\n")
        if not given.ignore:
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, note)
    if given.child:
        subprocess.Popen(["sleep", "610"], start_new_session=True)
    own = given.folder / f"rank{rank}"
    own.with_suffix(".new").write_text(f"{os.getpid()} {socket.gethostname()} {sorted(os.sched_getaffinity(0))}\n")
    own.with_suffix(".new").rename(own)
    deadline = time.monotonic() + 60
    while not all((given.folder / f"rank{peer}").exists() for peer in range(size)):
        if time.monotonic() > deadline:
            raise SystemExit(f"rank {rank}: not all ranks have started within 60 s")
        time.sleep(0.01)
    print(f"rank {rank} of {size} on {socket.gethostname()}", flush=True)
    if given.end:
        return 0
    if rank == given.fail_rank:
        time.sleep(given.after)
        print(f"the last words of rank {rank}", file=sys.stderr, flush=True)
        if given.signal:
            os.kill(os.getpid(), given.signal)
        os._exit(given.exit)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
