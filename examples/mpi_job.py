# SPDX-License-Identifier: Apache-2.0
"""Pi by all ranks of several hosts, which an MPI starts; each rank says where it runs.

    anyaccel run --hostfile hosts --launcher openmpi --bind_cores_to_rank examples/mpi_job.py

`hosts` has one line a host, such as `node1 slots=2`. `--launcher` may be openmpi, mpich, impi, mvapich, slurm, pdsh or
ssh: the script does not know.
"""

from __future__ import annotations

import os
import socket

import torch

import anyaccel
from anyaccel import comm

SAMPLES = 200_000


def main() -> None:
    anyaccel.init_distributed()
    rank, size = comm.get_rank(), comm.get_world_size()
    cores = sorted(os.sched_getaffinity(0))
    print(f"rank {rank} of {size} on {socket.gethostname()}, cores {cores}", flush=True)

    torch.manual_seed(rank)
    inside = (torch.rand(SAMPLES, 2).square().sum(1) < 1).sum().double()
    comm.all_reduce(inside)
    if rank == 0:
        print(f"pi is about {4 * inside.item() / (SAMPLES * size):.3f}")
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
