#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs DeepSpeed's own unit tests with the real DeepSpeed, on our accelerator and on its own for CPUs, and compares.

git clone https://github.com/deepspeedai/DeepSpeed
python tools/deepspeed_tests.py DeepSpeed --write tests/data/deepspeed_tests.json    the list below, in an hour or more
python tools/deepspeed_tests.py DeepSpeed unit/comm --side ours  some of them, on one side

Run it with a Python that has DeepSpeed and pytest beside anyaccel. Tests are copied, so that the checkout's sources are
not imported; on our side the copy calls `use_in_deepspeed()` in each process. The exit code is 1 when a test passes on
DeepSpeed's side and not on ours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

SIDES = ("ours", "theirs")
# What runs, the quick ones first.
TESTS = (
    "unit/runtime/zero/test_zero_config.py",
    "unit/module_inject/test_tp_plan_converter.py",
    "unit/runtime/pipe/test_pipe_schedule.py",
    "unit/runtime/pipe/test_topology.py",
    "unit/runtime/tensor_parallel/test_autotp_universal_checkpoint.py",
    "unit/runtime/utils/test_partition.py",
    "unit/runtime/test_precision_config_dynamic_scale.py",
    "unit/checkpoint/test_autotp_uc_checkpoint.py",
    "unit/ops/adam/test_zf_torch_adam.py",
    "unit/ops/muon/test_muon.py",
    "unit/ops/lion/test_cpu_lion.py",
    "unit/ops/adam/test_cpu_adam.py",
    "unit/ops/adagrad/test_cpu_adagrad.py",
    "unit/ops/adam/test_adamw.py",
    "unit/comm/test_comms_logger.py",
    "unit/comm/test_dist.py",
    "unit/runtime/zero/test_ignore_unused_parameters.py",
    "unit/runtime/zero/test_zero_dynamic_class.py",
    "unit/runtime/zero/test_zero_hook_attribute_delegation.py",
    "unit/runtime/zero/test_zero_late_module_attach.py",
    "unit/runtime/zero/test_zero_linear_direct_init.py",
    "unit/runtime/zero/test_unwrap_model.py",
    "unit/runtime/zero/test_zero_tiled.py",
    "unit/runtime/zero/test_zero_context.py",
    "unit/runtime/zero/test_zero_context_ancestry.py",
    "unit/runtime/zero/test_zero_context_return.py",
    "unit/runtime/zero/test_zero_grad_clip.py",
    "unit/runtime/zero/test_zero_leaf_module.py",
    "unit/runtime/zero/test_zero_nesting_init.py",
    "unit/runtime/zero/test_zero_tensor_fragment.py",
    "unit/runtime/comm/test_coalesced_collectives.py",
    "unit/v1/half_precision/test_mixed_precision_dtype.py",
    "unit/v1/half_precision/test_bf16.py",
    "unit/v1/half_precision/test_gradient_clipping_default.py",
    "unit/v1/half_precision/test_with_autocast.py",
    "unit/v1/accelerator/test_accelerator.py",
    "unit/ulysses_alst/test_ulysses_sp_hf.py",
    "unit/sequence_parallelism/test_ulysses.py",
    "unit/runtime/pipe/test_pipe.py",
    "unit/pipe/test_pipe_module.py",
    "unit/model_parallelism/test_autotp_custom_patterns.py",
    "unit/model_parallelism/test_autotp_training.py",
    "unit/checkpoint/test_latest_checkpoint.py",
    "unit/checkpoint/test_tag_validation.py",
    "unit/checkpoint/test_lr_scheduler.py",
    "unit/checkpoint/test_zero_optimizer.py",
    "unit/checkpoint/test_pipeline.py",
    "unit/checkpoint/test_universal_checkpoint.py",
)
# Not begun: they want an error for a parameter on a device, which a CPU has not; where there is none, DeepSpeed's
# harness waits for a process that has ended.
SKIPPED = (
    "unit/ops/adam/test_cpu_adam.py::TestCPUAdamGPUError",
    "unit/ops/adagrad/test_cpu_adagrad.py::TestCPUAdagradGPUError",
    "unit/ops/lion/test_cpu_lion.py::TestCPULionGPUError",
)
# Each test starts processes: those of a server that has imported this are there at once. DeepSpeed's class of fixtures
# names itself by an attribute that pytest has not read since 8.4. And each outcome is written when it is known, since
# the harness ends pytest at the first test that hangs: what began is not begun again, so that the rest runs.
_PLUGIN = "preloaded"
PRELOADED = """
import json
import multiprocessing
import os

import pytest

multiprocessing.set_forkserver_preload(["torch", "deepspeed", "unit.common"])
RECORD = os.environ["DEEPSPEED_TESTS_RECORD"]


def pytest_pycollect_makeitem(collector, name, obj):
    if name != "DistributedFixture" and getattr(obj, "is_dist_fixture", False):
        pytest.register_fixture(name=name, func=obj, node=collector)


def note(test, outcome):
    with open(RECORD, "a") as out:
        out.write(json.dumps([test, outcome]) + "\\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    if os.path.exists(RECORD):
        with open(RECORD) as lines:
            known = dict(json.loads(line) for line in lines)
        items[:] = [item for item in items if known[item.nodeid] == "waits"]
    for item in items:
        note(item.nodeid, "waits")


def pytest_runtest_logstart(nodeid):
    note(nodeid, "runs")


def pytest_runtest_logreport(report):
    if report.outcome != "passed" or report.when == "call":
        note(report.nodeid, report.outcome)
"""
# The first port that tests try, and what each side has for it: both run at once, and would take each other's.
PORT, PORTS = "29500", {"ours": "24500", "theirs": "26500"}
FIRST_IMPORT = re.compile(r"^(?:import|from (?!__future__)) *\w", re.MULTILINE)
OURS = "import anyaccel.interop\n\nanyaccel.interop.use_in_deepspeed()\n\n"
# It takes minutes to compile, and none of these tests is about it.
THEIRS = "import deepspeed\n\ndeepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n\n"


