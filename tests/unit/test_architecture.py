# SPDX-License-Identifier: Apache-2.0
"""Rules of docs/map.md that a reader relies on: who imports whom, what stays free of torch, what files carry."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "anyaccel"

# Part -> the other parts that it may import. errors, numerals, outside, _version and _native are everybody's.
MAY_IMPORT = {
    "_registry": set(),
    "env": set(),
    "topology": set(),
    "launch": {"topology", "env"},
    "accelerator": {"topology", "env", "_registry"},
    "ops": {"accelerator", "env"},
    "report": {"accelerator", "topology", "env"},
    "io": {"ops", "accelerator", "env"},
    "comm": {"accelerator", "ops", "launch", "env"},
    "inference": {"comm", "accelerator", "env"},
    "bench": {"launch", "inference", "topology", "env"},
    "port": set(),
    "interop": {"accelerator"},
    # The alias stands for everything, the command included.
    "compat": {"accelerator", "cli", "comm", "env", "inference", "launch", "ops", "topology"},
    "cli": {
        "bench", "launch", "accelerator", "ops", "topology", "inference", "comm", "port", "report", "env", "compat"
    },
}  # fmt: skip
EVERYBODYS = {"errors", "numerals", "outside", "_version", "_native", "_llm"}


def imported_parts(file: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            names = [f"anyaccel.{alias.name}" for alias in node.names] if module == "anyaccel" else [module]
        parts |= {name.split(".")[1] for name in names if name.startswith("anyaccel.")}
    return parts


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_parts_import_only_what_stands_below_them(part: str) -> None:
    path = PACKAGE / part
    files = list(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    assert files
    for file in files:
        wrong = imported_parts(file) - MAY_IMPORT[part] - EVERYBODYS - {part}
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_every_part_has_a_rule() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - EVERYBODYS - {"__init__", "__main__"} == set(MAY_IMPORT)


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
        "import anyaccel.inference, anyaccel.inference.runtimes.cpu, anyaccel.inference.tokenizer, anyaccel.cli.chat",
        "import anyaccel.inference.generate, anyaccel.inference.runtimes.packing, anyaccel.inference.chat_template",
    ],
)
def test_these_imports_bring_neither_torch_nor_a_vendor_package(code: str) -> None:
    before = modules_after("")
    brought = modules_after(code) - before
    assert "anyaccel" in brought
    heavy = {"torch", "numpy", "transformers", "intel_extension_for_pytorch", "torch_npu", "deepspeed"}
    assert not brought & heavy


SOURCES = [
    path
    for folder, patterns in {
        ROOT / "src": ("*.py", "*.pyi"),
        ROOT / "tests": ("*.py",),
        ROOT / "benchmarks": ("*.py",),
        ROOT / "tools": ("*.py",),
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
