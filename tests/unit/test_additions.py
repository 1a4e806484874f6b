# SPDX-License-Identifier: Apache-2.0
"""Does what the pages docs/add-*.md say, with the code that they show, and sees that the new thing works.

A block below `<!-- file: PATH -->` is what goes into that file, or into a table in it. Nothing is written into the
repository: packages are given one more folder, tables one more row, and C++ is changed in a copy. A backend in a
package of its own is tests/e2e/test_extension.py's.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import decoder_reference
import family_cases
import native_models
from anyaccel import vendors
from anyaccel.accelerator import backends, select
from anyaccel.env import ISA_NAMES
from anyaccel.errors import ModelError
from anyaccel.inference import families
from anyaccel.inference.checkpoints import quantised
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.launch import runners
from anyaccel.launch.cluster import environment
from anyaccel.launch.job import ClusterJob, Host
from anyaccel.launch.plan import devices
from anyaccel.ops import builder as op_builder
from anyaccel.ops import in_tree
from anyaccel.serve.api import application
from anyaccel.topology import read_machine
from generators import vendors as vendor_table
from serve_fakes import Client, FakeEngine

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def shown(page: str, file: str) -> str:
    """What a page in docs/ shows below `<!-- file: FILE -->`."""
    text = (ROOT / "docs" / page).read_text()
    found = re.search(rf"^( *)<!-- file: {re.escape(file)} -->\n *```\w+\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    assert found, f"{page} shows no {file}"
    return textwrap.dedent(found[2])


def again(module: ModuleType) -> Any:
    """What a module is when it is imported now; sys.modules keeps the one that it has."""
    return loaded(module.__name__, Path(str(module.__file__)))


def loaded(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_backend_in_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, and the table that the tool makes of all of them."""
    (tmp_path / "acme.py").write_text(shown("add-a-backend.md", "src/anyaccel/accelerator/backends/acme.py"))
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    try:
        (tmp_path / "vendors.py").write_text(vendor_table.files()[vendor_table.TABLE])
        table = loaded(vendors.__name__, tmp_path / "vendors.py")
        monkeypatch.setitem(sys.modules, vendors.__name__, table)
        assert table.VENDORS.keys() - vendors.VENDORS.keys() == {"acme"}
        (found,) = (each for each in again(select).probe_candidates() if each.name == "acme")
    finally:
        sys.modules.pop("anyaccel.accelerator.backends.acme", None)
    assert (found.order, found.reason) == (
        75,
        "ACME_Accelerator requires torch_acme, which is not installed on this system",
    )
    (tmp_path / "dev").mkdir()
    for number in range(2):
        (tmp_path / "dev" / f"acme{number}").touch()
    seen = again(devices).find_devices(read_machine(), {}, str(tmp_path))
    assert (seen.accelerator, seen.count, seen.variable) == ("acme", 2, "ACME_VISIBLE_DEVICES")
    assert {"ACCL", "ACME"} <= set(again(environment).PREFIXES["accelerators"])


def test_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prun.py").write_text(shown("add-a-launcher.md", "src/anyaccel/launch/runners/prun.py"))
    monkeypatch.setattr(runners, "__path__", [*runners.__path__, str(tmp_path)])
    (runner,) = eval(shown("add-a-launcher.md", "src/anyaccel/launch/runners/__init__.py"), vars(runners))
    monkeypatch.setitem(runners.RUNNERS, runner.name, runner)
    job = ClusterJob(
        hosts=(Host("node1", (0, 1)), Host("node2", (0,))),
        program=("python", "-m", "anyaccel.launch.cluster.node"),
        environment={"ANYACCEL_CONTACT": "1/2/3"},
        launcher_args=("--bind=core",),
    )
    try:
        found = runners.find_runner("prun")
        assert found.build_command(job) == [
            *("prun", "--ranks=3", "--hosts=node1,node1,node2", "--bind=core"),
            *("python", "-m", "anyaccel.launch.cluster.node"),
        ]
        assert found.launcher_environment(job, {}) == {"ANYACCEL_CONTACT": "1/2/3"}
        assert found.warnings(job.hosts, {}) == []
    finally:
        sys.modules.pop("anyaccel.launch.runners.prun", None)


