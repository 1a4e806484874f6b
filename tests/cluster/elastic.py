# SPDX-License-Identifier: Apache-2.0
"""Workers that add up until one host dies: its worker kills the agent above, as a crash of the host would."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist


def ancestor(pid: int, generations: int) -> int:
    for _ in range(generations):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


dist.init_process_group("gloo")
rank, size, restart = dist.get_rank(), dist.get_world_size(), os.environ["TORCHELASTIC_RESTART_COUNT"]
if size == 2 and rank == 1:
    time.sleep(1)
    os.kill(ancestor(os.getpid(), 3), signal.SIGKILL)  # torch's launcher, guardian, agent
total = torch.ones(1)
for _ in range(10 if size == 1 else 1000):
    dist.all_reduce(total.fill_(1))
    time.sleep(0.02)
print(f"finished with {size} in round {restart}", flush=True)
dist.destroy_process_group()