def copied(checkout: Path, folder: Path, side: str) -> Path:
    tests = folder / side / "tests"
    tests.mkdir(parents=True)
    for name in ("conftest.py", "pytest.ini"):
        shutil.copy(checkout / "tests" / name, tests)
    shutil.copytree(checkout / "tests" / "unit", tests / "unit")
    # A process that a test starts may import any of them first, and takes DeepSpeed's builders from it by name.
    for file in tests.rglob("*.py"):
        text = file.read_text().replace(PORT, PORTS[side])
        file.write_text(FIRST_IMPORT.sub(lambda found: (OURS if side == "ours" else THEIRS) + found[0], text, count=1))
    (folder / side / f"{_PLUGIN}.py").write_text(PRELOADED)
    return tests


def run(tests: Path, name: str, limit: int) -> dict[str, str]:
    """Test of this file -> passed, failed, skipped, or hung after 180 s; the next ones follow then."""
    record = tests.parent / f"{name.replace('/', '-')}.jsonl"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tests.parent}:{tests}:{os.environ.get('PYTHONPATH', '')}",
        "DEEPSPEED_TESTS_RECORD": str(record),
        "DS_ACCELERATOR": "cpu",
        "DS_UNITTEST_TIMEOUT": "180",
        "LOCAL_SIZE": "4",  # how many devices there are: as many ranks as a test asks for
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-v", "-m", "", "-p", _PLUGIN, "-p", "no:cacheprovider", name]
    command += [f"--basetemp={tests.parent / 'temporary'}", *(f"--deselect={test}" for test in SKIPPED)]
    deadline = time.monotonic() + limit
    found: dict[str, str] = {}
    more = True
    while more:
        waited = Counter(found.values())["waits"]
        with (tests.parent / "log").open("a") as log:
            process = subprocess.Popen(
                command, cwd=tests, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 1))
            late = process.poll() is None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and ranks that it has left
            process.wait()
        if record.exists():
            found = dict(json.loads(line) for line in record.read_text().splitlines())
        if not late:
            with record.open("a") as out:
                for test in [test for test, outcome in found.items() if outcome == "runs"]:
                    found[test] = "hung"
                    out.write(json.dumps([test, "hung"]) + "\n")
        waits = Counter(found.values())["waits"]
        more = not late and 0 < waits != waited
    print(f"{tests.parent.name} {name}: {dict(Counter(found.values()))}", flush=True)
    return {test.partition("::")[2]: outcome for test, outcome in found.items()}


def row(ours: dict[str, str], theirs: dict[str, str]) -> dict[str, list[str]]:
    """Of one file of tests, those that ended on both sides, and those that hung on one: a slow machine may be why."""
    ended = {"passed", "failed", "skipped"}
    hung = sorted(test for test in theirs.keys() & ours.keys() if "hung" in (theirs[test], ours[test]))
    both = sorted(test for test in theirs.keys() & ours.keys() if {theirs[test], ours[test]} <= ended)
    pairs = {test: (theirs[test], ours[test]) for test in both}
    return {
        **{f"both {each}": [test for test, pair in pairs.items() if pair == (each, each)] for each in sorted(ended)},
        "only theirs": [test for test, (first, second) in pairs.items() if first == "passed" != second],
        "only ours": [test for test, (first, second) in pairs.items() if second == "passed" != first],
        **({"hung": hung} if hung else {}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="DeepSpeed's repository")
    parser.add_argument("tests", nargs="*", help="of these files only")
    parser.add_argument("--side", choices=SIDES, help="only this one; nothing is compared")
    parser.add_argument("--write", type=Path, help="file for the outcome, after each file of tests; other files stay")
    parser.add_argument("--limit", type=int, default=1200, help="seconds that a file may take")
    options = parser.parse_args()
    lost = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        places = {side: copied(options.checkout, Path(folder), side) for side in SIDES if options.side in (None, side)}
        for name in options.tests or TESTS:
            running = {side: pool.submit(run, tests, name, options.limit) for side, tests in places.items()}
            found = {side: outcome.result() for side, outcome in running.items()}
            if options.side:
                continue
            compared = row(**found)
            lost += [f"{name}::{test}" for test in compared["only theirs"]]
            if options.write:
                write(options.write, options.checkout, name, compared)
    print("\n".join(f"passes on DeepSpeed's side only: {test}" for test in lost))
    return int(bool(lost))


def write(file: Path, checkout: Path, name: str, compared: dict[str, list[str]]) -> None:
    known = json.loads(file.read_text())["files"] if file.exists() else {}
    versions = {"deepspeed": version("deepspeed"), "tests": (checkout / "version.txt").read_text().strip()}
    files = dict(sorted((known | {name: compared}).items()))
    file.write_text(json.dumps({**versions, "files": files}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
