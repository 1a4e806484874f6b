# SPDX-License-Identifier: Apache-2.0
"""The binder below other launchers: the same plan in every process, and hands off what a launcher has bound."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest

from anyaccel import _native
from anyaccel.errors import UsageError
from anyaccel.launch.local import apply
from anyaccel.launch.local.binder import BinderPlan, given_by_hand, plan_rank
from anyaccel.launch.plan.ancestors import Ancestor, Ancestors
from anyaccel.launch.plan.local_rank import RankFromEnvironment
from anyaccel.launch.plan.options import BindingOptions
from anyaccel.launch.plan.plan import RankBinding
from anyaccel.topology import Cpu, Machine, NumaNode

CPUS = tuple(Cpu(cpu, siblings=(cpu % 4, cpu % 4 + 4)) for cpu in range(8))


def machine(allowed: tuple[int, ...] = tuple(range(8))) -> Machine:
    """Four cores of two threads."""
    return Machine(CPUS, (NumaNode(0, tuple(range(8)), 1 << 30),), allowed, (0,))


def planned(
    source: str,
    *,
    allowed: tuple[int, ...] = tuple(range(8)),
    rank: int = 1,
    launcher: set[int] | None = None,
    environ: dict[str, str] | None = None,
    **options: object,
) -> BinderPlan:
    found = RankFromEnvironment(4 + rank, 8, rank, 2, source)
    cpus = None if launcher is None else frozenset(launcher)
    environ = {"DS_ACCELERATOR": "cpu", **(environ or {})}
    return plan_rank(BindingOptions(bind_cores=True, **options), machine(allowed), found, environ, cpus)


def test_every_process_makes_the_same_plan() -> None:
    one, other = planned("Slurm", rank=0), planned("Slurm", rank=1)
    assert one.ranks == other.ranks
    assert [(binding.rank, binding.cores) for binding in one.ranks] == [(4, (0, 1)), (5, (2, 3))]
    env = dict(one.ranks[1].env)
    assert env.pop("OMP_PLACES") == "{2},{3}"
    assert env == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "2",
        "OMP_PROC_BIND": "false",
    }


def test_what_the_launcher_says_is_kept() -> None:
    env = planned("torch.distributed", environ={"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}).ranks[1].env
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(env)
    assert env["LOCAL_SIZE"] == "2"


def test_by_hand_there_is_no_rank_among_all() -> None:
    options = BindingOptions(bind_cores=True)
    plan = plan_rank(options, machine(), given_by_hand(1, 2), {"DS_ACCELERATOR": "cpu"})
    assert (plan.ranks[1].rank, plan.ranks[1].cores) == (1, (2, 3))
    assert "RANK" not in plan.ranks[1].env


@pytest.mark.parametrize(
    ("source", "allowed", "launcher", "environ"),
    [
        ("Open MPI", (1, 5), None, {}),  # fewer cores than ranks
        ("Open MPI", (0, 1, 4, 5), set(range(8)), {}),  # a part of what mpirun has
        ("MPICH or Intel MPI", (0, 1), set(range(8)), {}),
        ("Slurm", (0, 1, 4, 5), None, {"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0x33,0xCC"}),
    ],
)
def test_what_the_launcher_has_bound_stays(
    source: str, allowed: tuple[int, ...], launcher: set[int] | None, environ: dict[str, str]
) -> None:
    plan = planned(source, allowed=allowed, launcher=launcher, environ=environ)
    assert plan.ranks[1].cores == allowed
    cores = len({cpu % 4 for cpu in allowed})
    assert plan.ranks[1].env["OMP_NUM_THREADS"] == str(cores)
    assert len(plan.warnings) == 1
    assert plan.warnings[0].startswith(f"{source} has bound this process to CPU ")
    assert "which is kept; to have anyaccel divide the machine among its 2 ranks: " in plan.warnings[0]
    with pytest.raises(UsageError, match="because of --strict"):
        planned(source, allowed=allowed, launcher=launcher, environ=environ, strict=True)


@pytest.mark.parametrize(
    ("source", "allowed", "launcher", "environ"),
    [
        ("Open MPI", (0, 1), {0, 1}, {}),  # taskset before mpirun
        ("Slurm", (0, 1), set(range(8)), {}),  # the cgroup of the step
        ("Slurm", (0, 1), None, {"SLURM_CPU_BIND_TYPE": "none", "SLURM_CPU_BIND_LIST": ""}),
        ("torch.distributed", (0, 1), set(range(8)), {}),  # taskset before torchrun
    ],
)
def test_what_all_ranks_are_confined_to_is_divided(
    source: str, allowed: tuple[int, ...], launcher: set[int] | None, environ: dict[str, str]
) -> None:
    plan = planned(source, allowed=allowed, launcher=launcher, environ=environ)
    assert [binding.cores for binding in plan.ranks] == [(0,), (1,)]
    assert plan.warnings == ()


def test_too_few_cores_below_torchrun() -> None:
    with pytest.raises(UsageError, match=r"2 workers cannot each have a core of their own: .* only 1 core"):
        planned("torch.distributed", allowed=(1, 5))


def test_the_thread_count_of_torchrun_is_not_the_users() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    plan = planned("torch.distributed", environ=torchrun)
    assert plan.ranks[1].env["OMP_NUM_THREADS"] == "2"
    assert plan.announcements == ("OMP_NUM_THREADS=1, which torchrun sets by itself, becomes 2, the cores of the rank",)
    kept = planned("torch.distributed", environ={**torchrun, "OMP_NUM_THREADS": "2"})
    assert kept.announcements == ()


def below_run(*sets: dict[str, str]) -> Ancestors:
    """What `anyaccel run` has set, and then each process below it."""
    environ: dict[str, str] = {"DS_ACCELERATOR": "cpu"}
    line: list[Ancestor] = []
    for given in (RUN, *sets):
        line.insert(0, Ancestor(1, dict(environ)))
        environ |= given
    return Ancestors(environ, line)


RUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "LOCAL_SIZE": "1",
    "CROSS_SIZE": "1",
    "OMP_NUM_THREADS": "4",
    "OMP_PLACES": "{0},{1},{2},{3}",
    "OMP_PROC_BIND": "false",
}


def test_what_run_has_told_mpirun_is_not_for_its_ranks() -> None:
    """Their place among the ranks of mpirun is theirs, and so are their cores; nothing of it is the user's wish."""
    mpirun = {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    found = RankFromEnvironment(1, 2, 1, 2, "Open MPI", "OMPI_COMM_WORLD_LOCAL_RANK")
    plan = plan_rank(
        BindingOptions(bind_cores=True, strict=True),
        machine(),
        found,
        {"DS_ACCELERATOR": "cpu", **RUN, **mpirun},
        frozenset(range(8)),
        below_run(mpirun),
    )
    assert dict(plan.ranks[1].env) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "OMP_NUM_THREADS": "2",
        "OMP_PLACES": "{2},{3}",
        "OMP_PROC_BIND": "false",
    }
    assert plan.warnings == plan.notes == ()
    assert plan.announcements == (
        "OMP_NUM_THREADS=4, which anyaccel run sets by itself, becomes 2, the cores of the rank",
    )


