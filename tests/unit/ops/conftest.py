# SPDX-License-Identifier: Apache-2.0
"""Every test has a cache for built ops of its own, and a process that has loaded none."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_ops import SCALE, Compiler

from anyaccel.ops import builder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for built ops, empty."""
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CXX", "MAX_JOBS", "ANYACCEL_BUILD_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(builder, "_loaded", {})
    return tmp_path / "cache" / "ops"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(found.script))
    return found


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder (its name has a blank) with scale.cpp and the header that it includes."""
    folder = tmp_path / "the sources"
    (folder / "include").mkdir(parents=True)
    (folder / "scale.cpp").write_text(SCALE)
    (folder / "include" / "factor.h").write_text("#define FACTOR 2.0f\n")
    return folder
