# SPDX-License-Identifier: Apache-2.0
"""`anyaccel conformance` and `pytest --pyargs anyaccel.accelerator.conformance` as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anyaccel
from warm import WarmPython

COMMAND = ["-m", "anyaccel", "conformance"]
PYTEST = [sys.executable, "-W", "error", "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "-q", "-rs"]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    hidden = ("DS_ACCELERATOR", "LOCAL_SIZE", "LOCAL_RANK", "PYTEST_ADDOPTS")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    path = [*map(str, folders), str(Path(anyaccel.__file__).parents[1]), kept.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs Python with arguments, where packages lie in further folders, if any."""
    with WarmPython({}, tmp_path_factory.mktemp("warm")) as warm:

        def run(command: list[str], *folders: Path, **variables: str) -> subprocess.CompletedProcess[str]:
            return warm.run(*command, **environment(*folders, **variables))

        yield run


def pytest_run(command: list[str], folder: Path, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run in an empty folder, as a user of an installed package does."""
    env = environment(*folders, DS_ACCELERATOR="cpu" if not folders else "kib")
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=110, cwd=folder)


@pytest.fixture
def extension(tmp_path: Path) -> Path:
    """An installed extension whose accelerator counts memory in KiB and raises from range_pop()."""
    folder = tmp_path / "site"
    info = folder / "conformance_test_extension-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: conformance-test-extension\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[anyaccel.accelerators]\nkib = conformance_test_extension:Kib\n")
    (folder / "conformance_test_extension.py").write_text(
        "import dataclasses\n"
        "from anyaccel.accelerator.backends.cpu import CpuAccelerator\n"
        "class Kib(CpuAccelerator):\n"
        "    spec = dataclasses.replace(CpuAccelerator.spec, name='kib', order=5000)\n"
        "    def total_memory(self, device_index=None):\n"
        "        return 23 << 20\n"
        "    def range_pop(self, domain=None):\n"
        "        raise OSError('no profiler')\n"
        "    def runtime_versions(self):\n"
        "        return {'kib-driver': '7.1'}\n"
    )
    return folder


@pytest.mark.slow  # the kit's own tests run the checks too
def test_every_check_passes_on_the_cpu(run: Run) -> None:
    done = run([*COMMAND, "cpu"])
    head, titles, *rows, closing = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert head.startswith(f"cpu on cpu: {len(rows)} checks; anyaccel {anyaccel.__version__}, python 3.")
    assert titles.split() == ["subject", "check", "result", "time", "detail"]
    assert closing == f"{len(rows) - 2} pass, 2 absent, 0 fail"
    column = titles.index("result")
    outcomes = [row[column:].split()[0] for row in rows]
    assert (outcomes.count("pass"), outcomes.count("absent")) == (len(rows) - 2, 2)
    (registration,) = (row for row in rows if "registered and released" in row)
    assert registration.endswith("there is no device to register host memory with")


def test_json_is_one_object(run: Run) -> None:
    done = run([*COMMAND, "--json", "-k", "data types"], DS_ACCELERATOR="cpu")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert (report["accelerator"], report["device"]) == ("cpu", "cpu")
    assert report["versions"]["anyaccel"] == anyaccel.__version__
    assert {"python", "torch"} <= set(report["versions"])
    assert report["counts"] == {"pass": len(report["results"]), "absent": 0, "fail": 0}
    for result in report["results"]:
        assert set(result) == {"subject", "check", "outcome", "detail", "seconds", "traceback"}
        assert result["subject"] == "data types"


def test_a_failure_is_exit_code_1_and_says_what_is_wrong(run: Run, extension: Path) -> None:
    done = run([*COMMAND, "kib", "-k", "range", "-v"], extension)
    assert done.returncode == 1
    assert "raised OSError: no profiler" in done.stdout
    assert "line 8, in range_pop" in done.stdout
    assert done.stdout.splitlines()[0].endswith("kib-driver 7.1")
    assert done.stdout.splitlines()[-1] == "0 pass, 0 absent, 1 fail"
    done = run([*COMMAND, "kib", "-k", "total memory", "--json"], extension)
    assert done.returncode == 1
    (result,) = json.loads(done.stdout)["results"]
    assert result["detail"] == "expected total_memory() of at least 67108864 bytes, got 24117248"
    assert "ConformanceError" in result["traceback"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["warp"], 2, "DS_ACCELERATOR='warp' is not known; known accelerators: "),
        (["cuda"], 1, "DS_ACCELERATOR=cuda: "),
        (["cpu", "-k", "warp"], 2, "-k 'warp': no check has this text"),
        (["--warp"], 2, "unrecognized arguments: --warp; see anyaccel conformance --help"),
    ],
)
def test_a_mistake_is_one_line(run: Run, arguments: list[str], code: int, message: str) -> None:
    done = run([*COMMAND, *arguments], CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"anyaccel: error: {message}")
    assert done.stderr.count("\n") == 1


def test_rows_come_as_checks_finish_and_ctrl_c_ends_it() -> None:
    with subprocess.Popen(
        [sys.executable, *COMMAND, "cpu"], env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("identity"):
                break
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.endswith("anyaccel: interrupted\n")
    assert "Traceback" not in errors
    assert " fail" not in output


@pytest.mark.parametrize(
    ("chosen", "counts"),
    [
        pytest.param(["-k", "host_memory or identity or random"], " passed, 1 skipped, ", marks=pytest.mark.slow),
        pytest.param([], " passed, 2 skipped", marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_pytest_runs_what_is_installed(chosen: list[str], counts: str, tmp_path: Path) -> None:
    command = [*PYTEST, *chosen, "--pyargs", "anyaccel.accelerator.conformance"]
    done = pytest_run(command, tmp_path)
    assert done.returncode == 0, done.stdout
    assert counts in done.stdout
    assert "there is no device to register host memory with" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # some seconds
def test_pytest_fails_where_the_accelerator_is_wrong(extension: Path, tmp_path: Path) -> None:
    command = [*PYTEST, "-k", "ranges_nest or lazy_call", "--pyargs", "anyaccel.accelerator.conformance"]
    done = pytest_run(command, tmp_path, extension)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "raised OSError: no profiler" in done.stdout