def test_what_was_set_below_run_is_the_users() -> None:
    own = {"OMP_NUM_THREADS": "1", "RANK": "7"}
    mpirun = {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    found = RankFromEnvironment(1, 2, 1, 2, "Open MPI", "OMPI_COMM_WORLD_LOCAL_RANK")
    environ = {"DS_ACCELERATOR": "cpu", **RUN, **mpirun, **own}
    plan = plan_rank(BindingOptions(bind_cores=True), machine(), found, environ, None, below_run(mpirun, own))
    assert plan.ranks[1].env["OMP_NUM_THREADS"] == "1"
    assert "RANK" not in plan.ranks[1].env
    assert "OMP_NUM_THREADS=1 is kept as it was set" in plan.notes


def test_what_run_has_bound_stays_without_a_word() -> None:
    run = {**RUN, "LOCAL_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "2"}
    found = RankFromEnvironment(0, 2, 0, 2, "torch.distributed", "LOCAL_RANK")
    environ = {"DS_ACCELERATOR": "cpu", **run}
    ancestors = Ancestors(environ, [Ancestor(1, {"DS_ACCELERATOR": "cpu"})])
    options = BindingOptions(bind_cores=True, strict=True)
    plan = plan_rank(options, machine((0,)), found, environ, frozenset(range(8)), ancestors)
    assert plan.ranks[0].cores == (0,)
    assert plan.ranks[0].env["OMP_PLACES"] == "{0}"
    assert (plan.warnings, plan.notes) == ((), ())
    # Without a binding of its own, what all are confined to is divided.
    plan = plan_rank(options, machine((0, 1)), found, environ, frozenset((0, 1)), ancestors)
    assert [binding.cores for binding in plan.ranks] == [(0,), (1,)]


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "RAY_JOB_ID"])
def test_one_thread_that_the_user_wants_stays(variable: str) -> None:
    """Only what has come with the ranks is the launcher's."""
    launcher = {variable: "none", "LOCAL_RANK": "0"}
    found = RankFromEnvironment(0, 1, 0, 1, "torch.distributed", "LOCAL_RANK")
    for users, threads in (({"OMP_NUM_THREADS": "1"}, "1"), ({}, "4")):
        environ = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **launcher}
        ancestors = Ancestors(environ, [Ancestor(1, users)])
        plan = plan_rank(BindingOptions(bind_cores=True), machine(), found, environ, None, ancestors)
        assert plan.ranks[0].env["OMP_NUM_THREADS"] == threads
        assert bool(plan.announcements) == (threads == "4")


