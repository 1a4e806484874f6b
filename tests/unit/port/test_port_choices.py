# SPDX-License-Identifier: Apache-2.0
"""Choices that a program makes by the name of a device, or by what it lacks, stay whole or are ported whole."""

from __future__ import annotations

import pytest

from anyaccel.port.engine import NotPythonError, port_text

NAME = "get_accelerator().device_name()"
THERE = f'{NAME} != "cpu"'
PICK = "device = 'cuda' if torch.cuda.is_available() else 'cpu'"


def port(text: str, partial: bool = False) -> str:
    ported = port_text(text, partial=partial)
    assert port_text(ported.text, partial=partial).text == ported.text
    return ported.text


def messages(text: str) -> str:
    return "\n".join(each.message for each in port_text(text).findings if not each.fixable)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        # Whether another thing's device is one that this machine lacks: chemprop.
        ("if not torch.cuda.is_available() and metric.device.type != 'cpu':\n    rebuild()", "lacks the device"),
        ("if 'cuda' in device and not torch.cuda.is_available():\n    device = fallback()", "lacks the device"),
        ("x = 1 if not torch.cuda.is_available() and args.device.startswith('cuda') else 2", "lacks the device"),
        # A picked device that goes on choosing between CUDA and the CPU: fastNLP.
        (f"{PICK}\nbackend = 'nccl' if device == 'cuda' else 'gloo'", "chooses another way"),
        (f"{PICK}\nif device == 'cuda':\n    run_kernel()\nelse:\n    run_loop(device)", "chooses another way"),
        (
            f"{PICK}\ndef f():\n    if device.startswith('cuda'):\n        return kernel()\n    loop()",
            "chooses another",
        ),
        (
            "device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')\n"
            "if device == torch.device('cuda:0'):\n    run_kernel()\nelse:\n    run_loop(device)",
            "chooses another way",
        ),
        (
            "def f(self):\n    self.device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
            "def g(self):\n    if str(self.device) == 'cuda':\n        a()\n    elif self.b:\n        b()",
            "chooses another way",
        ),
        # A pattern may know CUDA and the CPU only: neurodiffeq raises where neither matches.
        (
            f"known = re.compile('cuda|cpu')\n{PICK}\nif not known.fullmatch(device):\n    raise ValueError(device)",
            "fullmatch may take cuda and cpu only",
        ),
    ],
)
def test_choices_that_stay(code: str, why: str) -> None:
    text = f"import torch\n{code}\n"
    assert port(text) == text
    assert why in messages(text)


@pytest.mark.parametrize(
    "code",
    [
        "if device == 'cuda':\n    print(torch.cuda.get_device_name())\nelse:\n    print('no GPU')",
        "loader = DataLoader(data, pin_memory=device == 'cuda')",
        "if device == 'cuda':\n    torch.cuda.synchronize()",
        "lr = 0.1 if device == 'cuda' else 0.01",
        "streams = {}\nstreams[device] = f(streams.get(device))",
        "device_type = 'cuda' if device == 'cuda' else 'cpu'",
    ],
)
def test_a_picked_device_is_ported_where_nothing_depends_on_its_name(code: str) -> None:
    assert f"device = {NAME}\n" in port(f"import torch\n{PICK}\n{code}\nx.to(device)\n", partial=True)


CTRANSLATE = """class Server:
    def __init__(self, **options):
        import ctranslate2
        self.translator = ctranslate2.Translator(**options)
    @staticmethod
    def options(gpu):
        return {"device": "cuda" if gpu else "cpu", "beam_size": 1}
"""
QUANTISED = """import bitsandbytes as bnb
self.weight = bnb.nn.Params4bit(data)
self.weight.cuda(data.device)
"""
REPLACED = """model.cuda = lambda *args: model
model.cuda()
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (CTRANSLATE, "not clear that this is a device"),  # OpenNMT-py: "cuda" there is CTranslate2's own word
        (QUANTISED, "it comes from bitsandbytes"),  # litgpt: its cuda() quantises
        (REPLACED, "cuda() is replaced"),  # hqq
        ("cp, has_cp = optional_import('cupy')\nfree = cp.cuda.Device().mem_info\n", "`cp.cuda`: not fixed"),
        (
            "from torch.utils import cpp_extension\nfolders = cpp_extension.include_paths(device_type='cuda')\n",
            "not clear that this is a device",  # torchani: what is compiled is not for the device in use
        ),
        ("import torch\ndevices = (torch.device('cpu'), torch.device('cuda'))\n", "the CPU is listed beside it"),
        ("import torch\ndevices = ['cpu', 'cuda:0']\n", "the CPU is listed beside it"),
        ("def f(batch: TensorDictBase):\n    return batch.pin_memory()\n", "it is TensorDictBase"),  # torchrl
        ("def f(x: Any):\n    if hasattr(x, 'pin_memory'):\n        x = x.pin_memory()\n", "hasattr() asks for it"),
        (
            "import ctranslate2\nclass A:\n    def f(self):\n        self.device = 'cuda'\n"
            "        self.g = ctranslate2.Generator(p, device=self.device)\n",
            "whose devices are its own affair",  # OpenNMT-py
        ),
        ("method = model.cuda\n", "`model.cuda`: not fixed"),
        ("import torch\nif torch.cuda.is_available() and n > 1:\n    check_nvlink_connectivity()\n", "needs CUDA"),
    ],
)
def test_what_belongs_to_cuda_stays_and_is_told(text: str, why: str) -> None:
    assert port(text) == text
    assert why in messages(text)


DEMAND = """import sys
import torch
def run(x):
    if not torch.cuda.is_available():
        raise RuntimeError("no device")
    x.cuda()
