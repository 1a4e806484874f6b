# SPDX-License-Identifier: Apache-2.0
"""The alias of DeepSpeed's launcher: filters, hostfiles, options and command lines, as DeepSpeed has them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anyaccel.cli.run import build_parser
from anyaccel.compat.deepspeed.launcher import multinode_runner, runner
from anyaccel.errors import UsageError

ONE = {"w-0": [0, 1, 2, 3]}
TWO = {"w-0": [0, 1, 2, 3], "w-1": [0, 1, 2, 3]}
POOL = {"w-0": 4, "w-1": 4}
KINDS = ("OpenMPIRunner", "MPICHRunner", "IMPIRunner", "MVAPICHRunner", "SlurmRunner")


# filters and hostfiles


@pytest.mark.parametrize(
    ("hosts", "include", "exclude", "left"),
    [
        (ONE, "", "", ONE),
        (ONE, "w-0", "", ONE),
        (ONE, "w-0:1", "", {"w-0": [1]}),
        (ONE, "w-0:1,1", "", {"w-0": [1]}),
        (ONE, "w-0:1@w-0:0,1", "", {"w-0": [0, 1]}),
        (ONE, "", "w-0:1", {"w-0": [0, 2, 3]}),
        (ONE, "", "w-0:1,2", {"w-0": [0, 3]}),
        (ONE, "", "w-0", {}),
        (ONE, "", "w-0:0,1,2,3", {}),
        (TWO, "w-1:0,3", "", {"w-1": [0, 3]}),
        (TWO, "", "w-1", {"w-0": [0, 1, 2, 3]}),
        (TWO, "", "w-0:0,1@w-1:3", {"w-0": [2, 3], "w-1": [0, 1, 2]}),
        (TWO, "w-1:2@w-0: 1", "", {"w-0": [1], "w-1": [2]}),
        ({"w-0": [], "w-1": [5, 3]}, "w-0@w-1", "", {"w-1": [5, 3]}),
        ({"w-0": [], "w-1": [5, 3]}, "", "w-1:5", {"w-1": [3]}),
    ],
)
def test_filters(hosts: dict[str, list[int]], include: str, exclude: str, left: dict[str, list[int]]) -> None:
    found = runner.parse_resource_filter(hosts, include_str=include, exclude_str=exclude)
    assert found == left
    assert list(found) == [host for host in hosts if host in left]


@pytest.mark.parametrize(
    ("include", "exclude"),
    [
        ("w-0", "w-1"),
        ("jeff", ""),
        ("", "jeff"),
        ("jeff:0", ""),
        ("w-1:4", ""),
        ("", "w-1:4"),
        ("w-0:0,4", ""),
        ("w-0:-1", ""),
        ("w-0:", ""),
        ("w-0:x", ""),
        ("w-0:1:2", ""),
        ("w-0@", ""),
        ("", "w-1@w-0:1@5"),
    ],
)
def test_filters_that_are_refused(include: str, exclude: str) -> None:
    with pytest.raises(UsageError):
        runner.parse_resource_filter(TWO, include_str=include, exclude_str=exclude)
    with pytest.raises(ValueError, match=r"w-|jeff|contradict|'5'|''"):
        runner.parse_inclusion_exclusion(POOL, include, exclude)


def test_numbers_of_slots_are_filtered_as_the_slots_themselves() -> None:
    assert runner.parse_inclusion_exclusion(POOL, "", "") == TWO
    assert runner.parse_inclusion_exclusion(POOL, "w-0@w-1:0,2", "") == {"w-0": [0, 1, 2, 3], "w-1": [0, 2]}
    assert runner.parse_inclusion_exclusion(POOL, "", "w-0@w-1") == {}


@pytest.mark.parametrize(
    "text",
    [
        "w-1 slots=2\nw-2 slots=1\nw-1 slots=1\n",
        "this is bad slots=1\n",
        "missingslots\n",
        "\n",
        "w-1 slots=2\nthis is bad slots=1\nw-2 slots=4\nmissingslots\n",
    ],
)
def test_hostfiles_that_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text(text)
    with pytest.raises(ValueError, match="hostfile"):
        runner.fetch_hostfile(str(tmp_path / "hostfile"))


def test_hostfiles_may_have_comments_and_indentation(tmp_path: Path) -> None:
    lines = ["", "    w-1 slots=2", "    localhost slots=1", "    123.23.12.10 slots=2", "", "    #w-1 slots=3", "    "]
    (tmp_path / "hostfile").write_text("\n".join(lines))
    found = runner.fetch_hostfile(str(tmp_path / "hostfile"))
    assert found == {"w-1": 2, "localhost": 1, "123.23.12.10": 2}


# options


@pytest.mark.parametrize("numbers", ["--num_nodes 1", "--num_gpus 1", "--num_nodes 1 --num_gpus 1", "--num_gpus 0"])
@pytest.mark.parametrize("selection", ["-i localhost", "-e localhost"])
def test_numbers_beside_a_filter_are_refused(
    numbers: str, selection: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*numbers.split(), *selection.split(), "foo.py"]
    with pytest.raises(ValueError, match="cannot be given together"):
        runner.main(args=words)
    monkeypatch.setattr(sys, "argv", ["deepspeed", *words])
    with pytest.raises(SystemExit) as end:
        runner.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("deepspeed: error: --num_")


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        (["--launcher_arg", "-mca btl_tcp_if_include eth1"], ["--launcher_args=-mca btl_tcp_if_include eth1"]),
        (["--host", "h"], ["--hostfile=h"]),
        (["--ssh=22"], ["--ssh_port=22"]),
        (["--bind-core-l", "0-1"], ["--bind_core_list=0-1"]),
    ],
)
def test_options_may_be_abbreviated(given: list[str], whole: list[str]) -> None:
    arguments = runner.anyaccel_arguments(runner.parse_args([*given, "x.py", "--host", "the script's own"]))
    assert arguments == ["run", *whole, "--", "x.py", "--host", "the script's own"]
    build_parser().parse_args(arguments[1:])


def test_an_abbreviation_of_two_options_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.parse_args(["--no_s", "x.py"])
    assert "unrecognized arguments: --no_s" in capsys.readouterr().err
    assert runner.parse_args(["x.py", "--no_s", "--bind"]).user_args == ["--no_s", "--bind"]


def test_a_filter_that_leaves_no_host_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hostfile").write_text("w-0 slots=2\n")
    words = ["deepspeed", "--launcher", "pdsh", "-H", str(tmp_path / "hostfile"), "-e", "w-0", "x.py"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        runner.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("deepspeed: error: --exclude 'w-0' leaves no slot of any host")


# runners


class Own(multinode_runner.MultiNodeRunner):
    """A runner that somebody writes on the base class."""

    def backend_exists(self) -> bool:
        return True

    def get_cmd(self, environment: Any, active_resources: Any) -> list[str]:
        return []


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("64(x2)", '"64(x2)"'),
        ("/usr/local/lib/python3.9/site-packages", "/usr/local/lib/python3.9/site-packages"),
        (" a b ", '"a b"'),
        ('say "$HOME" `x` \\', '"say \\"\\$HOME\\" \\`x\\` \\\\"'),
    ],
)
def test_exports_are_quoted_for_a_shell(value: str, quoted: str) -> None:
    own = Own(argparse.Namespace(user_args=[], user_script="script.py"), "world")
    own.add_export("NAME ", value)
    assert own.exports == {"NAME": quoted}
    done = subprocess.run(
        ["sh", "-c", f'export NAME={quoted}; printf %s "$NAME"'], capture_output=True, text=True, check=True
    )
    assert done.stdout == value.strip()


def made(kind: str, *options: str) -> Any:
    args = runner.parse_args([*options, "train.py", "--text", "two words"])
    return getattr(multinode_runner, kind)(args, runner.encode_world_info(POOL), POOL)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_may_be_numbers_of_slots(kind: str) -> None:
    environment = {"PWD": "/the/folder"}
    command = made(kind).get_cmd(environment, POOL)
    assert command == made(kind).get_cmd({"PWD": "/the/folder"}, TWO)
    assert command[-5:] == [sys.executable, "-u", "train.py", "--text", "two words"]
    assert any("w-0" in word and "w-1" in word for word in command)
    assert "8" in command or "--ntasks=8" in command


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_start_in_the_folder_of_the_job_with_its_variables(kind: str) -> None:
    environment = {"PWD": "/the/folder"}
    own = made(kind)
    own.add_export("MINE", "64(x2)")
    command = own.get_cmd(environment, POOL)
    assert command[command.index("/the/folder") - 1] in ("-wdir", "--wdir", "--chdir")
    assert "/" not in command
    assert environment["MINE"] == "64(x2)"  # what launchers take by its name
    chosen = {"SlurmRunner": "--chdir=/other", "OpenMPIRunner": "--wdir /other"}.get(kind, "-wdir /other")
    assert "/the/folder" not in made(kind, f"--launcher_args={chosen}").get_cmd({"PWD": "/the/folder"}, POOL)


@pytest.mark.parametrize("kind", KINDS)
def test_binding_is_not_forgotten(kind: str) -> None:
    command = made(kind, "--bind_cores_to_rank", "--bind_core_list", "0-7").get_cmd({"PWD": "/"}, POOL)
    binder = [sys.executable, "-m", "anyaccel", "bind", "--bind_core_list=0-7", "--"]
    assert command[-len(binder) - 5 : -5] == binder


@pytest.mark.parametrize("kind", KINDS)
def test_slots_that_a_launcher_cannot_choose_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="specific device ids"):
        made(kind).get_cmd({}, {"w-0": [0, 2], "w-1": [0, 1]})
    uneven = {"w-0": [0], "w-1": [0, 1]}
    own = getattr(multinode_runner, kind)
    if kind == "SlurmRunner":
        with pytest.raises(ValueError, match="same slot count"):
            own.validate_active_resources(uneven)
        with pytest.raises(ValueError, match="specific device ids"):
            own.validate_active_resources({"w-0": [1]})
    else:
        own.validate_active_resources({"w-0": [0, 2], "w-1": [1]})
        assert made(kind).get_cmd({}, uneven)


@pytest.mark.parametrize("kind", ["OpenMPIRunner", "MPICHRunner"])
def test_the_command_line_starts_the_script(kind: str, tmp_path: Path) -> None:
    # A file a rank: launchers may mix the lines of their ranks' output.
    (tmp_path / "show.py").write_text(
        "import os, sys\n"
        "with open('seen-' + os.environ['LOCAL_RANK'], 'x') as file:\n"
        "    print(os.getcwd(), sys.argv[1], os.environ['MINE'], file=file)\n"
    )
    args = runner.parse_args(["--bind_cores_to_rank", "show.py", "a b"])
    own = getattr(multinode_runner, kind)(args, "", {"localhost": 2})
    if not own.backend_exists():
        pytest.skip(f"{own.name} is not installed")
    own.add_export("MINE", "64(x2) $HOME")
    environment = dict(os.environ) | {"PWD": str(tmp_path)}
    command = own.get_cmd(environment, {"localhost": 2})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    seen = {path.name: path.read_text() for path in tmp_path.glob("seen-*")}
    assert seen == {f"seen-{rank}": f"{tmp_path} a b 64(x2) $HOME\n" for rank in range(2)}


def test_a_runner_of_ones_own_needs_nothing_but_the_script() -> None:
    own = Own(SimpleNamespace(user_args=["--x"], user_script="script.py"), "world")  # type: ignore[arg-type]
    assert (own.user_arguments, own.user_script, own.name) == (["--x"], "script.py", "Own")


def test_slots_of_a_list_are_sorted_as_numbers() -> None:
    assert runner.parse_node_config_list("w-0:16,8,1@w-0:9") == {"w-0": [1, 8, 9, 16]}


@pytest.mark.parametrize(("launcher", "unused"), [("ssh", False), ("slurm", False), ("pdsh", True), ("openmpi", True)])
def test_without_a_hostfile_most_launchers_are_left_aside(launcher: str, unused: bool, tmp_path: Path) -> None:
    arguments = ["--launcher", launcher, "--hostfile", str(tmp_path / "none"), "script.py"]
    assert runner._needs_no_launcher(runner.parse_args(arguments)) is unused
    assert not runner._needs_no_launcher(runner.parse_args(["--force_multi", *arguments]))
