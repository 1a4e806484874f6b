# SPDX-License-Identifier: Apache-2.0
"""The sdist and the wheels made of it, installed where there is no compiler and no checkout."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
OWN = f"3.{sys.version_info.minor}"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORK = """
import anyaccel, json, torch
from anyaccel.ops import in_tree
from anyaccel.ops.adam import CPUAdam
parameter = torch.nn.Parameter(torch.ones(3))
parameter.grad = torch.ones(3)
CPUAdam([parameter], lr=0.5).step()
print(json.dumps([anyaccel.__file__, str(in_tree.root()), parameter.tolist()]))
"""


def build_wheel(python: str, sdist: Path, folder: Path) -> Path:
    """A wheel for `python`, from the sdist alone; what builds it is taken from the environment of the tests."""
    if importlib.util.find_spec("scikit_build_core") is None or importlib.util.find_spec("nanobind") is None:
        pytest.skip("scikit-build-core or nanobind is not installed")
    tools = Path(importlib.util.find_spec("scikit_build_core").origin).parents[1]
    programs = [str(Path(sys.executable).parent), str(tools.parents[2] / "bin"), os.environ["PATH"]]
    variables = {"PATH": os.pathsep.join(programs)} | ({} if python == sys.executable else {"PYTHONPATH": str(tools)})
    command = [python, "-m", "pip", "--disable-pip-version-check", "-q", "wheel", "--no-build-isolation", "--no-deps"]
    done = subprocess.run(
        [*command, "-w", str(folder), str(sdist)], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("anyaccel-*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=600)
    (found,) = folder.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    return build_wheel(sys.executable, sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def test_the_sdist_has_what_builds_tests_and_explains(sdist):
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    wanted = ["README.md", "LICENSE", "CHANGELOG.md", "CMakeLists.txt", "pyproject.toml", "docs/map.md", "Makefile"]
    wanted += ["src/anyaccel/serve/page/index.html", "src/anyaccel/serve/page/app.js"]
    wanted += ["csrc/llm/forward/forward.cpp", "src/anyaccel/py.typed", "tests/conftest.py", "examples/train_gpt.py"]
    assert not set(wanted) - names
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o"))]
    # Patterns of what to include match at any depth where they do not start with a slash.
    assert not {name.partition("/")[0] for name in names} & {
        ".ci",
        ".git",
        ".venv",
        ".venv-bench",
        ".venv-clients",
        ".venv-agents",
        "benchmarks",
        "build",
    }


def test_the_wheel_has_types_licence_sources_and_one_version(unpacked):
    assert (unpacked / "anyaccel" / "serve" / "page" / "index.html").is_file()
    (info,) = unpacked.glob("anyaccel-*.dist-info")
    metadata = email.message_from_string((info / "METADATA").read_text())
    # Of the git tag; that of the checkout may be older, since it is written when the checkout is built.
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", metadata["Version"])
    assert f'version = "{metadata["Version"]}"' in (unpacked / "anyaccel" / "_built.py").read_text()
    needed = [each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each]
    assert needed == []
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    points = (info / "entry_points.txt").read_text().replace(" ", "").split()
    assert points == ["[console_scripts]", "anyaccel=anyaccel.cli:main"]
    for name in ("py.typed", "csrc/optim/adam.cpp", "compat/deepspeed/__init__.py", "_native.pyi"):
        assert (unpacked / "anyaccel" / name).exists(), name
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


# An instruction that only the variant has.
_LLM = {
    "avx2": r"\bvfmadd\w+\s.*%ymm", "avx512": r"\bvfmadd\w+\s.*%zmm", "avx_vnni": r"\{vex\} vpdpbusd\s.*%ymm",
    "avx512_vnni": r"\bvpdpbusds?\s.*%zmm",
    "avx512_bf16": r"\bvdpbf16ps\b", "amx": r"\btdpbf16ps\b",
}  # fmt: skip
_OPTIMIZER = {"avx2": r"\bvsqrtps\s.*%ymm", "avx512": r"\bvsqrtps\s.*%zmm"}
_REDUCE = {"avx2": r"\bvaddps\s.*%ymm", "avx512": r"\bvaddps\s.*%zmm"}


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed: apt install binutils")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other machines have none of these variants")
@pytest.mark.parametrize(
    ("pattern", "variants"),
    [("_llm*.so", _LLM), ("_native*.so", _REDUCE), ("ops/prebuilt/cpu_adam.so", _OPTIMIZER),
     ("ops/prebuilt/cpu_adagrad.so", _OPTIMIZER)],
)  # fmt: skip
def test_the_wheel_contains_every_instruction_set(unpacked, pattern, variants):
    """Also those that the machine which built it does not have; the libraries have no symbols, so by instructions."""
    (library,) = (unpacked / "anyaccel").glob(pattern)
    code = subprocess.run(["objdump", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    missing = [name for name, instruction in variants.items() if not re.search(instruction, code)]
    assert not missing


def run(folder: Path, *command: str, **variables: str) -> str:
    """Without site-packages, whose editable install would come first; torch is taken from where it is."""
    path = os.pathsep.join([str(folder), str(Path(torch.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "ANYACCEL_CACHE_DIR": str(folder / "cache"), **variables}
    done = subprocess.run(
        [sys.executable, "-S", *command], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ops_of_a_wheel_need_no_compiler_and_can_be_built_from_what_it_brings(wheel, tmp_path):
    installed = tmp_path / "installed"
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=100)

    file, sources, values = json.loads(run(installed, "-c", WORK, PATH=""))
    assert Path(file).is_relative_to(installed)
    assert Path(sources) == installed / "anyaccel" / "csrc"
    assert values == pytest.approx([0.5] * 3)
    listed = json.loads(run(installed, "-m", "anyaccel", "ops", "--json", PATH="", DS_ACCELERATOR="cpu"))["ops"]
    assert {row["op"] for row in listed if row["status"] == "prebuilt"} == {
        "async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "deepspeed_shm_comm", "fused_adam", "fused_lion",
        "pin_memory",
    }  # fmt: skip
    built = run(installed, "-m", "anyaccel", "ops", "build", "cpu_lion", "--jit", DS_ACCELERATOR="cpu")
    assert "cpu_lion: built in " in built


# Other versions of Python ---------------------------------------------------------------------------------


def interpreter(version: str) -> str:
    """A Python of this version that can make environments; skips the test where there is none."""
    found = [shutil.which(f"python{version}")]
    found += map(str, Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    if version == OWN:
        found.insert(0, sys.executable)
    for python in filter(None, found):
        code = "import sys, venv, pip; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if done.stdout.strip() == version:
            return python
    return pytest.skip(f"no Python {version} with venv and pip is installed")


@pytest.fixture(scope="module")
def stable_wheel(sdist, tmp_path_factory):
    """The wheel of Python 3.12 is that of all later ones."""
    return build_wheel(interpreter("3.12"), sdist, tmp_path_factory.mktemp("stable-wheel"))


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_a_fresh_environment_without_torch_and_compiler(version, tmp_path, request):
    """What starts without torch, in an environment that has nothing but the wheel, and an empty PATH."""
    python = interpreter(version)
    wheel = request.getfixturevalue("wheel" if version == OWN == "3.11" else "stable_wheel")
    if version == OWN == "3.11":
        assert "-cp311-cp311-" in wheel.name
    else:
        assert "-cp312-abi3-" in wheel.name
    home = tmp_path / "env"
    if python == sys.executable:
        venv.create(home, symlinks=True)
    else:
        subprocess.run([python, "-m", "venv", "--without-pip", str(home)], check=True, timeout=100)
    command = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "-q"]
    subprocess.run([*command, "install", "--no-deps", "--no-index", str(wheel)], check=True, timeout=100)
    smoke(home, tmp_path)


def smoke(home: Path, folder: Path) -> None:
    """Each command, in the environment `home`."""

    def call(program: str, *arguments: str, code: int = 0) -> str:
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
        done = subprocess.run(
            [str(home / "bin" / program), *arguments],
            cwd=folder, env={**variables, "PATH": ""}, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr if code else done.stdout

    (folder / "worker.py").write_text(
        "import os, sys\n"
        "line = 'rank ' + os.environ['RANK'] + ' ' + str('torch' in sys.modules) + '\\n'\n"
        "os.write(1, line.encode())\n"  # in one piece: the pieces of ranks are mixed
    )
    version = call("python", "-c", "import importlib.metadata as m; print(m.version('anyaccel'))").strip()
    assert call("anyaccel", "--version") == f"anyaccel {version}\n"
    assert call("anyaccel", "report", "--no-torch").startswith(f"versions\n  anyaccel      {version}\n")
    assert "pip install 'anyaccel[torch]'" in call("anyaccel", "ops", code=1)
    (folder / "cuda.py").write_text("import torch\ntorch.cuda.synchronize()\n")
    assert "pip install 'anyaccel[port]'" in call("anyaccel", "port", "cuda.py", code=1)
    assert "pip install 'anyaccel[serve]'" in call("anyaccel", "serve", code=1)
    code = "import anyaccel, anyaccel._native as n, anyaccel._llm as m; print(n.isa() == m.isa(), anyaccel.__file__)"
    same, file = call("python", "-c", code).split()
    assert same == "True"
    assert Path(file).is_relative_to(home)
    assert "core" in call("anyaccel", "topo")
    said = call("anyaccel", "run", "--num_accelerators", "2", "--no_local_rank", "worker.py")
    assert sorted(said.splitlines()) == ["rank 0 False", "rank 1 False"]
    assert "pip install 'anyaccel[completion]'" in call("anyaccel", "completion", "bash", code=1)
    assert "examples:" in call("anyaccel", "generate", "--help")
    call("anyaccel", "compat", "install")
    assert call("python", "-c", "import deepspeed; print(deepspeed.__version__)").strip().endswith(version)
    assert call("deepspeed", "--num_gpus", "1", "--no_local_rank", "worker.py") == "rank 0 False\n"
    call("anyaccel", "compat", "remove")
    assert not (home / "bin" / "deepspeed").exists()