def test_a_place_by_hand_wins_over_what_is_inherited() -> None:
    environ = {"DS_ACCELERATOR": "cpu", **RUN}
    plan = plan_rank(BindingOptions(bind_cores=True), machine(), given_by_hand(1, 2), environ)
    assert {name: plan.ranks[1].env[name] for name in ("LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE")} == {
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }


@pytest.mark.parametrize("allowed", [(0, 4), (0, 1, 4, 5)])
def test_more_ranks_than_a_launcher_has_cores(allowed: tuple[int, ...]) -> None:
    """Also where it has bound them, each to a part of the cores that others have too."""
    found = RankFromEnvironment(0, 3, 0, 3, "MPICH or Intel MPI", "MPI_LOCALRANKID")
    environ = {"DS_ACCELERATOR": "cpu"}
    with pytest.raises(UsageError, match=r"^3 (workers|ranks) cannot each have a core of their own: .* only 2 cores"):
        plan_rank(BindingOptions(bind_cores=True), machine(allowed), found, environ, frozenset((0, 1, 4, 5)))


def test_the_cpus_of_the_launcher() -> None:
    """The launcher is the first process above that does not have the variable."""
    code = (
        "import os; from anyaccel.launch.plan.ancestors import read_ancestors; "
        "from anyaccel.launch.local.binder import cpus_of_launcher as c; "
        "a = read_ancestors(os.environ); print(sorted(c(a, 'MARK') or []), c(a, '') is None)"
    )
    last = max(os.sched_getaffinity(0))
    command = ["env", "MARK=1", "sh", "-c", f'taskset -c {last} {sys.executable} -c "{code}"; true']
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{sorted(os.sched_getaffinity(0))} True\n", "")


# system calls


def refuse(error: int, calls: list[tuple[object, ...]], *arguments: object) -> None:
    calls.append(arguments)
    raise OSError(error, os.strerror(error))


def test_cores_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(os, "sched_setaffinity", partial(refuse, 1, calls))
    monkeypatch.setattr(_native, "set_mempolicy", partial(refuse, 1, calls))
    problems = apply.bind_this_process(RankBinding(3, 3, (1, 2), "bind", (0,), {}))
    assert problems == ["rank 3 is not bound to cores 1-2: Operation not permitted; it runs unbound"]
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("policy", "text"),
    [("bind", "bound to"), ("preferred", "taken first from"), ("interleave", "interleaved over")],
)
def test_memory_that_is_refused(policy: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "set_mempolicy", partial(refuse, 38, []))
    problems = apply.bind_this_process(RankBinding(0, 0, (), policy, (2,), {}))
    assert problems == [
        f"memory of rank 0 is not {text} node 2: Function not implemented (usual in containers); "
        "its cores are not bound"
    ]


def test_several_preferred_nodes_on_an_old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, tuple[int, ...]]] = []

    def old(mode: int, nodes: tuple[int, ...]) -> None:
        calls.append((mode, nodes))
        if mode == 5:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(_native, "set_mempolicy", old)
    assert apply.bind_this_process(RankBinding(0, 0, (), "preferred", (2, 3), {})) == []
    assert calls == [(5, (2, 3)), (1, (2,))]
    assert apply.bind_this_process(RankBinding(0, 0, (), "preferred", (2,), {})) == []
    assert calls[2:] == [(1, (2,))]


def test_strict_workers_end() -> None:
    code = """
import os
from anyaccel.launch.local import apply
from anyaccel.launch.plan.ancestors import Ancestor, Ancestors
from anyaccel.launch.plan.plan import RankBinding
def refuse(*_): raise PermissionError(1, "Operation not permitted")
os.sched_setaffinity = refuse
apply.bind_worker(RankBinding(3, 3, (0,), "default", (), {}, strict=True), print)
"""
    done = subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == apply.EXIT_NOT_BOUND == 71
    assert done.stdout == "error: rank 3 is not bound to cores 0: Operation not permitted; it runs unbound\n"
