# SPDX-License-Identifier: Apache-2.0
"""The cache of built ops, and what happens when compilers fail, hang or are killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy_ops import SCALE, Compiler, ScaleBuilder, write

from anyaccel.errors import OpBuildError, UsageError
from anyaccel.ops import jit, toolchains
from waiting import wait_for

SCRIPT = f"""
import logging, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from toy_ops import ScaleBuilder
logging.basicConfig(level=logging.INFO)
print(ScaleBuilder(Path(sys.argv[1])).load()._name)
"""


@pytest.fixture
def process(sources) -> Iterator[Callable[[], subprocess.Popen]]:
    """Starts processes that load the op and print its path."""
    started = []

    def start() -> subprocess.Popen:
        popen = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(sources)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(popen)
        return popen

    yield start
    for popen in started:
        popen.kill()
        popen.communicate()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def folders(cache: Path) -> list[Path]:
    """Folders in the cache, those of unfinished builds too."""
    return sorted(path for path in cache.iterdir() if path.is_dir())


def scale_one(sources: Path, *flags: str) -> float:
    """Loads as a new process would, and uses the op."""
    import ctypes

    library = ScaleBuilder(sources, *flags).jit_load()
    value = ctypes.c_float(1.0)
    library.scale(ctypes.byref(value), ctypes.c_size_t(1))
    return value.value


def test_what_did_not_change_is_not_built_again(sources, compiler, process, cache):
    first = process().communicate(timeout=60)
    assert compiler.runs() == 2  # compile and link
    assert "built op simd_scale" in first[1]
    assert process().communicate(timeout=60) == (first[0], "")
    assert compiler.runs() == 2
    (folder,) = folders(cache)
    assert folder.name.startswith("simd_scale-")
    assert len(folder.name) == len("simd_scale-") + 16
    assert first[0].strip() == str(folder / "simd_scale.so")
    assert [path.stat().st_mode & 0o777 for path in (cache, folder)] == [0o700, 0o700]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert list(manifest["headers"]) == [str(sources / "include" / "factor.h")]
    assert len(manifest["commands"]) == 2


def test_a_change_of_source_header_or_flag_builds_again(sources, compiler, cache):
    header = sources / "include" / "factor.h"
    assert scale_one(sources) == 2
    header.write_text("#define FACTOR 5")
    assert scale_one(sources) == 5
    (sources / "scale.cpp").write_text(SCALE.replace("FACTOR", "FACTOR * 2"))
    assert scale_one(sources) == 10
    assert scale_one(sources, "-DFACTOR=7", "-Wno-macro-redefined", "-w") == 10
    assert compiler.runs() == 8
    assert scale_one(sources) == 10
    assert compiler.runs() == 8
    assert len(folders(cache)) == 4
    # A header that goes back finds what was built for it, once its name is known again.
    write(sources / "include" / "deeper.h", "#define FACTOR 3")
    header.write_text('#include "deeper.h"')
    assert scale_one(sources) == 6
    write(sources / "include" / "deeper.h", "#define FACTOR 4")
    assert scale_one(sources) == 8
    (sources / "include" / "deeper.h").unlink()
    with pytest.raises(OpBuildError, match=r"deeper\.h"):
        scale_one(sources)
    header.write_text("#define FACTOR 5")
    assert scale_one(sources) == 10


def test_an_unused_header_does_not_matter(sources, compiler):
    scale_one(sources)
    write(sources / "include" / "unused.h", "#error")
    scale_one(sources)
    assert compiler.runs() == 2


def test_another_compiler_or_cpu_builds_again(sources, compiler, cache, monkeypatch):
    scale_one(sources, "-march=native")
    assert scale_one(sources, "-march=native") == 2
    assert len(folders(cache)) == 1
    monkeypatch.setattr("anyaccel._native.cpu_features", lambda: {"avx2": False})
    scale_one(sources, "-march=native")
    assert len(folders(cache)) == 2
    monkeypatch.setenv("CXX", "g++")
    scale_one(sources)
    assert len(folders(cache)) == 3


def test_what_the_compiler_says_is_shown(sources, cache):
    (sources / "scale.cpp").write_text(SCALE + "int broken = nonsense;\n")
    with pytest.raises(OpBuildError) as error:
        scale_one(sources)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("op simd_scale: the compiler failed (exit code 1): /")
    assert f"-c '{sources}/scale.cpp' -o" in lines[0]
    assert any("error: 'nonsense' was not declared" in line for line in lines)
    assert folders(cache) == []


def test_at_most_40_lines_are_shown(sources):
    (sources / "scale.cpp").write_text("\n".join(f"int x{i} = y{i};" for i in range(60)))
    with pytest.raises(OpBuildError) as error:
        scale_one(sources)
    assert len(str(error.value).splitlines()) == 41
    assert "y59" in str(error.value)
    assert "y1'" not in str(error.value)


def test_advice_for_what_is_missing(sources):
    class Linked(ScaleBuilder):
        def libraries_args(self):
            return ["no_such_library"]

    with pytest.raises(OpBuildError, match=r"cannot find -lno_such_library(.|\n)*development package"):
        Linked(sources).load()
    (sources / "scale.cpp").write_text('extern "C" int missing(); extern "C" int scale() { return missing(); }')
    with pytest.raises(OpBuildError, match=r"undefined symbol: missing; libraries_args\(\) names"):
        ScaleBuilder(sources).load()


@pytest.mark.parametrize(
    "cxx, words",
    [
        ("no-such-compiler -m64", "no program 'no-such-compiler', so there is no C++ compiler; install one"),
        ("'g++", "cannot be read as a command"),
        ("false", "the compiler failed (exit code 1): /"),
        ("/etc", "no program '/etc'"),
    ],
)
def test_cxx_that_is_no_compiler(sources, monkeypatch, cxx, words):
    monkeypatch.setenv("CXX", cxx)
    assert words in ScaleBuilder(sources).why_not()
    with pytest.raises(OpBuildError) as error:
        scale_one(sources)
    assert words in str(error.value)


def test_cxx_may_have_arguments(sources, monkeypatch):
    monkeypatch.setenv("CXX", "env g++ -DUNUSED")
    assert scale_one(sources) == 2


def test_jobs(monkeypatch):
    assert toolchains.max_jobs() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("MAX_JOBS", "3")
    assert toolchains.max_jobs() == 3
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(UsageError, match="MAX_JOBS='many'"):
        toolchains.max_jobs()


def test_sources_are_compiled_in_parallel(tmp_path):
    # Each waits until the other has started.
    meet = "touch {}; n=0; until test -e {} || test $n = 600; do sleep 0.1; n=$((n+1)); done; test -e {}"
    names = [str(tmp_path / name) for name in "ab"]
    commands = [["sh", "-c", meet.format(one, other, other)] for one, other in (names, names[::-1])]
    assert toolchains.run_all(commands, jobs=2, seconds=120) == ["", ""]


def test_one_failure_ends_the_others_and_their_children(tmp_path):
    pids = tmp_path / "pids"
    # A wait for the other one to end would outlast this test.
    with pytest.raises(OpBuildError, match="exit code 3"):
        toolchains.run_all(
            [
                ["sh", "-c", f"sleep 1000 & echo $! > {pids}; wait"],
                ["sh", "-c", f"while ! test -s {pids}; do sleep 0.02; done; exit 3"],
            ],
            jobs=2,
            seconds=500,
        )
    wait_for(lambda: not is_running(int(pids.read_text())), "the child of the other one goes on")


def test_a_build_that_takes_too_long_is_ended(sources, compiler, cache, monkeypatch):
    compiler.delay("sleep 60")
    monkeypatch.setenv("ANYACCEL_BUILD_TIMEOUT", "0.5")
    with pytest.raises(OpBuildError, match=r"did not end within 0.5 s and was killed(.|\n)*ANYACCEL_BUILD_TIMEOUT"):
        scale_one(sources)
    assert not any(map(is_running, compiler.pids()))
    assert folders(cache) == []


def test_a_killed_build_does_not_block_the_next(sources, compiler, process, cache, monkeypatch, caplog):
    compiler.delay("exec sleep 60")
    builder = process()
    wait_for(compiler.runs, "the compiler does not start")
    try:
        with monkeypatch.context() as patch:
            patch.setenv("ANYACCEL_BUILD_TIMEOUT", "0.5")
            patch.setattr(jit, "_MESSAGE_SECONDS", 0.2)
            with pytest.raises(OpBuildError, match=f"op simd_scale: process {builder.pid} on .* has been building it"):
                scale_one(sources)
            assert f"op simd_scale: waiting for process {builder.pid} on " in caplog.text
        assert len(folders(cache)) == 1  # of the unfinished build
        builder.kill()
        builder.wait(10)
        compiler.delay("")
        assert scale_one(sources) == 2
        assert [path.name[:11] for path in folders(cache)] == ["simd_scale-"]
    finally:
        for pid in compiler.pids():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def test_processes_at_once_build_once(sources, compiler, process):
    compiler.delay("sleep 0.5")
    outputs = [popen.communicate(timeout=60) for popen in [process() for _ in range(3)]]
    assert len({path for path, _ in outputs}) == 1
    assert outputs[0][0].strip().endswith("simd_scale.so")
    assert compiler.runs() == 2
    assert sum("built op" in log for _, log in outputs) == 1


def test_ctrl_c_ends_the_compilers_and_leaves_nothing(sources, compiler, process, cache):
    compiler.delay("sleep 600 & echo $! >> $0.children; wait")
    builder = process()
    children = Path(f"{compiler.script}.children")
    wait_for(lambda: children.exists() and children.read_text().endswith("\n"), "the compiler does not start")
    builder.send_signal(signal.SIGINT)
    printed = builder.communicate(timeout=60)[1]
    assert printed.endswith("KeyboardInterrupt\n")
    assert "ignored" not in printed
    ended = [*compiler.pids(), int(children.read_text())]
    wait_for(lambda: not any(map(is_running, ended)), f"processes {ended} go on")
    assert folders(cache) == []


def test_ctrl_c_while_a_compiler_is_started_ends_it_too(monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)  # before anyone has been told of the process

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(KeyboardInterrupt):
        toolchains.run_all([["sleep", "600"]] * 2, jobs=2, seconds=600)
    assert len(started) == 1
    assert not is_running(started[0])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("harm", ["truncated", "changed", "removed", "manifest"])
def test_a_damaged_library_is_built_again(sources, cache, harm, caplog):
    assert scale_one(sources) == 2
    (folder,) = folders(cache)
    library = folder / "simd_scale.so"
    beside = folder / "new"  # the file itself is mapped by this process
    content = library.read_bytes()
    beside.write_bytes(content[:5000] if harm == "truncated" else content + b"x")
    if harm == "manifest":
        (folder / "manifest.json").write_text("[]")
        beside.unlink()
    elif harm == "removed":
        library.unlink()
    else:
        beside.replace(library)
    assert scale_one(sources) == 2
    assert "building it again" in caplog.text
    assert ("sha256 differs" if harm in ("truncated", "changed") else "is incomplete") in caplog.text
    assert folders(cache) == [folder]
    caplog.clear()
    assert scale_one(sources) == 2
    assert not caplog.records


def test_a_source_that_changes_during_the_build_is_an_error(sources, compiler, cache):
    compiler.delay(f"sleep 0.05; echo '#define FACTOR 9' > '{sources}/include/factor.h'; sleep 0.05")
    with pytest.raises(OpBuildError, match=r"factor\.h was changed while it was compiled; load the op again"):
        scale_one(sources)
    compiler.delay("")
    assert scale_one(sources) == 9


def test_a_cache_that_others_may_write_to_is_refused(sources, cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(OpBuildError, match=rf"{cache}: it may be written to by others \(mode 777\); .*chmod 700"):
        scale_one(sources)
    cache.chmod(0o700)
    assert scale_one(sources) == 2
    (folder,) = folders(cache)
    folder.chmod(0o770)
    with pytest.raises(OpBuildError, match=f"{folder}: it may be written to by others"):
        scale_one(sources)


def test_a_cache_of_another_user_is_refused(sources, cache, monkeypatch):
    cache.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(OpBuildError, match=r"belongs to user .*not to you .*set ANYACCEL_CACHE_DIR"):
        scale_one(sources)


def test_a_cache_that_is_a_link_is_refused(sources, cache, tmp_path):
    cache.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OpBuildError, match="is not a folder; remove it"):
        scale_one(sources)


def test_a_cache_that_cannot_be_written(sources, cache, monkeypatch):
    cache.parent.write_text("a file")
    with pytest.raises(OpBuildError, match=f"op simd_scale: the folder for built ops, {cache}, cannot be used"):
        scale_one(sources)
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", "/proc/no")
    with pytest.raises(OpBuildError, match="set ANYACCEL_CACHE_DIR to a folder of yours"):
        scale_one(sources)


def test_the_cache_may_be_a_relative_path(sources, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", "here")
    assert scale_one(sources) == 2
    assert len(folders(tmp_path / "here" / "ops")) == 1


def test_headers_with_odd_names_are_followed(tmp_path):
    odd = tmp_path / "a b$c#d"
    write(odd / "scale.cpp", SCALE.replace("factor.h", "fac tor$.h"))
    header = write(odd / "include" / "fac tor$.h", "#define FACTOR 2")
    assert scale_one(odd) == 2
    header.write_text("#define FACTOR 6")
    assert scale_one(odd) == 6


def test_what_is_there_needs_no_lock(sources, cache):
    assert scale_one(sources) == 2
    (lock,) = cache.glob(".*.lock")
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert scale_one(sources) == 2


def test_cxx_may_be_a_relative_path(sources, compiler: Compiler, monkeypatch):
    monkeypatch.chdir(compiler.script.parent)
    monkeypatch.setenv("CXX", f"./{compiler.script.name}")
    assert scale_one(sources) == 2
