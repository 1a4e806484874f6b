# SPDX-License-Identifier: Apache-2.0
"""Backend ccl: where oneCCL is looked for, what it is told, and how it fails. Its results: the conformance suite."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranks
from anyaccel import comm, errors
from anyaccel.comm import ccl
from anyaccel.launch.cluster.address import interface_towards
from anyaccel.ops.builders import ccl as builder
from collective_cases import oneccl_folder

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def oneccl(monkeypatch: pytest.MonkeyPatch) -> Path:
    """oneCCL's folder."""
    folder = oneccl_folder()
    if folder is None:
        pytest.skip("no oneCCL: tools/install_test_tools.sh brings it")
    monkeypatch.setenv("CCL_ROOT", str(folder))
    if why := ccl.why_not():
        pytest.skip(why)
    return folder


def fake(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"oneCCL")
    return folder


def test_what_is_missing_is_named_with_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CCL_ROOT", str(tmp_path))
    assert "no lib/libccl.so.1" in ccl.why_not()
    fake(tmp_path, "lib/libccl.so.1")
    assert "headers" in ccl.why_not()
    fake(tmp_path, "include/oneapi/ccl.hpp")
    assert ccl.is_available()
    (tmp_path / "lib/libccl.so.1").write_bytes(b"...\0libccl.so.2\0...")
    assert "needs libccl.so.2" in ccl.why_not()
    fake(tmp_path, "lib/libccl.so.2")
    assert ccl.is_available()
    monkeypatch.delenv("CCL_ROOT")
    monkeypatch.setattr(builder, "_roots_of_packages", list)
    assert ccl.why_not().endswith(ccl.PIP_LINE)
    with pytest.raises(errors.CommError, match=r"pip install .oneccl-cpu"):
        ccl.find()


def test_packages_are_found_by_what_they_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "lib/libccl.so.1", "include/oneapi/ccl.hpp", "lib/libfabric.so.1", "lib/libmpi.so.12")
    info = tmp_path / "lib/python3/site-packages/oneccl_cpu-2021.16.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oneccl-cpu\nVersion: 2021.16.2\n")
    (info / "RECORD").write_text("../../libccl.so.1,,\n../../../include/oneapi/ccl.hpp,,\n")
    monkeypatch.delenv("CCL_ROOT", raising=False)
    monkeypatch.syspath_prepend(info.parent)
    found = ccl.find()
    assert found.library == tmp_path / "lib/libccl.so.1"
    assert found.include == tmp_path / "include"
    assert found.fabric == str(tmp_path / "lib/libfabric.so.1")
    assert found.mpi == str(tmp_path / "lib/libmpi.so.12")


def test_environment_is_made_from_the_masters_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CCL_KVS_IFACE", "CCL_ATL_TRANSPORT", "CCL_LOG_LEVEL", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    found = builder.Installation(tmp_path, tmp_path, "libfabric.so.1", "libmpi.so.12")
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") is None
    wanted = ccl.environment(found, 0, 2, "127.0.0.1", 30)
    assert wanted["CCL_KVS_IFACE"] == wanted["FI_TCP_IFACE"] == "lo"
    assert wanted["CCL_ATL_TRANSPORT"] == "ofi"
    assert wanted["CCL_KVS_CONNECTION_TIMEOUT"] == "30"
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert ccl.environment(found, 0, 2, "127.0.0.1", 30)["CCL_ATL_TRANSPORT"] == "mpi"
    assert ccl.environment(found, 1, 2, "127.0.0.1", 30)["CCL_ATL_TRANSPORT"] == "ofi"  # mpirun started others
    monkeypatch.setenv("CCL_ATL_TRANSPORT", "ofi")
    assert "CCL_ATL_TRANSPORT" not in ccl.environment(found, 0, 2, "127.0.0.1", 30)  # the user's stays
    with pytest.raises(errors.CommError, match="no libfabric"):
        ccl.environment(found._replace(fabric="", mpi=""), 0, 2, "127.0.0.1", 30)


def refusals() -> list[str]:
    """Errors that must be the same on all ranks and leave the group in order."""
    group = dist.new_group(backend="ccl")
    found = []
    for call in (
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32), op=dist.ReduceOp.BAND, group=group),
        lambda: dist.all_reduce(torch.ones(4).to(torch.float8_e5m2), group=group),
        lambda: dist.isend(torch.ones(4), (dist.get_rank() + 1) % 2, group, tag=7),
        lambda: dist.recv(torch.ones(4), group=group),
    ):
        with pytest.raises(errors.UsageError) as caught:
            call()
        found.append(str(caught.value))
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 4
    dist.destroy_process_group(group)
    return found


