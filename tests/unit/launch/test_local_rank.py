# SPDX-License-Identifier: Apache-2.0
"""Which rank a process is, from what each launcher sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from anyaccel.errors import UsageError
from anyaccel.launch.plan.ancestors import Ancestor, Ancestors, read_ancestors
from anyaccel.launch.plan.local_rank import is_claimed_twice, launcher_below, rank_from_environment, slurm_tasks

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_TASKS_PER_NODE": "7(x9)",  # of the job, which the step is a part of
}


@pytest.mark.parametrize(
    ("source", "environ"),
    [
        ("torch.distributed", TORCHRUN),
        ("Open MPI", OPEN_MPI),
        ("MVAPICH2", {name.replace("OMPI_", "MV2_"): value for name, value in OPEN_MPI.items()}),
        ("MVAPICH", {name.replace("OMPI_", "MVP_"): value for name, value in OPEN_MPI.items()}),
        ("MPICH or Intel MPI", {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}),
        ("PALS", {"PALS_RANKID": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}),
        ("Cray PMI", {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}),
        ("jsrun", {name.replace("OMPI_COMM_WORLD", "JSM_NAMESPACE"): value for name, value in OPEN_MPI.items()}),
        ("Flux", {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}),
        ("Slurm", SLURM),
    ],
)
def test_every_launcher(source: str, environ: dict[str, str]) -> None:
    found = rank_from_environment(environ)
    assert (found.source, found.rank, found.world_size) == (source, 5, 8)
    assert (found.local_rank, found.local_size) == (1, 4)
    assert environ[found.variable] == "1"


def test_the_innermost_launcher_counts() -> None:
    # srun starts the daemons of mpirun, and torchrun.
    inner = {**SLURM, **OPEN_MPI, "SLURM_LOCALID": "0", "SLURM_PROCID": "1"}
    assert rank_from_environment(inner).source == "Open MPI"
    assert rank_from_environment({**inner, **TORCHRUN}).source == "torch.distributed"
    assert rank_from_environment({**inner, **TORCHRUN}, launcher_only=True).source == "Open MPI"


def started_by(*sets: dict[str, str] | None) -> tuple[dict[str, str], Ancestors]:
    """The environment of a process, and the processes above it: what each sets for the next, the outermost first.

    None is a process whose environment may not be read; what it hands on is that of the one above it.
    """
    environ: dict[str, str] = {}
    line: list[Ancestor] = []
    for pid, given in enumerate(sets, 100):
        line.insert(0, Ancestor(pid, None if given is None else dict(environ)))
        environ = {**environ, **(given or {})}
    return environ, Ancestors(environ, line)


RUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "1"}


@pytest.mark.parametrize(
    ("source", "sets"),
    [
        ("Open MPI", (RUN, OPEN_MPI)),  # `anyaccel run` has started mpirun
        ("Open MPI", (RUN, OPEN_MPI, {"HOME": "/"}, {})),  # with a shell between mpirun and this process
        ("torch.distributed", (OPEN_MPI, TORCHRUN)),  # mpirun has started torchrun
        ("torch.distributed", (RUN, OPEN_MPI, TORCHRUN)),
        ("Open MPI", (TORCHRUN, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0"})),
        ("Open MPI", (SLURM, OPEN_MPI)),
        ("Slurm", (OPEN_MPI, SLURM)),  # srun in a job of mpirun
        ("Slurm", ({**RUN, **SLURM},)),  # slurmstepd, which is not below `anyaccel run`, hands all of it on
        ("Open MPI", ({**RUN, **OPEN_MPI}, {})),  # Open MPI's daemon on another host
    ],
)
def test_the_launcher_that_started_this_process_counts(source: str, sets: tuple[dict[str, str], ...]) -> None:
    environ, ancestors = started_by(*sets)
    assert rank_from_environment(environ, ancestors=ancestors).source == source


def test_the_process_that_set_a_variable() -> None:
    _, ancestors = started_by({"HOME": "/"}, None, {"A": "1"}, {"A": "2", "B": "1"}, {})
    assert [ancestors.setter(name) for name in ("A", "B")] == [103, 103]
    assert ancestors.setter("HOME") == 101  # nobody can look further
    assert ancestors.generation(("A", "HOME")) == 1
    outside = Ancestors({"A": "1"}, [Ancestor(7, {"A": "1"})])
    assert (outside.setter("A"), outside.generation(("A",))) == (None, 1)


def test_the_processes_above_this_one() -> None:
    code = (
        "import os; from anyaccel.launch.plan.ancestors import read_ancestors as r; "
        "a = r(os.environ); print(a.generation(['NEAR']), a.generation(['FAR']), a.setter('NEAR') == os.getppid())"
    )
    # `true` keeps the shells from becoming what they start.
    far = ["sh", "-c", """FAR=1 sh -c 'NEAR=1 "$@"; true' sh "$@"; true""", "sh", sys.executable, "-c", code]
    done = subprocess.run(far, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0 1 True\n", "")


@pytest.mark.parametrize("own", ["4711", None])
def test_a_proc_that_is_not_of_this_namespace_tells_nothing(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def readlink(path: str) -> str:
        if own is None:
            raise FileNotFoundError(path)
        return own

    monkeypatch.setattr(os, "readlink", readlink)
    assert read_ancestors(os.environ) is None


def test_a_local_rank_without_its_size_is_looked_for_elsewhere() -> None:
    # A script with `export LOCAL_RANK=$SLURM_LOCALID`.
    assert rank_from_environment({**SLURM, "LOCAL_RANK": "1"}).source == "Slurm"


def test_ranks_that_are_not_said() -> None:
    found = rank_from_environment({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"})
    assert (found.rank, found.world_size) == (None, None)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, r"no local rank .* LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK.*SLURM_LOCALID; give --local_rank"),
        ({"LOCAL_RANK": ""}, "no local rank"),
        ({"LOCAL_RANK": "1"}, r"LOCAL_RANK=1 is set, but not how many .*LOCAL_WORLD_SIZE or LOCAL_SIZE"),
        ({"LOCAL_RANK": "one", "LOCAL_SIZE": "2"}, r"LOCAL_RANK='one' is not a number"),
        ({"LOCAL_RANK": "2", "LOCAL_SIZE": "2"}, r"LOCAL_RANK=2 is not below the number of local ranks, 2"),
        ({"LOCAL_RANK": "-1", "LOCAL_SIZE": "2"}, r"'-1' is not a number"),
        ({"SLURM_LOCALID": "0"}, r"SLURM_LOCALID=0 is set.*SLURM_TASKS_PER_NODE with SLURM_NODEID"),
        ({**SLURM, "SLURM_NODEID": "2"}, r"SLURM_STEP_TASKS_PER_NODE='4\(x2\)' does not say how many tasks node 2"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x"}, "does not say how many tasks node 1"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2000000000(x2)"}, "does not say how many tasks node 1"),
        ({**SLURM, "SLURM_NODEID": "2000000000"}, r"SLURM_NODEID='2000000000' is too large a number \(at most"),
        ({"LOCAL_RANK": "0", "LOCAL_SIZE": "1000000000"}, r"LOCAL_SIZE='1000000000' is too large .*at most 65536\)"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1" * 23}, r"LOCAL_WORLD_SIZE='1{23}' is too large a number"),
        ({**TORCHRUN, "RANK": "9" * 5000}, r"RANK='9{60}'\.\.\. \(5000 characters\) is too large a number; give"),
        (
            {"FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_SIZE": "3", "FLUX_JOB_NNODES": "2"},
            r"FLUX_TASK_LOCAL_ID=0 is set, but not how many",
        ),
    ],
)
def test_what_cannot_be_told(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rank_from_environment(environ)


def test_tasks_by_node() -> None:
    assert slurm_tasks("2(x3),1", 4) == (2, 2, 2, 1)
    assert slurm_tasks("4", 1) == (4,)
    assert slurm_tasks("2(x2000000000)", 3) == (2, 2, 2)
    assert rank_from_environment({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2000000000)"}).local_size == 4


@pytest.mark.parametrize("text", ["2(x3", "2(x)", "2)", "2(3)", "x3", "", "-1", "70000", "1(x2000000000000)", "2,,1"])
def test_what_is_no_number_of_tasks(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of tasks"):
        slurm_tasks(text, 4)


RUN_SETS = {**RUN, "CROSS_SIZE": "1"}
EXPORTED = {"RANK": "7", "WORLD_SIZE": "8"}  # by a script, which may count in its own way


@pytest.mark.parametrize(
    ("rank", "sets"),
    [
        (5, (RUN_SETS, OPEN_MPI)),  # `anyaccel run` has started mpirun
        (5, (RUN_SETS, OPEN_MPI, {"HOME": "/"})),
        (5, ({**RUN_SETS, **OPEN_MPI}, {})),  # a daemon on another host was sent what mpirun was started with
        (5, (EXPORTED, OPEN_MPI)),
        (None, (RUN_SETS,)),
        (None, (OPEN_MPI, RUN_SETS)),  # `anyaccel run --launcher openmpi`
        (None, (SLURM, OPEN_MPI, TORCHRUN)),
        (None, (OPEN_MPI, EXPORTED)),
        (None, ({**OPEN_MPI, **EXPORTED},)),  # srun sh -c 'export RANK=...; exec python ...'
        (None, (RUN_SETS, {**OPEN_MPI, **EXPORTED})),
        (None, ({"RANK": "0", "WORLD_SIZE": "1"}, {})),  # of a container: no launcher at all
    ],
)
def test_whether_a_launcher_below_has_set_another_rank(rank: int | None, sets: tuple[dict[str, str], ...]) -> None:
    environ, ancestors = started_by(*sets)
    found = launcher_below(environ, ancestors)
    assert (found and found.rank) == rank
    assert launcher_below(environ, None) is None


def test_a_rank_that_the_process_has_set_by_itself_counts() -> None:
    environ, ancestors = started_by(RUN_SETS, OPEN_MPI)
    own = {**environ, "RANK": "3"}
    line = [Ancestor(1, environ)]
    assert launcher_below(own, Ancestors(own, line, at_start=environ)) is None
    assert launcher_below(environ, ancestors) is not None


def test_a_launcher_below_that_does_not_say_the_place_is_an_error() -> None:
    environ, ancestors = started_by(RUN_SETS, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": ""})
    with pytest.raises(UsageError, match=r"RANK='0' was set by a launcher above Open MPI.*OMPI_COMM_WORLD_LOCAL_SIZE"):
        launcher_below(environ, ancestors)


@pytest.mark.parametrize(
    ("environ", "twice"),
    [({}, False), (TORCHRUN, False), (OPEN_MPI, False), (SLURM, False), ({**TORCHRUN, **OPEN_MPI}, True)],
)
def test_only_a_place_that_two_claim_needs_a_look_at_the_processes_above(environ: dict[str, str], twice: bool) -> None:
    assert is_claimed_twice(environ) is twice