def test_an_address_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "add-an-endpoint.md"
    (tmp_path / "counting.py").write_text(shown(page, "src/anyaccel/serve/api/counting.py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "counting", None)  # what was there before is put back
    del sys.modules["counting"]
    names = {"APIS": application.APIS, "counting": importlib.import_module("counting")}
    exec(shown(page, "src/anyaccel/serve/api/application.py"), names)
    monkeypatch.setattr(application, "APIS", names["APIS"])
    client = Client(FakeEngine())
    answer = asyncio.run(client.send("POST", "/count", {"text": "two words"}))
    assert (answer.status, answer.json) == (200, {"words": 2})
    answer = asyncio.run(client.send("POST", "/count", {"text": 2}))
    assert (answer.status, answer.json["error"]["param"]) == (400, "text")
    assert "/count" in asyncio.run(client.send("GET", "/openapi.json")).json["paths"]


def test_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "afm.py").write_text(shown("add-a-model.md", "src/anyaccel/inference/families/afm.py"))
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    registry = "anyaccel.inference.families.registry"
    monkeypatch.setattr(families, "registry", sys.modules[registry])  # put back what the import below replaces
    monkeypatch.delitem(sys.modules, registry)
    try:
        family = importlib.import_module(registry).FAMILIES["afm"]
    finally:
        sys.modules.pop("anyaccel.inference.families.afm", None)
    model = family_cases.build("arcee")
    spec = family.spec({**model.config.to_dict(), "model_type": "afm"})
    weights = decoder_reference.assemble(family, spec, model.state_dict())
    native = native_models.fill(native_models.empty(spec), spec, weights)
    tokens = list(range(3, 11))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    logits = native_models.logits_of(native, spec.vocab, [native.create()], [tokens])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_method_of_quantised_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import save_file

    names: dict[str, Any] = {}
    exec(shown("add-a-format.md", "row_int8.py"), names)
    q = np.random.default_rng(0).integers(-127, 128, (8, 64)).astype(np.int8)
    scales = np.full((8, 1), 0.5, np.float16)
    save_file({"lm_head.weight_int8": q, "lm_head.weight_scale": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "row_int8"}}))
    with pytest.raises(ModelError, match="row_int8"):
        read_checkpoint(tmp_path)
    monkeypatch.setitem(quantised.METHODS, "row_int8", names["RowInt8"])
    tensor: Any = read_checkpoint(tmp_path).source.tensor("lm_head.weight")
    assert tensor.format(range(64)) == ("i8", 0, False)
    values, found, minima = tensor.values(slice(0, 8), range(64), 0)
    assert (values == q).all()
    assert (found == scales).all()
    assert minima is None
    assert (tensor.floats(slice(0, 8), range(64)) == q * np.float32(0.5)).all()


def test_what_a_packed_format_touches_is_there() -> None:
    """Each row of the page's table names functions or tables, and then the file that they are in."""
    section = (ROOT / "docs" / "add-a-format.md").read_text().partition("## A packed format")[2]
    rows = re.findall(r"^\| .+ \| (.+) \|$", section, re.MULTILINE)
    checked = 0
    for row in rows:
        names: list[str] = []
        for span in re.findall(r"`([^`]+)`", row):
            if "/" in span:
                text = (ROOT / span).read_text()
                assert [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)] == [], span
                checked += len(names)
                names = []
            else:
                names.append(span)
        assert not names, row
    assert checked > 15


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The builder of the page's op, whose source is in a copy of csrc/."""
    folder = tmp_path / "csrc"
    shutil.copytree(in_tree.root(), folder)
    (folder / "zeros").mkdir()
    (folder / "zeros" / "zeros.cpp").write_text(shown("add-an-op.md", "csrc/zeros/zeros.cpp"))
    row = eval("{" + shown("add-an-op.md", "src/anyaccel/ops/in_tree.py") + "}")
    monkeypatch.setattr(in_tree, "SOURCES", {**in_tree.SOURCES, **row})
    monkeypatch.setattr(in_tree, "root", lambda: folder)
    monkeypatch.setattr(op_builder, "_loaded", {})
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    names: dict[str, Any] = {"__name__": __name__, "__all__": []}
    exec(shown("add-an-op.md", "src/anyaccel/ops/builders/host/ops.py"), names)
    assert names["__all__"] == ["CPUZerosBuilder"]
    return names["CPUZerosBuilder"]()


def test_an_op_is_known_to_the_loader_and_to_cmake(op: Any) -> None:
    assert Path(op.sources()[0]).name == "zeros.cpp"
    assert op.absolute_name() == "anyaccel.ops.prebuilt.cpu_zeros"
    assert re.search(r'^anyaccel_op\(cpu_zeros "\S+" zeros/zeros\.cpp ', in_tree._cmake(in_tree.root()), re.MULTILINE)
    if COMPILER:
        subprocess.run([COMPILER, "-fsyntax-only", *op.cxx_args(), op.sources()[0]], check=True, timeout=60)


