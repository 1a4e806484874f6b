# SPDX-License-Identifier: Apache-2.0
"""Unmodified programs for CUDA on this machine's accelerator: as_cuda_cases.py in its own process, and programs."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anyaccel import cuda_job
from anyaccel.errors import UsageError

HERE = Path(__file__).parent
CASES = re.findall(r"^@case\ndef (\w+)", (HERE / "as_cuda_cases.py").read_text(), re.MULTILINE)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the mode changes nothing")


def run(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=cwd,
        env={**os.environ, **variables},
    )


@functools.cache
def found() -> dict[str, str]:
    done = run(str(HERE / "as_cuda_cases.py"))
    assert done.returncode == 0, done.stderr[-2000:]
    results: dict[str, str] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("name", CASES)
def test_what_programs_do(name: str) -> None:
    assert found()[name] == "ok", found()[name]


TRAIN = """
import torch, subprocess, sys
import torch.nn as nn
assert torch.cuda.is_available(), "needs a GPU"
torch.cuda.manual_seed_all(0)
model = nn.Linear(4, 1).cuda()
x = torch.ones(8, 4, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.autocast("cuda", dtype=torch.float16):
    print(model(x).dtype)
print(sys.argv[1:], __name__)
child = "import torch; print(torch.cuda.device_count() > 0, torch.zeros(1).cuda().is_cuda)"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
"""


def test_a_script_with_its_arguments_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    for how, dtype in ((("train.py",), "float32"), (("--amp", "-m", "train"), "bfloat16")):
        done = run("-m", "anyaccel.cuda", *how, "--epochs", "3", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n")[:3] == [f"torch.{dtype}", "['--epochs', '3'] __main__", "True True"]


def test_the_mode_begins_after_a_look_whether_torch_is_installed() -> None:
    """As transformers looks before it imports torch, in a child of a program that is in the mode."""
    settings = cuda_job.job_environment(cuda_job.CudaJobOptions(), {})
    look = "import importlib.util; assert importlib.util.find_spec({0!r}); assert importlib.util.find_spec({0!r})\n"
    done = run("-c", look.format("torch") + "import torch; print(torch.cuda.is_available())", **settings)
    assert done.stdout == "True\n", done.stderr
    late = look.format("torch.utils.cpp_extension") + "import torch.utils.cpp_extension as extensions\n"
    done = run("-c", f"import torch\n{late}extensions.CUDAExtension('kernels', [])", **settings)
    assert "CudaExtensionError" in done.stderr


def test_anyaccel_run_reaches_every_worker(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "x = torch.full((1,), float(dist.get_rank() + 1), device='cuda')\n"
        "dist.all_reduce(x)\n"
        "told = f'{int(x)} {torch.cuda.current_device() == dist.get_rank()} {torch.cuda.device_count()}'\n"
        "os.write(1, f'{told}\\n'.encode())\n"  # in one piece: both ranks write
        "dist.destroy_process_group()\n"
    )
    command = ("-m", "anyaccel", "run", "--as-cuda", "--no_local_rank", "--num_accelerators", "2", "ranks.py")
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == ["3 True 2", "3 True 2"]


def test_the_report_counts_uses_by_place(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(
        "import torch\n"
        "for _ in range(3):\n"
        "    x = torch.zeros(2).cuda()\n"
        "try:\n"
        "    torch.cuda.utilization()\n"
        "except NotImplementedError:\n"
        "    print('fallback')\n"
    )
    done = run("-m", "anyaccel.cuda", "--json", "use.py", cwd=tmp_path)
    uses = {each["name"]: each for each in json.loads(done.stderr)["uses"]}
    assert uses["Tensor.cuda"] | {"how": ""} == {
        "name": "Tensor.cuda",
        "outcome": "matched",
        "how": "",
        "place": "use.py:3",
        "count": 3,
    }
    assert uses["torch.cuda.utilization"]["outcome"] == "not possible"
    done = run("-m", "anyaccel.cuda", "--report", "use.py", cwd=tmp_path)
    assert done.stdout == "fallback\n"
    assert re.search(r"matched +Tensor.cuda +3 +use.py:3", done.stderr)


def test_a_program_without_torch_does_not_import_it(tmp_path: Path) -> None:
    environment = cuda_job.job_environment(cuda_job.CudaJobOptions(), {})
    (tmp_path / "sitecustomize.py").write_text("print('the own one')\n")
    folders = f"{environment['PYTHONPATH']}{os.pathsep}{tmp_path}"
    done = run("-c", "import sys; print('torch' in sys.modules)", ANYACCEL_AS_CUDA="on", PYTHONPATH=folders)
    assert done.stdout == "the own one\nFalse\n", done.stderr


def test_wrong_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'amq': options are amp, json, report"):
        cuda_job.CudaJobOptions.parse("report,amq")
    assert str(cuda_job.CudaJobOptions.parse("amp, report")) == "report,amp"
    assert "usage:" in run("-m", "anyaccel.cuda", "--help").stdout
    wrong = run("-m", "anyaccel.cuda", "none.py", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr) == (2, "anyaccel.cuda: none.py: no such file\n")


@pytest.mark.slow  # a process for each
def test_what_is_no_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").touch()
    assert ": a notebook; write `import anyaccel.cuda`" in run("-m", "anyaccel.cuda", "a.ipynb", cwd=tmp_path).stderr
    assert ": a folder without a __main__.py" in run("-m", "anyaccel.cuda", ".", cwd=tmp_path).stderr
    wrong = run("-m", "anyaccel.cuda", "--reprot", "none.py", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr) == (2, "anyaccel.cuda: --reprot: no such option; --help lists them\n")
