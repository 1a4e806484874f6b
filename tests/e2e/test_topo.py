# SPDX-License-Identifier: Apache-2.0
"""`anyaccel topo` as a user runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import anyaccel
from anyaccel.topology import read_machine
from anyaccel.topology.details import read_details
from sysfs_trees import MACHINES, build

pytestmark = pytest.mark.many_files

KEPT = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES")
DOCS = Path(__file__).parents[2] / "docs" / "topology.md"


def topo(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in KEPT}
    path = [str(Path(anyaccel.__file__).parents[1]), env.get("PYTHONPATH", "")]
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUTF8": "1", **environment}
    command = [sys.executable, "-m", "anyaccel", "topo", *map(str, arguments)]
    return subprocess.run(command, env=env, text=True, encoding="utf-8", capture_output=True, timeout=100)


def test_this_machine() -> None:
    done = topo()
    assert (done.returncode, done.stderr) == (0, "")
    assert "".join(read_machine().summary().split()) in "".join(done.stdout.split())


def test_json_of_this_machine() -> None:
    done = topo("--json")
    found = json.loads(done.stdout)
    assert [cpu["id"] for cpu in found["cpus"]] == [cpu.id for cpu in read_machine().cpus]
    assert found["plan"] is None


def test_a_recorded_machine_with_a_plan_in_all_three_forms(tmp_path: Path) -> None:
    build(MACHINES["xeon max, flat"], tmp_path / "tree")
    picture = tmp_path / "machine.svg"
    plan = ("--sysfs-root", tmp_path / "tree", "--num_accelerators", "4", "--bind_cores_to_rank")
    done = topo(*plan, "--svg", picture)
    assert (done.returncode, done.stderr) == (0, "")
    assert "00001111" in done.stdout
    assert "rank 3: CPUs 12-15, memory of node 3 first\n" in done.stdout
    assert "left-over cores: none\n" in done.stdout
    assert "rank 2: CPUs 8-11, memory of node 3 first" in "".join(ET.parse(picture).getroot().itertext())

    found = json.loads(topo(*plan, "--json").stdout)["plan"]
    assert [rank["cores"] for rank in found["ranks"]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert found["ranks"][0]["memory"] == {"policy": "preferred", "nodes": [2]}
    assert found["ranks"][0]["env"]["OMP_NUM_THREADS"] == "4"
    assert "MASTER_PORT" not in found["ranks"][0]["env"]

    printed = topo(*plan, "--svg", "-", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert printed.stderr == ""
    assert ET.fromstring(printed.stdout).get("width") == ET.parse(picture).getroot().get("width")


def test_ranks_are_drawn_beside_their_gpus(tmp_path: Path) -> None:
    devices = tuple(replace_node(row, 3 - row[2] if row[2] >= 0 else -1) for row in MACHINES["eight gpus"].devices)
    build(replace(MACHINES["eight gpus"], devices=devices), tmp_path)
    (tmp_path / "dev").mkdir()
    for number in range(8):
        (tmp_path / f"dev/nvidia{number}").touch()
    found = json.loads(topo("--sysfs-root", tmp_path, "--bind_cores_to_rank", "--json").stdout)
    node_of = {cpu["id"]: cpu["node"] for cpu in found["cpus"]}
    gpus = [device["node"] for device in found["devices"] if not device["console"]]
    assert [{node_of[cpu] for cpu in rank["cores"]} for rank in found["plan"]["ranks"]] == [{node} for node in gpus]
    assert gpus == [3, 3, 2, 2, 1, 1, 0, 0]


def replace_node(row: tuple[str, tuple[str, str, str], int], node: int) -> tuple[str, tuple[str, str, str], int]:
    return (row[0], row[1], node)


def test_binding_options_change_the_plan(tmp_path: Path) -> None:
    build(MACHINES["two sockets"], tmp_path)
    base = ("--sysfs-root", tmp_path, "--num_accelerators", "2", "--bind_cores_to_rank")
    text = topo(*base, "--cores-reserved", "2", "--smt", "--mem-policy", "interleave").stdout
    assert "000000··" in text
    assert "rank 1: CPUs 8-13,24-29, memory of nodes 0-1 in turn\n" in text
    assert "reserved cores: 6-7,14-15\n" in text
    listed = topo("--sysfs-root", tmp_path, "--num_accelerators", "2", "--bind_core_list", "15,14,3,2").stdout
    assert "rank 0: CPUs 15,14, memory of node 1\nrank 1: CPUs 3,2, memory of node 0\n" in listed


def test_a_plan_that_binds_nobody(tmp_path: Path) -> None:
    build(MACHINES["two sockets"], tmp_path)
    text = topo("--sysfs-root", tmp_path, "--num_accelerators", "2", OMP_NUM_THREADS="3").stdout
    assert "rank 1: any core\nworkers are not bound; add --bind_cores_to_rank" in text
    assert "note: OMP_NUM_THREADS=3 is kept as it was set\n" in text


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    build(MACHINES["one socket"], tmp_path / "tree")
    tree = tmp_path / "tree"
    (tmp_path / "empty").mkdir()
    cases = [
        (("--svg", tmp_path / "none/x.svg"), 1, r"--svg '.*' cannot be written: No such file or directory; give a"),
        (("--svg", tmp_path), 1, r"--svg '.*' cannot be written: Is a directory; give a file"),
        (("--sysfs-root", tmp_path / "none"), 2, r"--sysfs-root '.*/none' is not a folder; give one that has sys/"),
        (("--sysfs-root", tree / "proc/meminfo"), 2, r"--sysfs-root '.*' is not a folder"),
        (("--sysfs-root", tmp_path / "empty"), 2, r"no recorded machine: there are no CPUs in .*; give the folder"),
        (("--sysfs-root", tmp_path), 2, r"did you mean .*/tree\?"),
        (("--json", "--svg", "-"), 2, r"--json and --svg - would both be printed; give --svg a file"),
        (("--sysfs-root", tree, "--num_accelerators", "9", "--bind_cores_to_rank"), 2, "9 workers cannot each have"),
        (("--sysfs-root", tree, "--bind_core_list", "0-9"), 2, "CPU 4-9, which this machine does not have"),
        (("--bind_core_list", "a"), 2, "--bind_core_list 'a'"),
        (("--smt",), 2, "--smt is about workers that are bound"),
        (("--sysfsroot", "x"), 2, "unrecognized arguments: --sysfsroot x .did you mean --sysfs-root"),
    ]
    for arguments, code, message in cases:
        done = topo(*arguments)
        assert (done.returncode, done.stdout) == (code, ""), arguments
        assert re.fullmatch(rf"anyaccel: error: .*{message}.*\n", done.stderr), done.stderr


def test_the_reader_goes_away(tmp_path: Path) -> None:
    build(MACHINES["eight sockets"], tmp_path)
    code = f"{sys.executable} -m anyaccel topo --json --sysfs-root {tmp_path} | head -1"
    path = str(Path(anyaccel.__file__).parents[1])
    done = subprocess.run(
        ["sh", "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    build(MACHINES["hybrid"], tmp_path)
    done = topo("--sysfs-root", tmp_path, PYTHONUTF8="0", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "oooooooo oooo oooo" in done.stdout


@pytest.mark.parametrize("name", ["xeon-max-flat", "hybrid"])
def test_examples_of_the_documentation_are_what_is_printed(name: str, tmp_path: Path) -> None:
    example = re.search(rf"```console\n\$ anyaccel topo --sysfs-root {name}(.*)\n([^`]*)```", DOCS.read_text())
    assert example is not None
    machine = {"xeon-max-flat": "xeon max, flat"}.get(name, name)
    build(MACHINES[machine], tmp_path)
    picture = tmp_path / "topology.svg"
    arguments = example[1].replace("xeon-max.svg", str(picture)).split()
    assert topo("--sysfs-root", tmp_path, *arguments).stdout == example[2]
    if "--svg" in arguments:
        assert picture.read_text() == (DOCS.parent / "topology.svg").read_text()


def test_the_schema_of_the_documentation_names_every_key(tmp_path: Path) -> None:
    build(replace(MACHINES["eight gpus"], offline=(3,)), tmp_path)
    found = json.loads(topo("--sysfs-root", tmp_path, "--json", "--bind_cores_to_rank").stdout)
    names = set(found) | {
        f"{part}[].{key}" for part in ("cpus", "nodes", "caches", "devices") for key in found[part][0]
    }
    names |= {f"plan.{key}" for key in found["plan"]} | {f"plan.ranks[].{key}" for key in found["plan"]["ranks"][0]}
    documented = set(re.findall(r"^\| `([^`]+)`", DOCS.read_text(), re.MULTILINE))
    assert names - {"cpus", "nodes", "caches", "devices", "plan"} - documented == set()


def test_the_recipe_of_the_documentation_records_this_machine(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    recipe = re.search(r"```sh\n(mkdir .*?)```", DOCS.read_text(), re.DOTALL)
    assert recipe is not None
    done = subprocess.run(["bash", "-c", recipe[1]], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    shutil.rmtree(tmp_path / "machine")
    subprocess.run(["tar", "xf", "machine.tar.gz"], cwd=tmp_path, check=True, timeout=60)
    here, there = read_machine(), read_machine(tmp_path / "machine")
    assert there == here
    assert read_details(there, tmp_path / "machine") == read_details(here)
