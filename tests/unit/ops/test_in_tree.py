# SPDX-License-Identifier: Apache-2.0
"""The ops of csrc/: one table for the wheel and the JIT loader, and each of them loads, prebuilt and built here."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys

import pytest

from anyaccel.errors import CapabilityError
from anyaccel.ops import builders_in, in_tree, jit
from anyaccel.ops.builder import _variant_of
from anyaccel.ops.builders import in_tree as in_tree_builder

BUILDERS = {
    name: kind
    for name, kind in builders_in("anyaccel.ops.builders.cpu").items()
    if issubclass(kind, in_tree_builder.InTreeBuilder)
}
LIBRARIES = {kind().library_name(): name for name, kind in BUILDERS.items()}


def test_the_table_has_an_entry_for_each_builder_and_the_other_way_round():
    assert set(LIBRARIES) == set(in_tree.SOURCES)
    listed = {file for name in in_tree.SOURCES for file in in_tree.sources(name)}
    folders = {file.partition("/")[0] for file in listed} - {"common"}
    there = {f"{folder}/{path.name}" for folder in folders for path in (in_tree.root() / folder).glob("*.cpp")}
    assert there == {file for file in listed if not file.startswith("common/")}


@pytest.mark.parametrize("name", BUILDERS)
def test_the_prebuilt_copy_is_used_and_is_of_these_sources(name, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")  # there is no compiler
    builder = BUILDERS[name]()
    assert builder.why_not() == ""
    status = builder.status()
    assert status.kind == "prebuilt", "build again: make setup"
    assert _variant_of(ctypes.CDLL(status.detail)) == builder.variant()
    assert builder.load() is builder.load()
    assert not caplog.records


@pytest.mark.parametrize("name", BUILDERS)
def test_an_op_can_be_switched_off(name, monkeypatch):
    monkeypatch.setenv(BUILDERS[name].BUILD_VAR, "0")
    with pytest.raises(CapabilityError, match=BUILDERS[name].BUILD_VAR):
        BUILDERS[name]().load()


def test_a_change_of_a_source_or_header_is_another_variant(tmp_path):
    folder = tmp_path / "csrc"
    shutil.copytree(in_tree.root(), folder)
    before = in_tree.variant("cpu_lion", folder)
    assert before == in_tree.variant("cpu_lion", in_tree.root())
    for file in ("optim/lion_update.h", "optim/lion.cpp", "common/parallel.cpp", "common/parallel.h", "simd/wide.h"):
        with (folder / file).open("a") as text:
            text.write("\n")
        after = in_tree.variant("cpu_lion", folder)
        assert after != before
        before = after


def test_cmake_gets_what_the_loader_uses():
    script = [sys.executable, in_tree.__file__, str(in_tree.root())]
    text = subprocess.run(script, capture_output=True, text=True, check=True, timeout=60).stdout
    for name in in_tree.SOURCES:
        files = " ".join(in_tree.sources(name))
        assert f'anyaccel_op({name} "{in_tree.variant(name, in_tree.root())}" {files})\n' in text
    assert f"set(ANYACCEL_OP_FLAGS {';'.join(in_tree.flags())})\n" in text
    (common,) = re.findall(r"^anyaccel_op_common\((.*)\)$", text, re.M)
    for name in in_tree.SOURCES:  # what is compiled once for all of them, each lists
        assert set(common.split()) < set(in_tree.sources(name))
    assert "common/op_variant.cpp" not in common  # which names the op's own sources
    recipe = BUILDERS["CPULionBuilder"]()._recipe("cpu_lion")
    assert recipe.cxx_args[2:] == in_tree.flags()


@pytest.mark.slow
def test_a_prebuilt_copy_of_other_sources_is_built_anew(monkeypatch, caplog, cache, compiler):
    monkeypatch.setattr(in_tree_builder, "_variant", lambda name: "other")
    builder = BUILDERS["CPULionBuilder"]()
    assert builder.status().kind == "jit"
    assert builder.load().library._name.startswith(str(cache))
    assert "not for other; building it" in caplog.text
    assert builder.status().kind == "cached"
    assert builder.status().seconds > 0
    assert jit.clean(cache)[0] == 1
    assert builder.status().kind == "jit"


@pytest.mark.slow
def test_processes_at_once_build_an_op_once(cache, compiler, tmp_path):
    script = """
from anyaccel.ops.builders import in_tree
in_tree._variant = lambda name: "other"
from anyaccel.ops.builders.host import CPULionBuilder
CPULionBuilder().load()
"""
    ranks = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [rank.wait(100) for rank in ranks] == [0, 0]
    assert compiler.runs() == len(in_tree.sources("cpu_lion")) + 1
