# SPDX-License-Identifier: Apache-2.0
"""What works together with something that stays, in the file or in the package, stays as well."""

from __future__ import annotations

import pytest

from anyaccel.port.engine import port_text
from anyaccel.port.facts import demanding, facts
from anyaccel.port.project import Project, join, outline

NAME = "get_accelerator().device_name()"
THERE = f'{NAME} != "cpu"'


def port(text: str, project: Project | None = None) -> str:
    ported = port_text(text, project=project)
    assert port_text(ported.text, project=project).text == ported.text
    return ported.text


def messages(text: str, project: Project | None = None) -> str:
    return "\n".join(each.message for each in port_text(text, project=project).findings if not each.fixable)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        # An answer that is kept under a name, and what is placed by another: ivadomed, trankit, torchkge, DI-engine.
        (
            "def f(i):\n    device = torch.device('cuda:' + str(i) if torch.cuda.is_available() else 'cpu')\n"
            "    cuda_available = torch.cuda.is_available()\n    return cuda_available, device",
            "the answer stays under cuda_available",
        ),
        (
            "def f(self):\n    if self.gpu and torch.cuda.is_available():\n        self._use_gpu = True\n"
            "        self.device = torch.device('cuda')\n    else:\n        self._use_gpu = False\n",
            "self._use_gpu says by it",
        ),
        (
            "def f(self):\n    use_cuda = next(self.parameters()).is_cuda\n    if use_cuda:\n        x = x.cuda()",
            "the condition around it",
        ),
        ("is_cuda = w.is_cuda\nx = x.to('cuda' if is_cuda else 'cpu')", "the condition around it"),
        (
            "class A:\n    def f(self):\n        self._cuda = torch.cuda.is_available()\n"
            "    def g(self):\n        if self._cuda:\n            self.model.cuda()",
            "the condition around it",
        ),
        # What comes before a kernel: axolotl. What an assertion that stays is before: yolov5.
        ("if w.device.type != 'cuda':\n    w = w.to('cuda')\nkernel(w)", "the condition around it"),
        (
            "def f():\n    assert torch.cuda.device_count() > RANK, 'insufficient CUDA devices'\n"
            "    torch.cuda.set_device(RANK)\n    d = torch.device('cuda', RANK)",
            "the condition around it",
        ),
        # Comments, words and flags that say CUDA: axolotl, neuralforecast, yolov5.
        ("# Patches requiring CUDA\nif torch.cuda.is_available():\n    torch.cuda.empty_cache()", "a comment there"),
        (
            "if torch.cuda.is_available():\n    x.cuda()\n    # on GPU causes cudnn errors\nelse:\n    pass",
            "a comment there",
        ),
        ("if torch.cuda.is_available():\n    kwargs['accelerator'] = 'gpu'", "says GPU to something else"),
        ("install(f\"tensorflow{'' if torch.cuda.is_available() else m or '-cpu'}\")", "a part of a text"),
        ("if torch.cuda.is_available():\n    apply_patches()", "not known to be for any accelerator"),
        (
            "def f(kw):\n    if torch.cuda.is_available():\n        kw['accelerator'] = 'gpu'\n"
            "    if torch.cuda.is_available():\n        kw['devices'] = -1",
            "what they choose belongs together",
        ),
        ("if torch.cuda.is_available():\n    dtype = torch.float16\nelse:\n    dtype = None", "chooses a precision"),
        # Halves of a call: DI-engine.
        (
            "def f(rank):\n    assert torch.cuda.device_count() > 1, 'one CUDA device'\n    a()\n"
            "def g(rank):\n    n = torch.cuda.foo(rank % torch.cuda.device_count())",
            "stays",
        ),
        (
            "def f():\n    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0\n    run_on(n_gpus)",
            "a number of GPUs is passed on",
        ),
        ("if torch.cuda.is_available() and n == 1:\n    raise ValueError(n)", "it raises where CUDA is"),
        # What is read for the CPU, or asks for CUDA by its name: sparseml.
        (
            "if torch.cuda.is_available():\n    c = torch.load(p)\nelse:\n    c = torch.load(p, map_location='cpu')",
            "something is loaded for",
        ),
        ("if name != 'cuda' or not torch.cuda.is_available():\n    raise ValueError(name)", "names CUDA's device"),
        (
            "def f(cfg):\n    device = 'cuda:{}'.format(get_rank() % torch.cuda.device_count()) if cfg.cuda else 'cpu'",
            "a part of the same expression stays",
        ),
        # What every device but the CPU does: kilosort.
        (
            "def f(device=None):\n    if device is None:\n        if torch.cuda.is_available():\n"
            "            device = torch.device('cuda')\n        else:\n            device = torch.device('cpu')\n"
            "    if device != torch.device('cpu'):\n"
            "        n = torch.cuda.get_device_properties(device).total_memory\n"
            "        print(torch.cuda.get_device_name(), n)",
            "every device but the CPU",
        ),
        # A name that goes on choosing: TotalSegmentator; and another vendor's beside it.
        (
            "def f(device):\n    if device == 'gpu':\n        device = 'cuda'\n    if device.startswith('cuda'):\n"
            "        if not torch.cuda.is_available():\n            device = 'cpu'\n    return device",
            "chooses another way",
        ),
        (
            "def f(d):\n    if d == 'gpu':\n"
            "        return torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')\n"
            "    if d == 'mps':\n        return torch.device('mps')",
            "other vendors",
        ),
        # A default that is compared with the CPU's name: funasr.
        (
            "def f(kw):\n    d = kw.get('device', 'cuda')\n    n = 1 if d == 'cpu' else 2",
            'a default that is compared with "cpu"',
        ),
        (
            "def f(o):\n    d = getattr(o, 'device', 'cuda:0')\n    if d != 'cpu':\n        n = 1",
            "take the CPU's way now",
        ),
        ("def f(kw):\n    if kw.pop('device', 'cuda') == 'cpu':\n        n = 1", "take the CPU's way now"),
        (
            "def f(self, y):\n    self.device = y or 'cuda'\n    if self.device is 'cpu':\n        n = 1",
            "take the CPU's way now",
        ),
        # A function of the file that goes two ways, and what it is given.
        (
            "def move(x, device):\n    return x.cuda() if device == 'cuda' else x\n"
            "move(x, 'cuda' if torch.cuda.is_available() else 'cpu')",
            "stays where it is called",
        ),
        # Another package's device: skrl. A comparison under a name: pyabsa.
        (
            "import jax\nclass JAX:\n    def __init__(self, rank):\n        self._device = f'cuda:{rank}'\n"
            "    def g(self):\n        return jax.devices(self._device)",
            "its own affair",
        ),
        ("if self.device.type == Kind.CUDA:\n    n = torch.cuda.memory_allocated()", "the condition around it"),
        # Chosen at import.
        ("CUDA_0 = torch.device('cuda:0')\ndef f():\n    pass", "would choose an accelerator at import"),
        ("synchronize = torch.cuda.synchronize\ndef f():\n    pass", "would choose an accelerator at import"),
        ("torch.cuda.empty_cache()\ndef f():\n    pass", "as a call at the top of the module"),  # textattack
        (
            "class C:\n    def __init__(self):\n        self.device = f'cuda:{self.rank}'\nconfig = C()",
            "would choose an accelerator at import",
        ),
        # Packages that know CUDA and the CPU only, in the file or the function: alignn, neuromancer, rfdetr.
        ("import dgl\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'", "dgl, which is used here"),
        (
            "device = 'cpu'\nif torch.cuda.is_available():\n    device = torch.device('cuda')\n"
            "g = Graph.atom_dgl_multigraph(a)\nmodel(g.to(device))",
            "dgl, which is used here",
        ),
        ("class A:\n    def f(self):\n        from dgl import g\n    def h(self):\n        x.cuda()", "dgl, which"),
        ("from numba import cuda\nx.to('cuda')", "numba.cuda, which is used here"),
        ("def f(t):\n    return cp.fromDlpack(to_dlpack(t.cuda()))", "cupy, which is used here"),
        # What an unknown package takes.
        ("import unknown\nm = unknown.load(device='cuda')", "may take cuda and cpu only"),
    ],
)
def test_halves_stay(code: str, why: str) -> None:
    text = f"import torch\n{code}\n"
    assert port(text) == text
    assert why in messages(text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if torch.cuda.is_available():\n    model.cuda()\n    fit(model)",
         f"if {THERE}:\n    model.to({NAME})\n    fit(model)"),
        ("def f(m):\n    return m.load(device='cuda')", f"def f(m):\n    return m.load(device={NAME})"),
        ("import timm\nm = timm.make(device='cuda')", f"import timm\nm = timm.make(device={NAME})"),
        ("device = torch.device('cuda')\nmodel.to(device)\ntrain(model)",
         f"device = torch.device({NAME})\nmodel.to(device)\ntrain(model)"),
        ("if device.type != 'cpu':\n    torch.cuda.synchronize()\nx.to('cuda')",
         f"if device.type != 'cpu':\n    get_accelerator().synchronize()\nx.to({NAME})"),
        ("def f(kw):\n    device = kw.get('device', 'cuda')\n    x.to(device)",
         f"def f(kw):\n    device = kw.get('device', {NAME})\n    x.to(device)"),
        ("device = 'cuda'\nif device != 'cpu':\n    n = 1", f"device = {NAME}\nif device != 'cpu':\n    n = 1"),
        ("def f():\n    import dgl\n    dgl.g()\ndef g():\n    x.cuda()",
         f"def f():\n    import dgl\n    dgl.g()\ndef g():\n    x.to({NAME})"),
        ("import warpctc\nimport numba\nx.cuda()", f"import warpctc\nimport numba\nx.to({NAME})"),
        ("from .dgl import *\nx.cuda()", f"from .dgl import *\nx.to({NAME})"),
        # What a script does when it is run, not when it is imported.
        ("torch.cuda.empty_cache()\nx = 1", "get_accelerator().empty_cache()\nx = 1"),
        ("def f():\n    pass\nif __name__ == '__main__':\n    torch.cuda.synchronize()",
         "def f():\n    pass\nif __name__ == '__main__':\n    get_accelerator().synchronize()"),
        ("def f():\n    pass\ntorch.cuda.synchronize()\nmain()",
         "def f():\n    pass\nget_accelerator().synchronize()\nmain()"),
        ("# anyaccel-cell:1\ntorch.cuda.empty_cache()\ndef f():\n    pass",
         "# anyaccel-cell:1\nget_accelerator().empty_cache()\ndef f():\n    pass"),
    ],
)  # fmt: skip
def test_what_is_whole_is_ported(before: str, after: str) -> None:
    ported = port(f"import torch\n{before}\n")
    assert ported.replace("from anyaccel import get_accelerator\n", "").split("import torch\n")[1].lstrip("\n") == (
        f"{after}\n"
    ) or ported.endswith(f"{after}\n")


