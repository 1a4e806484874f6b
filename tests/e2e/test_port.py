# SPDX-License-Identifier: Apache-2.0
"""`anyaccel port` as a user runs it: scripts for CUDA, ported by --write, run on the CPU.

test_extension.py runs the same on the example device.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from warm import WarmPython

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "examples" / "porting"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with WarmPython(env, tmp_path_factory.mktemp("warm")) as warm:
        yield warm


def test_cuda_scripts_run_on_the_cpu(python: WarmPython, tmp_path: Path) -> None:
    for script in SCRIPTS.glob("*_cuda.py"):
        shutil.copy(script, tmp_path)
    port = ("-m", "anyaccel", "port", ".")
    ported = python.run(*port, "--write", cwd=tmp_path)
    assert (ported.returncode, ported.stderr) == (0, "")
    assert ported.stdout == "fixed 26 in 2 files, 0 left to you; 2 files\n"
    assert python.run(*port, "--check", cwd=tmp_path).returncode == 0
    trained = python.run("train_cuda.py", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    losses = [float(line.split()[3]) for line in trained.stdout.splitlines() if line.startswith("step")]
    assert losses == pytest.approx([1.3558, 0.6263, 0.1510, 0.0192], abs=2e-3)
    answered = python.run("infer_cuda.py", cwd=tmp_path)
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.startswith("4 classes, 256 of 256 right, mean loss 0.002")


def test_the_pre_commit_hooks(tmp_path: Path) -> None:
    """The hooks as defined, but for where the command comes from: pre-commit would build this package for minutes."""
    pytest.importorskip("pre_commit", reason="pre-commit is not installed: pip install pre-commit")
    yaml = pytest.importorskip("yaml")
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-hooks.yaml").read_text())
    assert [hook["id"] for hook in hooks] == ["anyaccel-port", "anyaccel-port-write"]
    for hook in hooks:
        assert hook.pop("language") == "python"
        del hook["additional_dependencies"]
        hook["language"] = "system"
        hook["entry"] = f"{sys.executable} -m {hook['entry']}"
    (tmp_path / ".pre-commit-config.yaml").write_text(yaml.safe_dump({"repos": [{"repo": "local", "hooks": hooks}]}))
    shutil.copy(REPOSITORY / "tests" / "data" / "port" / "images_cuda.py", tmp_path / "train_cuda.py")
    (tmp_path / "kept.py").write_text("import torch\n\ntorch.cuda.synchronize()\n")
    (tmp_path / "pyproject.toml").write_text('[tool.anyaccel.port]\nexclude = ["kept.py"]\n')
    home = {"PRE_COMMIT_HOME": str(tmp_path / ".cache"), "HOME": str(tmp_path), "GIT_CONFIG_GLOBAL": os.devnull}

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, env={**os.environ, **home}, check=True, capture_output=True)

    def hook(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pre_commit", "run", name, "--all-files"]
        environment = {**os.environ, **home}
        return subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=60)

    git("init", "-q")
    git("add", "train_cuda.py", "kept.py", "pyproject.toml", ".pre-commit-config.yaml")
    found = hook("anyaccel-port")
    assert found.returncode == 1, found.stdout + found.stderr
    assert "train_cuda.py:" in found.stdout
    assert "[fixable]" in found.stdout
    assert "kept.py: left out" in found.stdout
    written = hook("anyaccel-port-write")
    assert written.returncode == 1, written.stdout  # pre-commit fails a hook that changes files
    assert "files were modified by this hook" in written.stdout
    assert hook("anyaccel-port").returncode == 0
    assert (tmp_path / "kept.py").read_text() == "import torch\n\ntorch.cuda.synchronize()\n"


def test_the_originals_need_a_gpu(python: WarmPython, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = python.run(str(SCRIPTS / "train_cuda.py"), cwd=tmp_path)
    assert done.returncode == 1
    assert "this script needs a GPU" in done.stderr
