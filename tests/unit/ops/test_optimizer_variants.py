# SPDX-License-Identifier: Apache-2.0
"""Every instruction set gives the same results, each forced by ANYACCEL_ISA in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anyaccel import _native, env
from warm import WarmPython, checked

SCRIPT = """
import sys
import torch
from optimizer_cases import CASES, DTYPES, SIZES, new_gradients, parameters

torch.set_num_threads(2)
special = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e-38, 1e-19, 1e-3, 1.0, 65519.0, 65520.0, 1e19, 3e38,
                        float("inf"), -float("inf"), float("nan")])
results = {}
for case in CASES:
    for dtype, state_dtype in DTYPES:
        params = parameters(SIZES, dtype)
        values, grads = (tensor.flatten().to(dtype) for tensor in torch.meshgrid(special, special, indexing="ij"))
        params.append(torch.nn.Parameter(values))
        optimizer = case.kind(params, state_dtype=state_dtype, **case.settings)
        if dtype == torch.float32:
            copies = {param: torch.zeros_like(param, dtype=(torch.bfloat16, torch.float16)[i % 2])
                      for i, param in enumerate(params)}
            optimizer.write_copies(copies)
        for step in range(3):
            new_gradients(params, step)
            params[-1].grad = grads.clone()
            optimizer.step()
        for i, param in enumerate(params):
            found = [param.detach(), *(optimizer.state[param][name] for name in optimizer.MOMENTS)]
            found += [copies[param]] if dtype == torch.float32 else []
            results[f"{case} {dtype} {state_dtype} {i}"] = found
torch.save(results, sys.argv[1])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Iterator[WarmPython]:
    """Only torch is imported in it: the instruction set is chosen when our own modules are."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with WarmPython({**os.environ, "PYTHONPATH": path}, tmp_path_factory.mktemp("warm"), preload="torch") as warm:
        yield warm


def results(isa: str, folder: Path, python: WarmPython) -> dict[str, list[torch.Tensor]]:
    file = folder / f"{isa}.pt"
    checked(python.run("-c", SCRIPT, str(file), ANYACCEL_ISA=isa))
    return torch.load(file, weights_only=True)


def available() -> list[str]:
    return list(env.ISA_NAMES[: env.ISA_NAMES.index(_native.isa()) + 1])


@pytest.fixture(scope="module")
def scalar(tmp_path_factory, python) -> dict[str, list[torch.Tensor]]:
    return results("scalar", tmp_path_factory.mktemp("scalar"), python)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """All NaNs are one."""
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16).long()


@pytest.mark.parametrize("isa", env.ISA_NAMES[1:])
def test_a_variant_gives_the_results_of_the_scalar_one(isa, scalar, tmp_path, python):
    """To the bit: no variant contracts to FMA, and all divide and take roots exactly."""
    if isa not in available():
        pytest.skip(f"this CPU does not have {isa}")
    other = results(isa, tmp_path, python)
    assert other.keys() == scalar.keys()
    for name, tensors in scalar.items():
        for index, (mine, theirs) in enumerate(zip(tensors, other[name], strict=True)):
            assert torch.equal(bits(mine), bits(theirs)), f"{name}, tensor {index}"


def test_a_wrong_name_is_an_error(python):
    script = (
        "import torch; from anyaccel.ops.adam import CPUAdam; p = torch.nn.Parameter(torch.ones(3));"
        "p.grad = p.detach(); CPUAdam([p]).step()"
    )
    done = python.run("-c", script, ANYACCEL_ISA="sse9")
    assert done.returncode == 1
    assert "ANYACCEL_ISA='sse9'" in done.stderr


def test_loops_run_on_torchs_threads(python):
    """No second pool, whose waiting threads would fight with torch's for the cores."""
    script = """
import ctypes, os, torch
from anyaccel.ops.adam import CPUAdam
from anyaccel.ops.builders.host import CPUAdamBuilder
torch.set_num_threads(3)
torch.ones(1 << 20).add_(1)
before = len(os.listdir("/proc/self/task"))
parameter = torch.nn.Parameter(torch.ones(1 << 20))
parameter.grad = torch.ones(1 << 20)
CPUAdam([parameter]).step()
team = CPUAdamBuilder().load().library.anyaccel_parallel_team
team.restype = ctypes.c_char_p
print(team().decode(), len(os.listdir("/proc/self/task")) - before)
"""
    assert checked(python.run("-c", script)).split() == ["openmp", "0"]
