# SPDX-License-Identifier: Apache-2.0
"""Builders for tests, and a compiler that counts how often it is run."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from anyaccel.ops import OpBuilder

SCALE = """
#include <cstddef>
#include "factor.h"
extern "C" void scale(float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) values[i] *= FACTOR;
}
"""
# The stable part of Python's C interface; a module needs nothing else.
MODULE = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef_Slot slots[] = {{0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", "", 0, methods, slots, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit_tiny() { return PyModuleDef_Init(&definition); }
"""


class ScaleBuilder(OpBuilder):
    """Multiplies floats by FACTOR of factor.h; `flags` are added."""

    NAME = "simd_scale"
    BUILD_VAR = "TEST_BUILD_SCALE"

    def __init__(self, folder: Path, *flags: str) -> None:
        super().__init__()
        self.folder = folder
        self.flags = flags

    def absolute_name(self) -> str:
        return f"no_such_package.{self.name}"

    def sources(self) -> list[str]:
        return [str(self.folder / "scale.cpp")]

    def include_paths(self) -> list[str]:
        return [str(self.folder / "include")]

    def cxx_args(self) -> list[str]:
        return ["-O1", *self.flags]


class Compiler:
    """A script in the place of the compiler, which optimizes nothing: that would take most of the time.

    `runs()` counts; `delay` is what it does before each run.
    """

    def __init__(self, folder: Path) -> None:
        self.script = folder / "counting-c++"
        self.log = folder / "runs"
        self.log.touch()
        self.delay("")
        self.script.chmod(0o755)

    def delay(self, shell: str) -> None:
        beside = self.script.with_suffix(".new")
        note = f'case "$*" in *--version*) ;; *) echo $$ >> {self.log}; {shell or ":"} ;; esac'
        beside.write_text(f'#!/bin/sh\n{note}\nexec g++ "$@" -O0\n')
        beside.chmod(0o755)
        beside.replace(self.script)

    def pids(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()]

    def runs(self) -> int:
        return len(self.pids())


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return path
