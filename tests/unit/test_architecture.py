# SPDX-License-Identifier: Apache-2.0
"""Rules of docs/map.md that a reader relies on: who imports whom, what stays free of torch, what files carry."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "anyaccel"

# Part -> the other parts that it may import: only parts above it in this table.
MAY_IMPORT = {
    "env": set(),
    "_registry": set(),
    "host_memory": set(),
    "safetensors": set(),
    "topology": set(),
    "port": set(),
    "launch": {"topology", "env"},
    "accelerator": {"topology", "env", "_registry", "host_memory"},
    "interop": {"accelerator", "comm", "ops", "lightning"},
    "lightning": {"accelerator", "comm"},
    "cuda_job": set(),
    "cuda": {"accelerator", "comm", "cuda_job"},
    "ops": {"accelerator", "env"},
    "report": {"accelerator", "topology", "env"},
    "io": {"ops", "accelerator", "env", "safetensors"},
    "comm": {"accelerator", "ops", "launch", "env"},
    "inference": {"comm", "accelerator", "launch", "topology", "env", "host_memory", "safetensors"},
    "bench": {"launch", "inference", "topology", "env"},
    "compat": set(),
    "serve": {"inference", "launch", "ops", "topology", "env", "host_memory"},
    "cli": {
        "bench", "launch", "accelerator", "ops", "topology", "inference", "serve", "comm", "port", "report", "env",
        "compat", "cuda_job",
    },
    # The alias stands for everything, the command included.
    "compat.deepspeed": {
        "accelerator", "cli", "comm", "compat", "env", "host_memory", "inference", "launch", "ops", "topology",
    },
}  # fmt: skip
EVERYBODYS = {
    "errors",
    "extras",
    "_needs_torch",
    "numerals",
    "validation",
    "terminal",
    "vendors",
    "cuda_names",
    "_lazy",
    "_version",
    "_native",
    "_llm",
}

# The rooms of a part and what stands beside them; each imports only those before it, for types too.
ROOMS = {
    "inference": (
        "options", "spec", "checkpoints", "text", "families", "modules", "native", "device", "generic",
        "encoders", "hf", "opening", "engine", "generate", "own_code", "calibration", "quantize", "ranks",
    ),
    "launch": (
        "counts", "host_name", "job", "limits", "output", "failure", "pid_file", "processes", "small_file",
        "plan", "local", "runners", "cluster",
    ),
    "serve": ("interface", "json_schema", "listening", "engine", "protocol", "requests", "api", "server", "ray"),
}  # fmt: skip

# The rooms of csrc/llm: ranks/ lies below forward/, whose pass exchanges what the ranks have computed.
LLM_ROOMS = ("errors.h", "pack", "kernels", "attention", "decoder", "ranks", "forward", "draft", "model")

MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports anywhere in it: at its head, in a function, by name, for types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES or node.module == "anyaccel" else node.module for name in names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return {name for name in found if name.startswith("anyaccel.")}


@functools.cache
def imports() -> dict[str, set[str]]:
    """What each module imports. Not when the file is read: every process that runs tests does that."""
    return {name: imported(path) for name, path in MODULES.items()}


def part_of(name: str) -> str:
    return "compat.deepspeed" if name.startswith("anyaccel.compat.deepspeed") else name.split(".")[1]


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_parts_import_only_what_stands_below_them(part: str) -> None:
    mine = [name for name in MODULES if name != "anyaccel" and part_of(name) == part]
    assert mine
    for name in mine:
        wrong = {part_of(each) for each in imports()[name]} - MAY_IMPORT[part] - EVERYBODYS - {part}
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_every_part_has_a_rule() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - EVERYBODYS - {"__init__", "__main__"} == set(MAY_IMPORT) - {"compat.deepspeed"}


@pytest.mark.parametrize("part", ROOMS)
def test_rooms_import_only_what_stands_below_them(part: str) -> None:
    def place(name: str) -> int:
        return ROOMS[part].index(name.split(".")[2])

    mine = {name: found for name, found in imports().items() if name.startswith(f"anyaccel.{part}.")}
    assert {name.split(".")[2] for name in mine} == set(ROOMS[part])
    wrong = [
        f"{name} imports {other}"
        for name, found in mine.items()
        for other in found & mine.keys()
        if place(other) > place(name)
    ]
    assert not wrong


def test_rooms_of_the_native_decoder_include_only_what_stands_below_them() -> None:
    folder = ROOT / "csrc" / "llm"
    assert {path.name for path in folder.iterdir()} == set(LLM_ROOMS)
    wrong = []
    for path in [*folder.rglob("*.h"), *folder.rglob("*.cpp")]:
        above = LLM_ROOMS[LLM_ROOMS.index(path.relative_to(folder).parts[0]) + 1 :]
        included = re.findall(r'^#include "llm/(.*)"', path.read_text(), re.MULTILINE)
        wrong += [f"{path.name} includes {name}" for name in included if name.startswith(above)]
    assert not wrong


def test_imports_make_no_circle() -> None:
    """Whoever reads a file needs only what it imports, and what that imports. The package's own names are for users."""
    order = graphlib.TopologicalSorter({name: found & MODULES.keys() for name, found in imports().items()})
    order.prepare()