@pytest.mark.slow
def test_an_op_is_built_and_loaded(op: Any) -> None:
    library = op.load()
    library.anyaccel_count_zeros.restype = ctypes.c_int64
    x = torch.tensor([0.0, 1.0, 0.0, -0.0])
    assert library.anyaccel_count_zeros(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(4)) == 3


# The kernels of a table that only the reference and the new instruction set have.
PROGRAM = """
#include <cstdio>
#include "simd/pick.h"
#include "simd/simd.h"
namespace anyaccel {
struct Sum {
  float (*of)(const float*);
  static constexpr bool compiled_for(const IsaRow& row) { return row.isa == Isa::scalar || row.isa == Isa::mine; }
};
namespace ANYACCEL_ISA_VARIANT {
using namespace simd::ANYACCEL_ISA_VARIANT;
float sum_of(const float* x) { return sum(fma(load(x), broadcast(2.0f), broadcast(1.0f))); }
inline constexpr Sum kSum{&sum_of};
}
}
ANYACCEL_KERNELS(anyaccel::Sum, anyaccel::ANYACCEL_ISA_VARIANT::kSum)
template <> const anyaccel::Sum& anyaccel::variant<anyaccel::Sum, anyaccel::Isa::scalar>() {
  static const Sum none{nullptr};
  return none;
}
int main() {
  float x[ANYACCEL_LANES];
  for (float& each : x) each = 3.0f;
  using namespace anyaccel;
  std::printf("%d %g %s %d\\n", ANYACCEL_LANES, pick<Sum>(Isa::mine).of(x), kIsaRows[2].name,
              pick<Sum>(Isa::portable).of == nullptr);
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_an_instruction_set(tmp_path: Path) -> None:
    """One header, one row, and a name with its flags in CMakeLists.txt."""
    assert "**One header**" in (ROOT / "docs" / "add-an-isa.md").read_text()
    shutil.copytree(ROOT / "csrc" / "simd", tmp_path / "csrc" / "simd")
    simd = tmp_path / "csrc" / "simd"
    (simd / "mine.h").write_text((simd / "portable.h").read_text().replace("simd::portable", "simd::mine"))
    isa = (simd / "isa.h").read_text()
    row = re.search(r"^  ROW\(portable, .*\\\n", isa, re.MULTILINE)
    assert row
    isa = isa.replace(row[0], row[0] + '  ROW(mine, any, every_kernel, portable, "") \\\n')
    (simd / "isa.h").write_text(isa)
    (tmp_path / "program.cpp").write_text(PROGRAM)
    options = ["-std=c++20", "-O0", "-Wno-psabi", "-DANYACCEL_ISA_VARIANT=mine", f"-I{tmp_path / 'csrc'}"]
    subprocess.run(
        [COMPILER, *options, str(tmp_path / "program.cpp"), "-o", str(tmp_path / "program")], check=True, timeout=120
    )
    lanes, total, name, others = subprocess.run(
        [tmp_path / "program"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert float(total) == 7.0 * int(lanes)
    assert (name, others) == ("mine", "1")


CMAKE = Path(sys.executable).with_name("cmake")


@pytest.mark.skipif(not CMAKE.exists(), reason="no cmake beside this Python")
def test_cmake_compiles_each_kernel_for_a_new_instruction_set(tmp_path: Path) -> None:
    """Its name in the list and its flags, as the page says; one kernel file is one more object for each of them."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    text = (ROOT / "CMakeLists.txt").read_text()
    text, lists = re.subn(r"^  set\(every [\w ]+", r"\g<0> mine", text, flags=re.MULTILINE)
    text, flags = re.subn(r"^  set\(portable_flags ", r"  set(mine_flags -O1)\n\g<0>", text, flags=re.MULTILINE)
    assert (lists, flags) == (1, 1)
    (tmp_path / "CMakeLists.txt").write_text(text)
    # The compiler is one that works: finding that out is most of what configuring takes.
    known = [f"-DCMAKE_CXX_COMPILER={COMPILER}", "-DCMAKE_CXX_COMPILER_FORCED=ON", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    ninja = [f"-DCMAKE_MAKE_PROGRAM={CMAKE.with_name('ninja')}"]
    build = tmp_path / "build"
    command = [CMAKE, "-S", tmp_path, "-B", build, "-G", "Ninja", *known, *ninja]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    commands = json.loads((build / "compile_commands.json").read_text())
    kernels: dict[str, set[str]] = {}
    for each in commands:
        variant = re.search(r"-DANYACCEL_ISA_VARIANT=(\w+)", each["command"])
        if variant and each["file"].endswith(".cpp"):
            kernels.setdefault(variant[1], set()).add(Path(each["file"]).name)
            assert variant[1] != "mine" or " -O1 " in each["command"]
    assert kernels["mine"] == kernels["portable"]
    assert {"reduce_kernels.cpp", "kernels_gemv.cpp", "kernels_attention.cpp"} <= kernels["mine"]


def test_cmake_compiles_each_kernel_for_an_instruction_set_that_is_listed(tmp_path: Path) -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    rows = re.findall(r"^  ROW\((\w+), \w+, (\w+),", (ROOT / "csrc/simd/isa.h").read_text(), re.MULTILINE)
    listed = re.search(r"^  set\(every ([\w ]+)\)$", text, re.MULTILINE)
    assert listed
    assert listed[1].split() == [name for name, kernels in rows if kernels != "some_kernels"]
    assert tuple(name for name, _ in rows) == ISA_NAMES
    for name, _ in rows:
        assert f"set({name}_flags " in text
        assert (ROOT / "csrc" / "simd" / f"{name}.h").exists()


# The kernels of each row of the page's table, files of csrc/.
KERNELS = {
    "collectives, optimizers": ["comm/reduce_kernels.cpp"],
    "attention, sampling, rotary, norms, packing": [
        "llm/attention/kernels_append.cpp",
        "llm/attention/kernels_attention.cpp",
        "llm/kernels/kernels_ops.cpp",
        "llm/pack/kernels_pack.cpp",
    ],
    "a few tokens by int8 and int4 weights": ["llm/kernels/kernels_gemv.cpp", "llm/kernels/kernels_gemv_bits.cpp"],
    "a few tokens by others": ["llm/kernels/kernels_gemv_float.cpp"],
    "a prompt by bf16 weights": ["llm/kernels/kernels_gemm.cpp", "llm/kernels/kernels_gemm_{pairs,tiles,bfmmla}.cpp"],
    "a prompt by int4 weights": [
        "llm/kernels/kernels_gemm.cpp",
        "llm/kernels/kernels_gemm_{integer,pairs,tiles,sdot,smmla}.cpp",
    ],
    "a prompt by int8 weights": [
        "llm/kernels/kernels_gemm.cpp",
        "llm/kernels/kernels_gemm_{integer,pairs,tiles,sdot,smmla}.cpp",
    ],
    "a prompt by fp32 and fp16 weights": ["llm/kernels/kernels_gemm.cpp"],
}


def variants_of(file: str, every: list[str]) -> set[str]:
    """The instruction sets that a file of kernels is compiled for; {a,b} in its name: any of these files."""
    listed = re.search(r"\{(.*)\}", file)
    if listed:
        return {name for each in listed[1].split(",") for name in variants_of(file.replace(listed[0], each), every)}
    line = re.search(r"^// ISA: (.*)$", (ROOT / "csrc" / file).read_text(), re.MULTILINE)
    names = line[1].split() if line else ["every"]
    return {name for each in names for name in (every if each == "every" else [each])}


def test_the_page_says_what_runs_with_each_instruction_set() -> None:
    """A column for each but the reference; in each cell kernels of its own or those of one that it builds on; and the
    tests that go through the instruction sets which have kernels of their own."""
    page = (ROOT / "docs" / "cpu.md").read_text()
    table = page[page.index("| kernels |") :].split("\n\n")[0].splitlines()
    head, _, *rows = [line.strip("| ").split(" | ") for line in table]
    columns = [name.strip("`") for name in head[1:-1]]
    assert tuple(columns) == ISA_NAMES[1:]
    lines = re.findall(r"^  ROW\((\w+), \w+, (\w+), (\w+),", (ROOT / "csrc/simd/isa.h").read_text(), re.MULTILINE)
    every = [name for name, kernels, _ in lines if kernels != "some_kernels"]
    basis = {name: below for name, _, below in lines}
    assert [row[0] for row in rows] == list(KERNELS)
    for what, *cells, tests in rows:
        compiled = [variants_of(file, every) for file in KERNELS[what]]
        own = set().union(*compiled) - {"scalar"}
        for name, cell in zip(columns, cells, strict=True):
            nearest = name
            while nearest not in own:
                nearest = basis[nearest]
            assert cell == ("own" if name in own else f"`{nearest}`"), (what, name)
        for test in tests.split(", "):
            text = (ROOT / "tests" / "native" / f"{test.strip('`')}_test.cpp").read_text()
            if '#include "llm_shapes.h"' in text:
                text += (ROOT / "tests" / "native" / "llm_shapes.h").read_text()
            missing = {name for name in own if f"Isa::{name}" not in text and f'"{name}"' not in text}
            assert not missing or "kIsaRows" in text, (what, test, missing)


def test_every_addition_has_a_page_that_the_site_shows() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("add-*.md"):
        assert f"({page.name})" in index
