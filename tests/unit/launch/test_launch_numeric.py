# SPDX-License-Identifier: Apache-2.0
"""What numeric libraries and the allocator are told, and what happens to what the user set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.errors import UsageError
from anyaccel.launch.plan.allocators import find_allocator, preload
from anyaccel.launch.plan.numeric import openmp_binding

TWO = [(0, 1), (4, 5)]


def test_places_without_pinning() -> None:
    variables, notes, warnings = openmp_binding(TWO, {})
    assert variables == [
        {"OMP_PLACES": "{0},{1}", "OMP_PROC_BIND": "false"},
        {"OMP_PLACES": "{4},{5}", "OMP_PROC_BIND": "false"},
    ]
    assert (notes, warnings) == ([], [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OMP_PROC_BIND", "close"),
        ("OMP_PROC_BIND", "false"),
        ("OMP_PLACES", "cores"),
        ("OMP_PLACES", "threads(4)"),
        ("OMP_PLACES", "{0:x}"),  # the library will say
        ("KMP_AFFINITY", "granularity=fine,compact,1,0"),
        ("KMP_AFFINITY", "respect,scatter"),
        ("GOMP_CPU_AFFINITY", "0-99999999999"),
        ("GOMP_CPU_AFFINITY", "what"),
    ],
)
def test_what_can_be_kept(name: str, text: str) -> None:
    variables, notes, warnings = openmp_binding(TWO, {name: text})
    assert variables == [{}, {}]
    assert notes == [f"{name}={text} is kept as it was set"]
    assert warnings == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("GOMP_CPU_AFFINITY", "0-5", ["0-1", "4-5"]),
        ("GOMP_CPU_AFFINITY", "0 1", [None, "4-5"]),
        ("GOMP_CPU_AFFINITY", "0-6:2", ["0-1", "4-5"]),
        ("OMP_PLACES", "{0:6}", ["{0},{1}", "{4},{5}"]),
        ("OMP_PLACES", "{0},{1}", [None, "{4},{5}"]),
        ("OMP_PLACES", "{0}:2", [None, "{4},{5}"]),
        ("OMP_PLACES", "{0}:2:4", ["{0},{1}", "{4},{5}"]),
        ("OMP_PLACES", "4,5", ["{0},{1}", None]),
        ("KMP_AFFINITY", "norespect,compact", ["respect,compact"] * 2),
        (
            "KMP_AFFINITY",
            "granularity=fine,explicit,proclist=[0,{1,2}]",
            ["granularity=fine,explicit,proclist=[0-1]", "granularity=fine,explicit,proclist=[4-5]"],
        ),
    ],
)
def test_what_is_about_other_cpus_is_replaced(name: str, text: str, expected: list[str | None]) -> None:
    variables, _, warnings = openmp_binding(TWO, {name: text})
    assert [env.get(name) for env in variables] == expected
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{name}={text} is about CPUs that are not those of each worker; it becomes")


def test_what_it_becomes_is_said() -> None:
    (_, _, warnings) = openmp_binding(TWO, {"GOMP_CPU_AFFINITY": "0"})
    text = "GOMP_CPU_AFFINITY=0 is about CPUs that are not those of each worker; it becomes"
    assert warnings == [f"{text} 4-5 for worker 1"]
    (_, _, warnings) = openmp_binding(TWO, {"GOMP_CPU_AFFINITY": "9"})
    assert warnings == [f"{text.replace('=0', '=9')} 0-1 for worker 0 and so on"]


@given(st.sampled_from(["OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"]), st.text("0123:,-{}[]! abcx=", max_size=20))
def test_any_text_is_either_kept_or_replaced(name: str, text: str) -> None:
    variables, notes, warnings = openmp_binding(TWO, {name: text})
    if text.strip():
        assert len(notes) + len(warnings) == 1
        assert any(name in env for env in variables) == bool(warnings)


CODE = """
import json, os, subprocess, sys, threading, torch
torch.set_num_threads(2)
torch.ones(600, 600) @ torch.ones(600, 600)
seen = []
thread = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))
thread.start(); thread.join()
child = subprocess.check_output([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"], text=True)
print(json.dumps([sorted(os.sched_getaffinity(0)), seen[0], json.loads(child)]))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two allowed CPUs")
@pytest.mark.slow  # imports torch twice in new processes
def test_the_real_libgomp_leaves_threads_and_children_on_all_cores() -> None:
    """With OMP_PLACES alone it pins the main thread, and all that it starts, to one core."""
    both = sorted(os.sched_getaffinity(0))[:2]
    ours = openmp_binding([both], {})[0][0]

    def masks(**variables: str) -> list[list[int]]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))
        }
        command = ["taskset", "-c", f"{both[0]},{both[1]}", sys.executable, "-c", CODE]
        text = subprocess.check_output(command, env={**inherited, **variables}, text=True, timeout=100)
        return eval(text)

    assert masks(**ours) == [both] * 3
    pinned = {name: value for name, value in ours.items() if name != "OMP_PROC_BIND"}
    assert masks(**pinned) == [both[:1]] * 3