def test_only_tests_of_commands_import_them() -> None:
    helpers = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    helpers.remove(ROOT / "tests/machines/guest/planned.py")  # which is a command, run by tests of commands
    for path in [*(ROOT / "benchmarks").rglob("*.py"), *helpers]:
        assert "cli" not in {name.split(".")[1] for name in imported(path)}, path


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sorted(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import anyaccel; anyaccel.__version__; dir(anyaccel)",
        "import anyaccel.launch, anyaccel.topology, anyaccel.env, anyaccel.cli.run, anyaccel.cli.generate",
        "import anyaccel.accelerator, anyaccel.ops",
        "import anyaccel.inference.native.runtime, anyaccel.inference.text.tokenizer",
        "import anyaccel.inference.ranks.backends, anyaccel.inference.ranks.rank, anyaccel.inference.options",
        "import anyaccel.inference.generate, anyaccel.inference.native.packing, anyaccel.inference.text.chat_template",
        "import anyaccel.cli.chat",
    ],
)
def test_these_imports_bring_neither_torch_nor_a_vendor_package(code: str) -> None:
    before = modules_after("")
    brought = modules_after(code) - before
    assert "anyaccel" in brought
    heavy = {"torch", "numpy", "transformers", "intel_extension_for_pytorch", "torch_npu", "deepspeed"}
    assert not brought & heavy


def test_only_a_server_imports_what_speaks_http() -> None:
    web = {"starlette", "uvicorn", "uvloop", "pydantic", "llguidance"}
    assert not modules_after("import anyaccel.cli.serve, anyaccel.cli.generate, anyaccel.serve.interface") & web
    assert "torch" not in modules_after("import anyaccel.serve.api.application, anyaccel.serve.server")


def test_the_frontend_and_the_engine_of_a_server_know_only_their_interface() -> None:
    mine = {name: found for name, found in imports().items() if name.startswith("anyaccel.serve.")}
    above = {name for name in mine if name.split(".")[2] in ("protocol", "requests", "api")}
    used = set().union(*(mine[name] for name in above))
    assert not {name for name in used if name.startswith("anyaccel.serve.engine.")}


SOURCES = [
    path
    for folder, patterns in {
        ROOT / "src": ("*.py", "*.pyi"),
        ROOT / "tests": ("*.py", "*.cpp", "*.h"),
        ROOT / "benchmarks": ("*.py", "*.cpp", "*.h"),
        ROOT / "tools": ("*.py", "*.cpp"),
        ROOT / "csrc": ("*.cpp", "*.h"),
        ROOT / "examples": ("*.py", "*.cpp", "*.h"),
    }.items()
    for pattern in patterns
    for path in folder.rglob(pattern)
]


def test_every_source_file_names_its_licence() -> None:
    without = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]
    ]
    assert not without


def test_map_names_every_package() -> None:
    text = (ROOT / "docs" / "map.md").read_text()
    packages = [p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()]
    native = [p.name for p in (ROOT / "csrc").iterdir() if p.is_dir()]
    assert not [name for name in packages + [f"csrc/{n}" for n in native] if f"`{name}" not in text]


def test_the_map_is_short_and_names_what_there_is() -> None:
    text = (ROOT / "docs" / "map.md").read_text()
    assert [
        cell for line in text.splitlines() if line.startswith("|") for cell in line.split("|") if len(cell) > 200
    ] == []
    for name in re.findall(r"`((?:launch|serve|inference)\.[\w.]+)`", text):
        parts = name.split(".")
        ends = [n for n in range(len(parts), 0, -1) if ".".join(["anyaccel", *parts[:n]]) in MODULES]
        assert ends, name
        source = MODULES[".".join(["anyaccel", *parts[: ends[0]]])].read_text()
        for part in parts[ends[0] :]:
            assert re.search(rf"^ *(?:async )?(?:def|class) {part}\b", source, re.MULTILINE), name


# Files of other projects, of the system, and of users in examples.
ELSEWHERE = {
    "_update.h", "activations.py", "conversion_mapping.py", "convert_hf_to_gguf.py", "convert_hf_to_gguf_update.py",
    "ddp.py", "ik_llama.cpp", "inference.py", "llama.cpp", "modeling_rope_utils.py", "noop.py",
    "profiler_activity.py", "script.py", "seeded.py", "serve.py", "socket.py", "stft.py", "sysexits.h", "table.md",
    "train.py", "simd/ANYACCEL_ISA_VARIANT.h", "transformer.h", "verify.py", "x.py",
}  # fmt: skip
FOREIGN = (
    "ATen/",
    "linux/",
    "path/in/the/repository.py",
    "tests/native/NAME",
    "unit/",  # of DeepSpeed's tests, and of its examples:
    *("applications/", "benchmarks/communication/", "benchmarks/inference/", "compression/", "deepnvme/"),
    *("inference/huggingface/", "training/"),
)
NAMED = re.compile(r"(?<![\w./<>{}$*-])((?:[\w-]+/)*[\w-]+\.(?:py|cpp|h|md))(?![\w/(])")
EXAMPLE = re.compile(r"^ *```.*?^ *```$|<!-- file: .*? -->", re.MULTILINE | re.DOTALL)


def test_files_that_comments_messages_and_pages_name_exist() -> None:
    there = [path.relative_to(ROOT).as_posix() for path in [*SOURCES, *ROOT.glob("*.md"), *ROOT.glob("*/**/*.md")]]
    ends = {"/".join(path.split("/")[-count:]) for path in there for count in range(1, path.count("/") + 2)}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/README.md"]
    wrong = {}
    for path in pages + [path for path in SOURCES if ROOT / "tests" not in path.parents]:
        names = NAMED.findall(EXAMPLE.sub("", path.read_text()) if path.suffix == ".md" else path.read_text())
        missing = {name for name in names if name not in ends | ELSEWHERE and not name.startswith(FOREIGN)}
        if missing:
            wrong[str(path.relative_to(ROOT))] = sorted(missing)
    assert not wrong
