# SPDX-License-Identifier: Apache-2.0
"""`--max-restarts` and `--elastic`: the command of torch.distributed.run, with the binder inside.

torch starts, watches and restarts the workers. This module only builds the command that is started on each host:

    python -m torch.distributed.run [rendezvous] --no-python env ... python -m anyaccel bind [...] -- \\
        python -m anyaccel.launch.local.rounds python -u script

The process that starts it should be a subreaper, as `supervise` is, since a SIGKILL to torch's process leaves its
workers alive. Its exit code is 1 whatever the code of the failed worker is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.errors import UsageError

_LOOPBACK = "127.0.0.1"


def build_command(
    command: Sequence[str],
    arguments: Sequence[str] = (),
    *,
    python: str,
    slots: int,
    max_restarts: int = 0,
    nodes: tuple[int, int] = (1, 1),
    job_id: str = "anyaccel",
    endpoint: tuple[str, int] | None = None,
    first: bool = True,
    address: str | None = None,
    binding: Sequence[str] | None = None,
    local_rank_argument: bool = True,
    threads: int | None = None,
    users_threads: bool = False,
) -> list[str]:
    """The argument vector of torch's launcher on one host.

    Args:
        command: the worker's program, such as ``python -u script.py``.
        arguments: its arguments, which arrive byte for byte.
        python: interpreter that has torch and anyaccel.
        slots: workers of this host.
        max_restarts: how often all workers are started again when one fails, or when a host comes or goes.
        nodes: smallest and largest number of hosts. With fewer than the largest, torch waits 30 s for more.
        job_id: the same on all hosts, different for each job that uses this endpoint.
        endpoint: address and TCP port of the first host, where the hosts meet; None for a job of one host, which
            meets on the loopback at a free port.
        first: whether this host is the first one, which hosts the rendezvous store, and so is needed to the end.
        address: address of this host as the others see it; None for what its own name resolves to.
        binding: options of `anyaccel bind` (adr/0007 says why they are words); None to leave the workers unbound.
        local_rank_argument: pass `--local_rank=N` to the script.
        threads: OMP_NUM_THREADS of each worker; None to leave it to the binder, or unset.
        users_threads: whether the user has set OMP_NUM_THREADS, which then stays as it is.

    Raises:
        UsageError: several hosts, and no place for them to meet.
    """
    least, most = nodes
    if endpoint is None and most > 1:
        raise UsageError(f"--elastic {least}:{most} needs to know the hosts; add --hostfile FILE")
    if endpoint is None:
        endpoint, address = (_LOOPBACK, 0), _LOOPBACK
    host, port = endpoint
    rendezvous = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    launcher = [
        python, "-m", "torch.distributed.run",
        "--nnodes", f"{least}:{most}",
        "--nproc-per-node", str(slots),
        "--max-restarts", str(max_restarts),
        "--rdzv-backend", "c10d",
        "--rdzv-endpoint", rendezvous,
        "--rdzv-id", job_id,
        # Otherwise torch compares host names, which several hosts may share, or which may not resolve.
        "--rdzv-conf", f"is_host={int(first)}",
    ]  # fmt: skip
    if address is not None:
        launcher += ["--local-addr", address]
    launcher.append("--no-python")
    worker: list[str] = []
    if not users_threads:
        # torch sets OMP_NUM_THREADS=1 if it is not set, which would look like the user's setting.
        worker += ["env", f"OMP_NUM_THREADS={threads}"] if threads else ["env", "-u", "OMP_NUM_THREADS"]
    if binding is not None:
        worker += [python, "-m", "anyaccel", "bind", *binding, "--"]
    if max_restarts or least < most:
        worker += [python, "-m", "anyaccel.launch.local.rounds"]
    worker += command
    # torch replaces ${local_rank} in every word, and $$ by $.
    words = [word.replace("$", "$$") for word in worker]
    if local_rank_argument:
        words.append("--local_rank=${local_rank}")
    return [*launcher, *words, *(word.replace("$", "$$") for word in arguments)]


def launcher_environment(environ: Mapping[str, str], grace_period: float) -> dict[str, str]:
    """Variables for torch's launcher on top of `environ`.

    Args:
        grace_period: seconds between asking workers to end and killing them. torch has 30 s, and whole seconds only.
    """
    variables = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, round(grace_period))),
        # Each round gets a store of its own. In the one that torch 2.13 shares by default, keys of the round before
        # make the new workers wait for each other without end.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if not environ.get("OMP_NUM_THREADS"):
        variables["OMP_NUM_THREADS"] = "1"  # prevents torch's warning that it sets this; the workers get another value
    return variables