# allocators


def library(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(Path(sys.executable).resolve().read_bytes()[:64])
    return str(path)


def test_where_allocators_are_looked_for(tmp_path: Path) -> None:
    def find(name: str = "jemalloc", **environ: str) -> str:
        return find_allocator(name, environ, str(tmp_path), str(tmp_path / "venv"))

    with pytest.raises(UsageError, match=r"--malloc jemalloc: no libjemalloc.so.2 .* apt install libjemalloc2"):
        find()
    with pytest.raises(UsageError, match=r"--malloc tcmalloc: .* apt install libtcmalloc-minimal4"):
        find("tcmalloc")
    assert find("default") == ""
    standard = library(tmp_path / "usr/lib64/libjemalloc.so.2")
    assert find() == standard
    cached = library(tmp_path / "opt/odd/libjemalloc.so.2")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1\1\0libjemalloc.so.2\0/opt/odd/libjemalloc.so.2\0")
    assert find() == cached
    by_path = library(tmp_path / "path/libjemalloc.so.2")
    assert find(LD_LIBRARY_PATH=f"/nowhere:{tmp_path}/path") == by_path
    venv = library(tmp_path / "venv/lib/libjemalloc.so")
    assert find() == venv
    assert find(CONDA_PREFIX=str(tmp_path / "conda")) == venv
    conda = library(tmp_path / "conda/lib/libjemalloc.so.2")
    assert find(CONDA_PREFIX=str(tmp_path / "conda")) == conda


def test_what_cannot_be_preloaded_is_passed_over(tmp_path: Path) -> None:
    library(tmp_path / "usr/lib64/libjemalloc.so")
    (tmp_path / "usr/local/lib").mkdir(parents=True)
    (tmp_path / "usr/local/lib/libjemalloc.so.2").write_text("INPUT(a linker script)")
    library(tmp_path / "a space/lib/libjemalloc.so.2")
    foreign = tmp_path / "usr/lib/libjemalloc.so.2"
    foreign.parent.mkdir(parents=True)
    head = bytearray(Path(sys.executable).resolve().read_bytes()[:64])
    head[18] ^= 0x55  # another processor
    foreign.write_bytes(head)
    found = find_allocator("jemalloc", {"CONDA_PREFIX": str(tmp_path / "a space")}, str(tmp_path), str(tmp_path))
    assert found == str(tmp_path / "usr/lib64/libjemalloc.so")


def test_preloading_comes_before_what_is_there() -> None:
    assert preload("/l/a.so", {}) == "/l/a.so"
    assert preload("/l/a.so", {"LD_PRELOAD": "/x.so /y.so:/l/a.so"}) == "/l/a.so:/x.so:/y.so"


@pytest.mark.parametrize("name", ["tcmalloc", "jemalloc"])
def test_the_real_library_is_used(name: str) -> None:
    try:
        path = find_allocator(name, os.environ)
    except UsageError as missing:
        pytest.skip(str(missing))
    code = "print(any('malloc' in line for line in open('/proc/self/maps')))"
    environ = {**os.environ, "LD_PRELOAD": preload(path, {})}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")
