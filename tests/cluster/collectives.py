# SPDX-License-Identifier: Apache-2.0
"""A worker of a job over several hosts: runs cases of tests/helpers/collective_cases.py on backend shm.

Rank 0 prints one line of JSON: the cases that failed, how many there were, and what kind of group it was.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))


def main(words: list[str]) -> int:
    import torch
    import torch.distributed as dist

    import collective_cases
    from anyaccel import comm

    torch.set_num_threads(1)
    comm.init_distributed("shm")
    names = [name for name in collective_cases.CASES if not words or any(word in name for word in words)]
    found = collective_cases.run_cases("shm", names)
    everyones: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, os.uname().nodename)
    if dist.get_rank() == 0:
        line = {
            "rank": 0,
            "wrong": {name: text for name, text in found.items() if text},
            "cases": len(found),
            "group": type(dist.group.WORLD).__name__,
            "hosts": everyones,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