"""


@pytest.mark.parametrize(
    ("code", "asked"),
    [
        (DEMAND, "not get_accelerator().is_available()"),
        # The fuzzer: a caller in the file catches the demand; the program ends well without a GPU.
        (f"{DEMAND}try:\n    run(x)\nexcept RuntimeError:\n    other()\n", f'{NAME} == "cpu"'),
        (
            DEMAND.replace("def run(x)", "class Run:\n  def __init__(self, x)")
            + "def make(x):\n    try:\n        return Run(x)\n    except RuntimeError:\n        return other()\n",
            f'{NAME} == "cpu"',
        ),
        (DEMAND.replace("raise RuntimeError(", "sys.exit("), "not get_accelerator().is_available()"),
        (DEMAND.replace('raise RuntimeError("no device")', "sys.exit(0)"), f'{NAME} == "cpu"'),
        (DEMAND.replace('raise RuntimeError("no device")', "sys.exit()"), f'{NAME} == "cpu"'),
    ],
)
def test_a_demand_is_one_where_nothing_else_is_done(code: str, asked: str) -> None:
    assert f"    if {asked}:\n" in port(code)


@pytest.mark.parametrize(
    ("before", "after", "asked"),
    [
        ("torch.manual_seed(s)\nnp.random.seed(s)\n", "", "get_accelerator().is_available()"),
        ("", "torch.manual_seed(s)\n", "get_accelerator().is_available()"),
        ("torch.manual_seed(s)\nx = torch.rand(1)\n", "", THERE),
        ("", "x = torch.rand(1)\n", THERE),
    ],
)
def test_a_cpu_is_seeded_only_where_that_changes_nothing(before: str, after: str, asked: str) -> None:
    code = f"{before}if torch.cuda.is_available():\n    torch.cuda.manual_seed_all(s)\n{after}"
    assert f"if {asked}:\n" in port(f"import torch\n{code}")


def test_a_class_within_a_function_has_its_own_cuda() -> None:
    text = "def f():\n    class B:\n        def cuda(self):\n            return self\n    b = B()\n    b.cuda()\n"
    assert port(text) == text


def test_two_names_for_two_devices_are_no_list_of_devices() -> None:  # dalle2-pytorch
    ported = port("import torch\nfast_device, cpu = torch.device('cuda'), torch.device('cpu')\n")
    assert f"= torch.device({NAME}), torch.device('cpu')\n" in ported


def test_tensors_by_their_annotation_are_pinned() -> None:
    for annotation in ("torch.Tensor", "Tensor | None", "Any"):
        assert "get_accelerator().pin_memory(x)" in port(f"def f(x: {annotation}):\n    return x.pin_memory()\n")


def test_is_cuda_of_what_is_imported_is_told() -> None:
    assert "is no tensor" in messages("from . import settings\nif settings.is_cuda:\n    pass\n")  # super-gradients


def test_options_called_cuda_are_not_told() -> None:
    assert messages("args.cuda = args.cuda and flag\nif self.opt.cuda:\n    pass\n") == ""


@pytest.mark.parametrize(
    "code",
    [
        "if device.type == 'cuda':\n    print(torch.cuda.get_device_name())\n    torch.backends.cudnn.benchmark = True",
        "loader = DataLoader(data, pin_memory=device.type == 'cuda')",
        "if x.device.type == 'cuda':\n    a()\nelse:\n    b()",  # another thing's device
    ],
)
def test_a_named_device_is_ported_where_nothing_else_depends_on_its_name(code: str) -> None:
    assert f"device = torch.device({NAME})\n" in port(f"import torch\ndevice = torch.device('cuda')\n{code}\n", True)


@pytest.mark.parametrize("code", ["workers = 4 if device == 'cuda' else 0", "if device == 'cuda':\n    workers = 4"])
def test_a_named_device_stays_where_its_name_decides_without_a_gpu_too(code: str) -> None:
    assert port(f"device = 'cuda'\n{code}\n") == f"device = 'cuda'\n{code}\n"


def test_what_lies_beside_a_device_that_is_there_is_ported() -> None:
    assert f"use = {THERE} and device != 'cpu'" in port(
        "import torch\nuse = torch.cuda.is_available() and device != 'cpu'\nif use:\n    x.cuda()\nelse:\n    a()\n"
    )


def test_the_own_environment_stays_when_os_came_with_a_star() -> None:
    text = "from setup import *\nos.environ['CUDA_VISIBLE_DEVICES'] = str(gpu)\n"
    assert port(text) == text
    assert "would choose before it is written" in messages(text)


def test_tabs_and_blanks_in_one_indentation_are_told() -> None:
    with pytest.raises(NotPythonError, match="tabs and blanks in one indentation"):
        port_text("def f():\n        x.cuda()\n       \ty.cuda()\n")