ANSWER = (
    "import torch\nclass Policy:\n    def __init__(self, cfg):\n"
    "        self._cuda = cfg.cuda and torch.cuda.is_available()\n"
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (ANSWER, "self._cuda"),
        ("import torch\ndef gpus():\n    return torch.cuda.is_available()\n", "gpus()"),
        ("import torch\ndef device():\n    has = torch.cuda.is_available()\n    return has, 'x'\n", "device()"),
        ("import torch\nif torch.cuda.is_available():\n    a.use_gpu = True\n", "a.use_gpu"),
        ("import torch\nclass C:\n    total_gpus: int = torch.cuda.device_count()\n", "total_gpus"),
        (
            "import torch\ndef gpus():\n    if not torch.cuda.is_available():\n        return []\n    return g()\n",
            "gpus()",
        ),
    ],
)
def test_an_answer_that_another_file_keeps(text: str, name: str) -> None:
    other = "import torch\nif torch.cuda.is_available():\n    x = x.cuda()\n"
    project = join([outline(text), outline(other)])
    assert project.keeps == {name}
    assert port(other, project) == other
    assert f"other files ask {name}" in messages(other, project)
    picks = "import torch\ndef f(self):\n    self.device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    assert port(picks, project) == picks
    waits = "import torch\nif torch.cuda.is_available():\n    torch.cuda.synchronize()\n"
    assert "get_accelerator().synchronize()" in port(waits, project)