def test_what_oneccl_lacks_is_refused(oneccl: Path) -> None:
    told = ranks.run(refusals, 2)[0]
    for text, word in zip(told, ("BAND", "float8_e5m2", "tag=7", "recv from any rank"), strict=True):
        assert word in text
        assert "backend ccl" in text


def until_error(how: str, folder: Path) -> None:
    """Rank 1 goes away; rank 0 must get an error that names the cause within the group's timeout."""
    group = dist.new_group(backend="ccl", timeout=timedelta(seconds=3))
    dist.all_reduce(torch.ones(1000), group=group)
    if dist.get_rank() == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.wait_for_marks(folder, 0)
        os._exit(5)
    with pytest.raises(errors.CommError) as caught:
        dist.all_reduce(torch.ones(1000), group=group)
    with pytest.raises(errors.CommError, match="broken by an earlier error"):
        dist.all_reduce(torch.ones(1000), group=group)
    os.write(1, f"told: {type(caught.value).__name__}: {caught.value}\n".encode())
    ranks.mark(folder)
    os._exit(17)  # the group is gone, so the usual barrier at the end would hang


@pytest.mark.parametrize("how", ["kill", "elsewhere"])
def test_a_rank_that_goes_away_is_an_error(oneccl: Path, tmp_path: Path, how: str) -> None:
    outcome = ranks.finish(ranks.start(until_error, 2, (how, tmp_path), tmp_path), tmp_path, 60)
    code, output = outcome[0]
    assert code == 17, output
    assert "told: CommTimeoutError: backend ccl: rank 0 of 2: all_reduce did not finish within 3 s" in output


def never_joins(folder: Path) -> str:
    if dist.get_rank() == 1:
        ranks.wait_for_marks(folder, 0)
        return ""
    store = dist.PrefixStore("alone", dist.distributed_c10d._get_default_store())
    from anyaccel.comm import ccl_group

    with pytest.raises(errors.CommTimeoutError) as caught:
        ccl_group.create(store, 0, 2, timedelta(seconds=2))
    ranks.mark(folder)
    return str(caught.value)


def test_a_rank_that_never_joins_is_named(oneccl: Path, tmp_path: Path) -> None:
    assert "rank 1 of 2 did not join the group within 2 s" in ranks.run(never_joins, 2, tmp_path)[0]


SCRIPT = """
import os, sys, torch, torch.distributed as dist
import anyaccel.comm
rank, size = int(os.environ.get("RANK", os.environ.get("PMI_RANK"))), 2
os.environ.update(RANK=str(rank), WORLD_SIZE="2")
dist.init_process_group("ccl")
tensor = torch.full((1000,), float(rank + 1))
dist.all_reduce(tensor)
assert bool((tensor == 3).all())
os.write(1, f"transport {os.environ['CCL_ATL_TRANSPORT']}\\n".encode())  # at once: the ranks share a pipe
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["run", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_launchers(oneccl: Path, tmp_path: Path, launcher: str) -> None:
    """As the default group, under `anyaccel run` and under Intel MPI's mpirun, where MPI carries the messages."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    if launcher == "run":
        command = [sys.executable, "-m", "anyaccel", "run", "--num_accelerators", "2", str(script)]
    else:
        program = oneccl / "bin" / "mpiexec.hydra"
        if not program.exists():
            pytest.skip(f"no {program}")
        command = [str(program), "-n", "2", sys.executable, str(script)]
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ranks.free_port()),
            "I_MPI_ROOT": str(oneccl),
            "I_MPI_FABRICS": "shm",
            "OMP_NUM_THREADS": "1",
        }
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=variables, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count(f"transport {'ofi' if launcher == 'run' else 'mpi'}") == 2


def test_without_oneccl_the_error_has_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CCL_ROOT", str(tmp_path))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(ranks.free_port()))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # else init_distributed sets it, and it stays
    with pytest.raises(errors.CommError, match=r"pip install .oneccl-cpu"):
        comm.init_distributed("ccl")
    assert not dist.is_initialized()


def sum_beside_left_memory() -> list[float]:
    """With files of this process's number in the way, as after a kill and one round of numbers."""
    for count in range(3):
        Path(f"/dev/shm/{os.getpid()}:{os.getuid()}:{count}").write_bytes(b"\xff" * 65536)
    sums = []
    try:
        for _ in range(2):  # a second group leaves the memory of the first one alone
            group = dist.new_group(backend="ccl")
            tensor = torch.ones(1000)
            dist.all_reduce(tensor, group=group)
            sums.append(float(tensor.sum()))
    finally:
        for path in Path("/dev/shm").glob(f"{os.getpid()}:{os.getuid()}:*"):
            path.unlink()
    return sums


@pytest.mark.usefixtures("oneccl")
def test_memory_that_a_killed_process_has_left_is_in_nobodys_way() -> None:
    assert ranks.run(sum_beside_left_memory, 2) == [[2000.0, 2000.0]] * 2
