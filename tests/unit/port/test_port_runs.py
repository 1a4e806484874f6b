# SPDX-License-Identifier: Apache-2.0
"""Ported programs run where the CPU is the accelerator, and give what their authors' own CPU versions give."""

from __future__ import annotations

import contextlib
import io
import warnings

import pytest
import torch

from anyaccel.accelerator import get_accelerator
from anyaccel.port.engine import port_text

pytestmark = pytest.mark.skipif(get_accelerator().device_name() != "cpu", reason="the accelerator is not the CPU")


def run(text: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        exec(compile(text, "program", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("assert torch.cuda.is_available(), 'needs a GPU'\nprint(torch.ones(2).cuda().sum().item())", "2.0\n"),
        ("print(torch.device('cuda', 1), torch.device('cuda'))", "cpu cpu\n"),
        ("print(torch.ones(2, device=f'cuda:{torch.cuda.current_device()}').is_cuda)", "True\n"),
        ("print(torch.randn(2).pin_memory().cuda(0, True).shape)", "torch.Size([2])\n"),
        ("print(torch.cuda.FloatTensor(2, 3).fill_(1).type('torch.cuda.LongTensor').sum().item())", "6\n"),
        ("start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\nstart.record()\nend.record()\n"
         "torch.cuda.synchronize()\nprint(start.elapsed_time(end) >= 0)", "True\n"),
        ("s = torch.cuda.Stream()\nwith torch.cuda.stream(s):\n    x = torch.ones(1).cuda(non_blocking=True)\n"
         "torch.cuda.current_stream().wait_stream(s)\nx.record_stream(torch.cuda.current_stream())\n"
         "print(x.item())", "1.0\n"),
        ("g = torch.cuda.default_generators[0]\nprint(type(g).__name__)", "Generator\n"),
        ("with torch.cuda.device(0):\n    free, total = torch.cuda.mem_get_info()\nprint(0 < free <= total)", "True\n"),
        ("print(torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info(0)[1])", "True\n"),
        ("print(len(torch.cuda.get_device_name(0)) > 0, torch.cuda.get_device_capability())", "True (0, 0)\n"),
        ("states = torch.cuda.get_rng_state_all()\nx = torch.rand(1)\ntorch.cuda.set_rng_state_all(states)\n"
         "print(torch.equal(x, torch.rand(1)))", "True\n"),
        ("torch.cuda.set_per_process_memory_fraction(0.5)\ntorch.cuda.ipc_collect()\nprint('done')", "done\n"),
        ("model = torch.nn.Linear(2, 2).cuda()\nscaler = torch.cuda.amp.GradScaler()\n"
         "with torch.cuda.amp.autocast(dtype=torch.bfloat16):\n    y = model(torch.ones(1, 2, device='cuda'))\n"
         "scaler.scale(y.sum()).backward()\nprint(y.dtype, model.weight.grad is not None)", "torch.float32 True\n"),
        ("buffer = io.BytesIO()\ntorch.save(torch.ones(2), buffer)\nbuffer.seek(0)\n"
         "print(torch.load(buffer, map_location=lambda storage, loc: storage.cuda(0)).sum().item())", "2.0\n"),
        ("device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
         "if device.type == 'cuda':\n    print('accelerator')", "accelerator\n"),
        ("from torch.nn.utils.rnn import pack_padded_sequence\n"
         "print(pack_padded_sequence(torch.ones(2, 1, 1), [2]).is_cuda)", "True\n"),
        ("torch.cuda.nvtx.range_push('step')\ntorch.cuda.nvtx.range_pop()\n"
         "print(torch.cuda.memory_summary() != '')", "True\n"),
    ],
)  # fmt: skip
def test_a_ported_program_runs(program: str, printed: str) -> None:
    ported = port_text(f"import io\nimport torch\n{program}\n").text
    assert "torch.cuda.is_available" not in ported
    assert run(ported) == printed


def test_a_device_of_another_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="'meta' is none of"):
        get_accelerator().device_name("meta")
