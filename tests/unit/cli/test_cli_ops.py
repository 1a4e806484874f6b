# SPDX-License-Identifier: Apache-2.0
"""`anyaccel ops`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anyaccel.cli import main
from anyaccel.ops import builder, toolchains
from anyaccel.ops.builders import in_tree as in_tree_builder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(builder, "_loaded", {})
    return tmp_path / "cache" / "ops"


def listed(capsys, *names: str) -> dict[str, dict[str, object]]:
    assert main(["ops", "list", "--json", *names]) == 0
    return {row["op"]: row for row in json.loads(capsys.readouterr().out)["ops"]}


def test_list(capsys, monkeypatch):
    rows = listed(capsys)
    assert {rows[name]["status"] for name in ("async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam")} == {
        "prebuilt"
    }
    assert rows["cpu_adam"]["builder"] == "CPUAdamBuilder"
    assert rows["cpu_adam"]["variant"].startswith("x86_64-") or rows["cpu_adam"]["variant"]
    assert rows["deepspeed_ccl_comm"]["status"] == "unavailable"
    assert main(["ops"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ops of cpu; kernels use ")
    assert "oneccl-cpu" in text
    monkeypatch.setenv("DS_BUILD_CPU_LION", "0")
    assert "DS_BUILD_CPU_LION=0" in listed(capsys, "CPULionBuilder")["cpu_lion"]["detail"]


@pytest.mark.slow  # compiles an op; test_jit.py builds one for each change
def test_build_and_clean(capsys, monkeypatch, cache, tmp_path):
    compiler = tmp_path / "quick-c++"  # what is optimized takes twice as long
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(in_tree_builder, "_variant", lambda name: "other")  # the prebuilt copies are not for this
    assert listed(capsys, "cpu_lion")["cpu_lion"]["status"] == "jit"
    assert main(["ops", "build", "cpu_lion"]) == 0
    assert "cpu_lion: built in " in capsys.readouterr().out
    row = listed(capsys, "cpu_lion")["cpu_lion"]
    assert row["status"] == "cached"
    assert row["build_s"] > 0
    assert main(["ops", "build", "cpu_lion", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ops"][0]["status"] == "cached"
    assert main(["ops", "clean", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["libraries"] == 1
    assert not list(cache.glob("cpu_lion*"))
    assert main(["ops", "clean"]) == 0
    assert "removed 0 libraries" in capsys.readouterr().out


def test_failures(capsys, monkeypatch, tmp_path):
    assert main(["ops", "build", "nothing"]) == 2
    assert "no op is called 'nothing'; there are async_io, " in capsys.readouterr().err
    assert main(["ops", "clean", "cpu_adam"]) == 2
    assert main(["ops", "build", "deepspeed_ccl_comm"]) == 1
    assert "deepspeed_ccl_comm: unavailable: " in capsys.readouterr().out
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\ncase "$*" in *--version*) echo 1;; *) echo "no space left"; exit 3;; esac\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert main(["ops", "build", "cpu_adam", "--jit"]) == 1
    text = capsys.readouterr().out
    assert "cpu_adam: failed: " in text
    assert "no space left" in text
    # Without a compiler everything still works from the prebuilt copies.
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Exception, match="there is no C\\+\\+ compiler"):
        toolchains.find_compiler()
    assert main(["ops", "build", "cpu_adam"]) == 0
    assert "cpu_adam: prebuilt" in capsys.readouterr().out
