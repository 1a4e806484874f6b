# SPDX-License-Identifier: Apache-2.0
"""What no rule can vouch for holds devices back: packages that nobody knows, several processes, float64."""

from pathlib import Path

import pytest

from anyaccel.port import run
from anyaccel.port.config import Config

PLACES = "import torch\n\n\ndef f(model):\n    model.cuda()\n"


def ported(folder: Path, text: str, partial: bool = False, **others: str) -> tuple[str, str]:
    """The text of a module after a run, and all that the run says of it."""
    files = {"a": text, **others}
    for name, each in files.items():
        (folder / f"{name}.py").write_text(each)
    found = list(run.look_at_all([(str(folder / f"{name}.py"), Config(partial=partial)) for name in files]))
    after = found[0].after
    return (text if after is None else after.decode()), "\n".join(each.message for each in found[0].findings)


OPEN = [
    "import gymnasium",
    "from unknown.envs import make",
    "from .missing import net",
    "import local.missing as m",
    "vocoder = torch.hub.load('some/repo', 'net')",
    "net = torch.jit.load(path)",
    "net = torch.compile(net)",
    "module = importlib.import_module(name)",
    "from torch.utils.cpp_extension import load_inline",
    "torch.distributed.init_process_group('gloo')",
    "from torch.nn.parallel import DistributedDataParallel as Parallel",
    "net = torch.nn.DataParallel(net)",
    "torch.multiprocessing.spawn(g, nprocs=2)",
    "device = torch.device(f'cuda:{rank}')",
    "device = torch.device('cuda:1')",
    "scaler = torch.amp.GradScaler('cuda')",
    "event = torch.cuda.Event()",
    "peak = torch.cuda.max_memory_allocated()",
    "torch.set_default_tensor_type(torch.FloatTensor)",
    "net = load(name, trust_remote_code=True)",
    "net = load(name, load_in_4bit=True)",
    "net = load(name, attn_implementation='flash_attention_2')",
    "assert torch.cuda.is_available(), 'needs a GPU'",
    "assert x.is_cuda",
    "if not torch.cuda.is_available():\n    raise RuntimeError('needs a GPU')",
    "y = torch.from_numpy(x).to(device)",
    "y = torch.tensor(reward).to(device).float()",
    "y = torch.as_tensor(rows)",
    "y = torch.tensor([x.mean()])",
    "y = torch.tensor([each for each in rows])",
    "x = np.stack(y)\nz = torch.from_numpy(x)",
    "x = np.stack(y).astype(np.float32)\nx = x * 2.0\nz = torch.from_numpy(x)",
]
SETTLED = [
    "import numpy as np, os, transformers",
    "from torchvision.models import resnet18",
    "import b",
    "module = importlib.import_module('b')",
    "device = torch.device('cuda:0')",
    "net = load(name, trust_remote_code=False)",
    "assert x.ndim == 3",
    "if not ready:\n    raise RuntimeError('not ready')",
    "y = torch.from_numpy(x).float().unsqueeze(0).to(device)",
    "y = torch.from_numpy(x.astype(np.float32)).to(device)",
    "y = torch.from_numpy(x).to(device, torch.float32)",
    "y = torch.tensor(reward, dtype=torch.float32)",
    "y = torch.tensor([[1.0, -2.0]])",
    "x = np.stack(y).astype(np.float32)\nz = torch.from_numpy(x)",
    "import gymnasium  # ignore-cuda",
]


@pytest.mark.parametrize("line", OPEN)
def test_what_leaves_open_what_values_meet_holds_devices_back(tmp_path: Path, line: str) -> None:
    text = f"{PLACES}\n\nimport b\n"
    after, told = ported(tmp_path, text, b=f"import torch\n{line}\n")
    assert after == text and " it waits for `" in told and "in b.py line" in told
    assert ported(tmp_path, text, partial=True, b=f"import torch\n{line}\n")[0] != text


@pytest.mark.parametrize("line", SETTLED)
def test_what_is_known_of_every_device_holds_nothing_back(tmp_path: Path, line: str) -> None:
    text = f"{PLACES}\n\nimport b\n"
    assert "model.to(get_accelerator().device_name())" in ported(tmp_path, text, b=f"import torch\n{line}\n")[0]


def test_an_attribute_is_followed_in_its_class(tmp_path: Path) -> None:
    text = (
        f"{PLACES}\n\nclass A:\n    def __init__(self, y):\n        self.x = np.stack(y)%s\n\n"
        "    def g(self):\n        return torch.from_numpy(self.x)\n"
    )
    assert "get_accelerator()" in ported(tmp_path, text % ".astype(np.float32)")[0]
    assert "get_accelerator()" not in ported(tmp_path, text % "")[0]


def test_a_module_without_tensors_may_import_anything(tmp_path: Path) -> None:
    assert "get_accelerator()" in ported(tmp_path, f"{PLACES}\n\nimport b\n", b="import unknown\n")[0]


def test_a_module_that_is_not_here_holds_only_what_imports_it(tmp_path: Path) -> None:
    assert "get_accelerator()" in ported(tmp_path, PLACES, b="import torch\nimport unknown\n")[0]


@pytest.mark.parametrize(("line", "goes"), [("!python train.py", False), ("!python b.py", True)])
def test_a_notebook_waits_for_a_program_that_is_not_here(tmp_path: Path, line: str, goes: bool) -> None:
    book = tmp_path / "a.ipynb"
    cell = f'{{"cell_type": "code", "source": ["import torch\\n", "{line}\\n", "net.cuda()"]}}'
    book.write_text(f'{{"cells": [{cell}]}}')
    (tmp_path / "b.py").write_text("import torch\n")
    found = next(iter(run.look_at_all([(str(book), Config()), (str(tmp_path / "b.py"), Config())])))
    assert (found.after is not None) == goes


def test_a_wait_goes_only_where_nothing_else_of_its_file_waits(tmp_path: Path) -> None:
    wait = "import torch\nimport b\n\n\ndef f(model):\n    torch.cuda.synchronize()\n"
    stays = "def g(x):\n    if x.is_cuda:\n        return fast(x)\n    return x\n"
    assert "get_accelerator().synchronize()" in ported(tmp_path, wait, b=stays)[0]
    text = f"{wait}\n\ndef h(model):\n    model.cuda()\n    torch.cuda.empty_cache()\n"
    after, _ = ported(tmp_path, text, b=stays)
    assert "    torch.cuda.synchronize()\n" in after and "get_accelerator().empty_cache()" in after


@pytest.mark.parametrize(
    ("before", "goes"),
    [
        ("", False),
        ("    torch.manual_seed(1)\n", True),
        ("    torch.manual_seed(2)\n", False),
        ("    if use_cuda:\n        torch.cuda.manual_seed(1)\n        return\n", False),
    ],
)
def test_a_seed_of_cuda_alone_stays(tmp_path: Path, before: str, goes: bool) -> None:
    text = f"import torch\n\n\ndef f(use_cuda):\n{before}    torch.cuda.manual_seed(1)\n"
    last = ported(tmp_path, text)[0].splitlines()[-1]
    assert last == ("    get_accelerator().manual_seed(1)" if goes else "    torch.cuda.manual_seed(1)")