@pytest.mark.parametrize(
    "code",
    [
        "def load(name, device: Literal['cpu', 'cuda']):\n    pass",
        "def load(name, device='cuda'):\n    assert device in ['cpu', 'cuda']",
        "def load(name, device):\n    if device not in ('cuda', 'cpu'):\n        raise ValueError(device)",
        "def load(name, device):\n    return kernel() if device == 'cuda' else loop()",
        "def load(name, device):\n    if device.startswith('cuda'):\n        a()\n    else:\n        b()",
        "def load(name, device):\n    if device != 'cpu':\n        print(torch.cuda.get_device_name())",
        "def load(name, device):\n    return Unit(device=device)\n"
        "class Unit:\n    def __init__(self, device):\n        assert str(device) in ('cuda', 'cpu')",
        "class load:\n    def __init__(self, device):\n        self.device = device\n"
        "    def run(self):\n        if self.device == 'cuda':\n            return 1\n        return 2",
    ],
)
def test_what_takes_cuda_and_cpu_only(code: str) -> None:
    users = [
        "import torch\nfrom .a import load\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\nu = load('x', device)\n",
        "from .a import load\nu = load('x', device='cuda')\n",
    ]
    for user in users:
        project = join([outline(code), outline(user)])
        assert "load" in project.demanding
        assert port(user, project) == user
        assert "load may take cuda and cpu only" in messages(user, project)
        assert port(user, join([outline("def load(name, device='cuda'):\n    x.to(device)"), outline(user)])) != user


def test_files_that_say_nothing() -> None:
    for text in ("x = 1\n", "device = 'cuda'\nif", "# cuda device\n", "device = 'cuda'\ndef f(): pass\n"):
        assert facts(text).keeps == facts(text).demands == frozenset()
    assert demanding([]) == frozenset()
