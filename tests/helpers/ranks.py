# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks, each a process of its own, as a job does.

The ranks are forked from a server that has imported torch and anyaccel already: a rank starts in milliseconds.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from waiting import wait_for

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "accelerate",
        "pytest",
        "torch._dynamo",
        "torch.distributed",
        "transformers.generation",
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
        "torch.distributed.tensor.parallel",
        "anyaccel.comm.shm",
        "anyaccel.inference.engine",
        "anyaccel.inference.generate",
        "anyaccel.inference.native.runtime",
        "anyaccel.inference.generic.runtime",
        "anyaccel.inference.generic.tp.apply",
    ]
)


_GLOO_FAILED = "Gloo connectFullMesh failed"


class RankFailed(AssertionError):
    """A rank of a job did not end well; the text has what each rank printed."""


def start_server() -> None:
    """Start the fork server, which lives as long as this process."""
    process = _context.Process(target=os.getpid)
    process.start()
    process.join(100)


def free_port() -> int:
    """A TCP port that nobody uses, of those that the kernel gives to nobody: it is free when it is bound later too."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(10_240, first_given)
    for port in random.SystemRandom().sample(candidates, min(100, len(candidates))) or [0]:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise OSError(f"no free port in {candidates}")


def _rank_main(function: Callable[..., Any], arguments: tuple[Any, ...], env: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    rank = env["RANK"]
    output = os.open(f"{folder}/output{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    try:
        import torch

        from anyaccel import comm

        torch.set_num_threads(1)
        comm.init_distributed(os.environ.pop("TEST_BACKEND", "gloo"))
        result = function(*arguments)
        Path(f"{folder}/result{rank}").write_bytes(pickle.dumps(result))
        comm.barrier()
        comm.destroy_process_group()
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        raise
    finally:
        os._exit(code)


def mark(folder: Path) -> None:
    """Say in a folder, from a rank, that it is so far."""
    (folder / f"mark{os.environ['RANK']}").touch()


def wait_for_marks(folder: Path, *of_ranks: int) -> None:
    """Wait until these ranks have called `mark`."""
    wait_for(lambda: all((folder / f"mark{rank}").exists() for rank in of_ranks), f"ranks {of_ranks} are not so far")


def start(
    function: Callable[..., Any], world_size: int, arguments: tuple[Any, ...], folder: Path, **env: str
) -> list[BaseProcess]:
    """Start `function(*arguments)` on each rank; it must be a module-level function of a test module."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    base |= {
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        own = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank), **env}
        process = _context.Process(target=_rank_main, args=(function, arguments, own, str(folder)))
        process.start()
        processes.append(process)
    return processes


def finish(processes: list[BaseProcess], folder: Path, timeout: float = 100) -> list[tuple[int, str]]:
    """Exit code and output of each rank; kills what is not done in time."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.01))
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR2)  # its output ends with where it waits
            process.join(1)
            process.kill()
            process.join(10)
    outcome = []
    for rank, process in enumerate(processes):
        file = folder / f"output{rank}"
        output = file.read_text() if file.exists() else ""
        outcome.append((process.exitcode if process.exitcode is not None else -1, output))
        process.close()
    return outcome


def run(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 100, **env: str) -> list[Any]:
    """Run `function(*arguments)` on `world_size` ranks and return what each returned.

    Raises:
        RankFailed: a rank raised or was killed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcome = finish(start(function, world_size, arguments, folder, **env), folder, timeout)
        # Gloo's ranks, before any of our code, do not come together once in thousands of times.
        if any(code and _GLOO_FAILED in text for code, text in outcome):
            outcome = finish(start(function, world_size, arguments, folder, **env), folder, timeout)
        if any(code for code, _ in outcome):
            raise RankFailed(
                "\n".join(f"--- rank {rank}: exit code {code}\n{text}" for rank, (code, text) in enumerate(outcome))
            )
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]
