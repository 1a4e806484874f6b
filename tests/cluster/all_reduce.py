# SPDX-License-Identifier: Apache-2.0
"""A worker of a real job: joins the others with torch.distributed over the hosts' addresses and adds up.

    all_reduce.py [--local_rank N] [--fail-rank R] [--exit N] [--kill] [--sleep S] [argument …]

Each rank prints one line of JSON: who and where it is, its CPUs, the sum, and the arguments it was given. With
``--fail-rank R`` rank R fails after the sum, and the others wait to be ended.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import socket
import sys
import time

_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
_LOCAL = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def _first(names: tuple[str, ...], default: str | None = None) -> int:
    found = next((os.environ[name] for name in names if name in os.environ), default)
    if found is None:
        raise SystemExit(f"none of {', '.join(names)} is set")
    return int(found)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int)
    parser.add_argument("--fail-rank", type=int)
    parser.add_argument("--exit", type=int, default=3)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--sleep", type=float, default=0)
    parser.add_argument("rest", nargs="*")
    given = parser.parse_args()
    rank, size = _first(_RANK), _first(_SIZE)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    peers: list[object] = [None] * size
    host = socket.gethostname()
    dist.all_gather_object(peers, (rank, host))
    line = {
        "rank": rank,
        "size": size,
        "local_rank": _first(_LOCAL, "0"),
        "host": host,
        "address": socket.gethostbyname(host),
        "master": os.environ["MASTER_ADDR"],
        "affinity": sorted(os.sched_getaffinity(0)),
        "sum": total.item(),
        "hosts": sorted({peer[1] for peer in peers if isinstance(peer, tuple)}),
        "arguments": given.rest,
    }
    sys.stdout.write(json.dumps(line) + "\n")  # one write: lines of ranks do not mix
    sys.stdout.flush()
    if given.fail_rank is not None:
        if rank == given.fail_rank:
            sys.stderr.write("the last words of the rank that fails\n")
            sys.stderr.flush()
            if given.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(given.exit)
        time.sleep(600)
    dist.destroy_process_group()
    if given.sleep:
        time.sleep(given.sleep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
