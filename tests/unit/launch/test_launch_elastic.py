# SPDX-License-Identifier: Apache-2.0
"""The command of torch.distributed.run; tests/e2e/test_elastic.py runs it."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.cli import bind
from anyaccel.cli._binding import binding_options
from anyaccel.errors import UsageError
from anyaccel.launch.local.elastic import build_command, launcher_environment
from anyaccel.launch.plan.options import BindingOptions

SCRIPT = ["python", "-u", "train.py"]


def command(arguments=(), **options):
    return build_command(SCRIPT, arguments, **{"python": "python", "slots": 2, **options})


def test_one_host_meets_on_the_loopback():
    assert command(["--steps", "10"], max_restarts=3, binding=["--smt"]) == [
        *("python", "-m", "torch.distributed.run", "--nnodes", "1:1", "--nproc-per-node", "2", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "anyaccel"),
        *("--rdzv-conf", "is_host=1", "--local-addr", "127.0.0.1", "--no-python"),
        *("env", "-u", "OMP_NUM_THREADS", "python", "-m", "anyaccel", "bind", "--smt", "--"),
        *("python", "-m", "anyaccel.launch.local.rounds"),
        *("python", "-u", "train.py", "--local_rank=${local_rank}", "--steps", "10"),
    ]


def test_several_hosts_meet_at_the_first():
    options = {"nodes": (1, 4), "endpoint": ("10.0.0.1", 29400), "job_id": "j7", "local_rank_argument": False}
    one = command(address="10.0.0.1", **options)
    two = command(address="10.0.0.2", first=False, **options)
    start = one.index("--nnodes")
    assert one[start : one.index("--no-python")] == [
        *("--nnodes", "1:4", "--nproc-per-node", "2", "--max-restarts", "0", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "10.0.0.1:29400", "--rdzv-id", "j7", "--rdzv-conf", "is_host=1"),
        *("--local-addr", "10.0.0.1"),
    ]
    assert [(a, b) for a, b in zip(one, two, strict=True) if a != b] == [
        ("is_host=1", "is_host=0"),
        ("10.0.0.1", "10.0.0.2"),
    ]
    assert "--local-addr" not in command(**options)
    assert "[fd00::1]:29400" in command(**{**options, "endpoint": ("fd00::1", 29400)})


def test_threads_of_a_worker():
    def words(**options):
        built = command(local_rank_argument=False, **options)
        return built[built.index("--no-python") + 1 :]

    assert words(threads=7) == ["env", "OMP_NUM_THREADS=7", *SCRIPT]
    assert words() == ["env", "-u", "OMP_NUM_THREADS", *SCRIPT]
    assert words(users_threads=True) == SCRIPT


@given(st.lists(st.text(st.characters(exclude_characters="\0"))))
def test_torch_gives_every_argument_as_it_was(arguments):
    built = command(arguments)
    # What torch does with each word.
    words = [string.Template(word).safe_substitute(local_rank="1") for word in built[built.index("--no-python") + 1 :]]
    assert words == ["env", "-u", "OMP_NUM_THREADS", *SCRIPT, "--local_rank=1", *arguments]


def test_several_hosts_need_a_place_to_meet():
    with pytest.raises(UsageError, match="--elastic 1:2 needs to know the hosts; add --hostfile FILE"):
        command(nodes=(1, 2))


@pytest.mark.parametrize(
    "options",
    [
        BindingOptions(bind_cores=True),
        BindingOptions(core_list=(3, 1, 2, 9)),
        BindingOptions(bind_cores=True, smt=True, memory_policy="interleave", cores_reserved=2, malloc="jemalloc"),
        BindingOptions(bind_cores=True, strict=True, memory_policy="none"),
    ],
)
def test_the_binder_below_torch_reads_the_options_that_were_given(options):
    read = bind.build_parser().parse_args([*options.arguments(), "--", "true"])
    assert BindingOptions(**{**binding_options(read), "bind_cores": True}) == options


def test_variables_of_torchs_launcher():
    always = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert launcher_environment({}, 3.0) == {**always, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3", "OMP_NUM_THREADS": "1"}
    assert launcher_environment({"OMP_NUM_THREADS": "4"}, 0.0) == {**always, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
