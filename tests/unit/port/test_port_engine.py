# SPDX-License-Identifier: Apache-2.0
"""What fixes do to a text: names however they were imported, uses told apart, imports, comments, layout."""

from __future__ import annotations

import pytest

from anyaccel.port.engine import NotPythonError, port_text


def port(text: str) -> str:
    ported = port_text(text)
    again = port_text(ported.text)
    assert again.text == ported.text
    return ported.text


def codes(text: str, fixable: bool | None = None) -> list[str]:
    return [each.code for each in port_text(text).findings if fixable is None or each.fixable == fixable]


@pytest.mark.parametrize(
    ("imports", "call", "kept"),
    [
        ("import torch", "torch.cuda.synchronize()", "import torch"),
        ("import torch as th", "th.cuda.synchronize()", "import torch as th"),
        ("import torch.cuda", "torch.cuda.synchronize()", "import torch.cuda"),
        ("import torch.cuda as tc", "tc.synchronize()", ""),
        ("from torch import cuda", "cuda.synchronize()", "from torch import cuda"),
        ("from torch import nn, cuda", "cuda.synchronize()", "from torch import nn, cuda"),
        ("from torch.cuda import synchronize as s", "s()", ""),
        ("from torch.cuda import synchronize", "synchronize()", ""),
        ("import torch.cuda.memory", "torch.cuda.memory.empty_cache()", "import torch.cuda.memory"),
    ],
)
def test_every_form_of_import(imports: str, call: str, kept: str) -> None:
    ported = port(f"{imports}\n{call}\n")
    method = "empty_cache" if "empty" in call else "synchronize"
    assert ported.endswith(f"get_accelerator().{method}()\n")
    assert "from anyaccel import get_accelerator\n" in ported


def test_imports_that_lost_their_use_go_and_others_stay() -> None:
    text = (
        "import torch\nfrom torch.cuda.amp import autocast, custom_fwd\nfrom torch.cuda import Stream as S\n"
        "with autocast():\n    S()\n"
    )
    ported = port(text)
    assert "from torch.cuda.amp import custom_fwd\n" in ported  # it had no use before
    assert "Stream as S" not in ported
    guarded = (
        "import torch\ntry:\n    from torch.cuda.amp import autocast\nexcept ImportError:\n    raise\n"
        "with autocast():\n    pass\n"
    )
    assert "    from torch.cuda.amp import autocast\n" in port(guarded)
    kept = port_text("from torch.cuda import Stream\ns = Stream()\n", removes_imports=False).text
    assert "from torch.cuda import Stream\n" in kept


def test_a_name_that_is_something_else_is_left() -> None:
    for text in (
        "def f(torch):\n    torch.cuda.synchronize()\n",
        "from other import cuda\ncuda.synchronize()\n",
        "from . import torch\ntorch.cuda.synchronize()\n",
        "import numba\nnumba.cuda()\n",
    ):
        assert port(text) == text
    ambiguous = (
        "try:\n    from torch.amp import GradScaler\nexcept ImportError:\n    from torch.cuda.amp import GradScaler\n"
        "GradScaler()\n"
    )
    assert port(ambiguous) == ambiguous
    assert codes(ambiguous) == ["ACC501"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""Doc."""\nimport torch\n', '"""Doc."""\nimport torch\nfrom anyaccel import get_accelerator\n'),
        (
            '# licence\n\n"""Doc."""\n\nfrom __future__ import annotations\n\nimport os\n\n'
            "import torch\nfrom torch import nn\n",
            '# licence\n\n"""Doc."""\n\nfrom __future__ import annotations\n\nimport os\n\nimport torch\n'
            "from anyaccel import get_accelerator\nfrom torch import nn\n",
        ),
        (
            "import os\n\nimport numpy as np\nimport torch\nfrom aaa import b\n\nfrom .x import y\n",
            "import os\n\nimport numpy as np\nimport torch\nfrom aaa import b\nfrom anyaccel import get_accelerator\n\n"
            "from .x import y\n",
        ),
        ("import os\nimport torch\n", "import os\nimport torch\nfrom anyaccel import get_accelerator\n"),
        (
            "import json\nfrom pathlib import Path\nimport random\nimport soundfile\nimport torch\n\nimport mine\n",
            "import json\nfrom pathlib import Path\nimport random\nimport soundfile\nimport torch\n"
            "from anyaccel import get_accelerator\n\nimport mine\n",
        ),
        (
            "# why\nimport torch\n\n\ndef f():\n    pass\n\n\n",
            "# why\nimport torch\nfrom anyaccel import get_accelerator\n\n\ndef f():\n    pass\n\n\n",
        ),
    ],
)
def test_the_import_has_its_sorted_place(before: str, after: str) -> None:
    assert port(f"{before}torch.cuda.synchronize()\nrun()\n") == f"{after}get_accelerator().synchronize()\nrun()\n"


def test_the_import_comes_before_the_first_use() -> None:
    text = 'import os\n\nenv["CUDA_VISIBLE_DEVICES"] = "3"\n\nimport torch\n'
    assert port(text) == (
        "import os\n\nfrom anyaccel import get_accelerator\n\n"
        "get_accelerator().set_visible_devices_envs(env, [3])\n\nimport torch\n"
    )


def test_torch_is_imported_where_only_its_parts_were() -> None:
    ported = port("from torch.cuda.amp import autocast\n\nwith autocast():\n    pass\n")
    assert ported == (
        "import torch\nfrom anyaccel import get_accelerator\n\n"
        'with torch.amp.autocast(get_accelerator().device_name(), enabled=get_accelerator().device_name() != "cpu"):\n'
        "    pass\n"
    )


def test_an_import_that_is_there_is_used() -> None:
    text = "from anyaccel.accelerator import get_accelerator as ga\nimport torch\nx = torch.ones(2).cuda()\n"
    assert port(text) == text.replace(".cuda()", ".to(ga().device_name())")


def test_another_get_accelerator_keeps_its_name() -> None:
    ported = port("import torch\ndef get_accelerator():\n    pass\ntorch.cuda.synchronize()\nrun()\n")
    assert "from anyaccel import get_accelerator as get_anyaccel_accelerator\n" in ported
    assert "get_anyaccel_accelerator().synchronize()\n" in ported


def test_comments_and_layout_stay() -> None:
    call = "x = foo( # one\r\n\ty . cuda( 0 ,\r\n\t\tnon_blocking = True, # two\r\n\t) ,\r\n)   # three\r\n"
    text = f"import torch\r\n\r\n{call}"
    ported = port(text)
    assert ported == (
        "import torch\r\nfrom anyaccel import get_accelerator\r\n\r\nx = foo( # one\r\n"
        "\ty . to( get_accelerator().device_name(0) ,\r\n\t\tnon_blocking = True, # two\r\n\t) ,\r\n)   # three\r\n"
    )


def test_a_comment_inside_what_would_be_replaced_is_not_lost() -> None:
    text = 'import torch\nd = (\n    "cuda"  # why\n    if torch.cuda.is_available()\n    else "cpu"\n)\n'
    assert port(text) == text


@pytest.mark.parametrize(
    "comment",
    ["# noqa", "#noqa: ACC101", "# noqa: E501, ACC1", "#ignore-cuda", "# ignore-cuda: why", "# x # noqa:ACC101"],
)
def test_lines_that_are_to_be_left(comment: str) -> None:
    text = f"import torch\ntorch.cuda.synchronize()  {comment}\n"
    assert port(text) == text
    assert codes(text) == []


@pytest.mark.parametrize("comment", ["# noqa: E501", "# noqa: ACC2", "# a noqan", "# cuda"])
def test_other_comments_do_not_count(comment: str) -> None:
    assert codes(f"import torch\ntorch.cuda.synchronize()  {comment}\n") == ["ACC101"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("d = torch.cuda.current_device()\nx.to(d)", "current_device_name()"),
        ("d = torch.cuda.current_device()\nx.cuda(d)\ny.to(device=d)", None),
        ("d = torch.cuda.current_device()\nprint(d + 1)", "current_device()"),
        ("d = torch.cuda.current_device()\nx.to(d)\nprint(d + 1)", None),
        ("f(torch.cuda.current_device())", None),
        ("x.to(torch.cuda.current_device())", "current_device_name()"),
        ("torch.load(p, map_location=torch.cuda.current_device())", "current_device_name()"),
        ("x.cuda(torch.cuda.current_device())", "x.to(get_accelerator().current_device_name())"),
        ("n = f'{torch.cuda.current_device()}'", "current_device()"),
        ("DDP(m, device_ids=[torch.cuda.current_device()])", "current_device()"),
        ("torch.cuda.memory_allocated(torch.cuda.current_device())", "current_device()"),
    ],
)
def test_current_device_is_told_apart(before: str, after: str | None) -> None:
    ported = port(f"import torch\n{before}\n")
    if after is None:
        assert "torch.cuda.current_device()" in ported
    else:
        assert after in ported
        assert "torch.cuda" not in ported


@pytest.mark.parametrize(
    "code",
    [
        'x = "cuda"',
        '"""cuda"""',
        "x = 'cuda is great'",
        'd = {"cuda": 1}',
        'if device == "cuda":\n    pass',
        'if device in ("cuda", "cpu"):\n    pass',
        'open("cuda")',
        'supported_devices = ["cuda", "xpu"]',
        'path = f"model_{kind}_cuda"',
        'device: Literal["cuda", "cpu"] = "cuda"',
        'parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])',
        'xgboost.XGBClassifier(device="cuda")',
        'p.add_argument("--name", default="cuda")',
        "logging.info('cuda')",
    ],
)
def test_strings_that_are_no_devices_are_left(code: str) -> None:
    text = f"import logging\nimport torch\nimport xgboost\n{code}\n"
    assert port(text) == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('parser.add_argument("--device", default="cuda")', "default=get_accelerator().device_name())"),
        ('device = kwargs.get("device", "cuda:1")', 'kwargs.get("device", get_accelerator().device_name(1))'),
        ('x.to("cuda:" + str(i))', "x.to(get_accelerator().device_name(i))"),
        ('x.to(f"cuda:{i:d}")', "x.to(get_accelerator().device_name(i))"),
        ('x.to("cuda:%d" % i)', "x.to(get_accelerator().device_name(i))"),
        ('x.to("cuda:{}".format(i + 1))', "x.to(get_accelerator().device_name(i + 1))"),
        ('self.device = device or "cuda"', "self.device = device or get_accelerator().device_name()"),
        ('with torch.autocast("cuda"):\n    pass', "torch.autocast(get_accelerator().device_name(), enabled="),
        ('torch.device(type="cuda", index=2)', "torch.device(get_accelerator().device_name(2))"),
        ('d = {"device": "cuda"}', '{"device": get_accelerator().device_name()}'),
        ('d = "cuda" if flag else "cpu"\n', 'd = "cuda" if flag else "cpu"'),
        ('device = "cuda" if flag else "cpu"', 'device = get_accelerator().device_name() if flag else "cpu"'),
        (
            'dev = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"',
            "dev = get_accelerator().device_name()",
        ),
        ('d = "cpu" if not torch.cuda.is_available() else "cuda:0"', "d = get_accelerator().device_name(0)"),
        (
            'd = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")',
            "d = torch.device(get_accelerator().device_name())",
        ),
        (
            'init(backend="nccl" if torch.cuda.is_available() else "gloo")',
            "init(backend=get_accelerator().communication_backend_name())",
        ),
        ("def f():\n    return'cuda'if torch.cuda.is_available()else'cpu'", "return(get_accelerator().device_name())"),
    ],
)
def test_devices_are_found(before: str, after: str) -> None:
    assert after in port(f"import torch\n{before}\n")


@pytest.mark.parametrize(
    "code",
    [
        "if torch.cuda.is_available():\n    torch.cuda.get_device_name()",
        "use_cuda = torch.cuda.is_available()\nif use_cuda:\n    print(torch.cuda.get_arch_list())",
        "if not torch.cuda.is_available():\n    raise SystemExit\ntorch.cuda.ipc_collect()",
        "@skipif(not torch.cuda.is_available())\ndef test():\n    torch.cuda.ipc_collect()",
        "needs = skipif(not torch.cuda.is_available())\n@needs\ndef test():\n    torch.cuda.ipc_collect()",
        "x = torch.cuda.get_device_name() if torch.cuda.is_available() else ''",
        "if torch.cuda.is_available() and torch.cuda.get_device_capability() > (8, 0):\n    pass",
        "if x.is_cuda:\n    import my_cuda_kernel",
        "if torch.cuda.is_available():\n    run_cuda_kernel(x)",
        "print(torch.cuda.is_available())",
        "def has_cuda():\n    return torch.cuda.is_available()",
        "f(use_cuda=torch.cuda.is_available())",
        "HAS_CUDA = torch.cuda.is_available()",
        "facts = {'gpu': torch.cuda.is_available()}",
        "assert torch.cuda.is_available(), 'apex needs CUDA'",
        "def f():\n    if torch.cuda.is_available():\n        a()\n    elif torch.xpu.is_available():\n        b()",
        "if torch.cuda.is_available():\n    kind = 1\nelif is_npu_available():\n    kind = 2",
        "def is_rocm():\n    return torch.cuda.is_available()",
        "if x.is_cuda:\n    a()\nelif x.is_xpu:\n    b()",
        "ok = x.is_cuda or x.device.type == 'hpu'",
        "if torch.cuda.is_available():\n    warn('CPU is used though CUDA is there')",
        "if needs_cuda:\n    skip = not torch.cuda.is_available()",
        "if torch.cuda.is_available():\n    kwargs['device_ids'] = [rank]",
        "def f():\n    cuda = torch.cuda.is_available() and device.type != 'cpu'",
        "m = 'no CUDA devices are seen' if torch.cuda.device_count() == 0 else ''",
        "if all(t.is_cuda for t in ts):\n    run()\nelse:\n    raise ValueError('must be on a CUDA device')",
        "if torch.cuda.is_available():\n    info = get_gpu_info(0)",
        "if x.is_cuda:\n    a()\nelse:\n    b()",
        "use_amp = amp and x.is_cuda",
        "with torch.autocast(device, enabled=x.is_cuda):\n    pass",
        "if not x.is_cuda and y:\n    a()",
        "if hasattr(torch.cuda.device_count, 'cache_clear'):\n    pass",
        "where = 'cpu' if not torch.cuda.is_available() else None",
        "if not torch.cuda.is_available():\n    map_location = torch.device('cpu')",
        "tell('Has CUDA', lambda: torch.cuda.is_available())",
        "if torch.cuda.is_available():\n    sources += glob('*.cu')",
        "if 'CUDA_VISIBLE_DEVICES' in os.environ:\n    print(f\"{os.environ['CUDA_VISIBLE_DEVICES']}\")",
        "for i in range(torch.cuda.device_count()):\n    torch.cuda.get_device_name(i)",
        "names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]",
        "class CudaBackend:\n    def f(self):\n        torch.cuda.synchronize()",
        "def count_cuda_devices():\n    return torch.cuda.device_count()",
        "if torch.cuda.is_available():\n    try:\n        from .fast import A\n    except ImportError:\n        pass",
        "if torch.cuda.is_available():\n    torch.backends.cudnn.benchmark = True",
        "def f():\n    use_fused = torch.cuda.is_available()\n    return g(use_fused)",
        "skip = torch.cuda.device_count() > 1 or torch.xpu.device_count() > 1",
    ],
)
def test_a_guard_of_cuda_code_stays(code: str) -> None:
    text = f"import os\nimport torch\n{code}\n"
    assert port(text) == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "if is_xpu_available():\n    torch.xpu.empty_cache()\nelse:\n    torch.cuda.empty_cache()",
            "if is_xpu_available():\n    torch.xpu.empty_cache()\nelse:\n    get_accelerator().empty_cache()",
        ),
        (
            "if not is_hpu_available():\n    x.cuda()",
            "if not is_hpu_available():\n    x.to(get_accelerator().device_name())",
        ),
        (
            "if a:\n    s = torch.cuda.amp.GradScaler()\nelse:\n    s = None",
            "if a:\n    s = torch.amp.GradScaler(get_accelerator().device_name(), "
            'enabled=get_accelerator().device_name() != "cpu")\nelse:\n    s = None',
        ),
        (
            "if torch.cuda.is_available():\n    torch.backends.cudnn.benchmark = True\n    x.cuda()",
            "if get_accelerator().is_available():\n    torch.backends.cudnn.benchmark = True\n"
            "    x.to(get_accelerator().device_name())",
        ),
        (
            "if torch.cuda.is_available():\n    print(f'{torch.cuda.memory_allocated()}')",
            "if get_accelerator().device_name() != \"cpu\":\n    print(f'{get_accelerator().memory_allocated()}')",
        ),
        (
            'child_env["CUDA_VISIBLE_DEVICES"] = ""',
            "get_accelerator().set_visible_devices_envs(child_env, [])",
        ),
    ],
)
def test_what_is_for_any_accelerator_is_fixed(before: str, after: str) -> None:
    assert port(f"import os\nimport torch\n{before}\n").endswith(f"{after}\n")


def test_a_guard_of_ported_code_goes_along() -> None:
    ported = port("import torch\nuse_cuda = torch.cuda.is_available()\nif use_cuda:\n    model.cuda()\n")
    assert "use_cuda = get_accelerator().is_available()\n" in ported
    # A rule that is not selected leaves CUDA code behind, which then needs its guard.
    text = "import torch\nif torch.cuda.is_available():\n    model.cuda()\n"
    assert port_text(text, lambda code: code == "ACC101").text == text


@pytest.mark.parametrize(
    "code",
    [
        "x.cuda(device)",
        "x.cuda(*args)",
        "x.storage().cuda()",
        "class A(B):\n    def cuda(self):\n        return super().cuda()",
        "class A(B):\n    def cuda(self):\n        return self\n    def f(self):\n        self.cuda()",
        "if args.is_cuda:\n    pass",
        "x.is_cuda()",
        "n, is_cuda = 1, x.is_cuda",
        "use_cuda = x.is_cuda",
        "run(cuda=x.is_cuda)",
        "def f(backend='nccl'): pass",
        "class A:\n    backend: str = 'nccl'",
        "def f(config=dict(backend='nccl')): pass",
        "def f():\n    return json.dumps({'backend': 'nccl'})",
        "self.is_cuda = True",
        "super().pin_memory()",
        "x.pin_memory(device)",
        "s = torch.cuda.current_stream().cuda_stream",
        "x.record_stream(torch.cuda.current_stream())",
        "def f(s: torch.cuda.Stream): pass",
        "torch.cuda.synchronize = None",
        "@torch.jit.script\ndef f(x):\n    return x.cuda()",
        "class A:\n    @torch.jit.export\n    def f(self):\n        pass\n    def g(self, x):\n        x.cuda()",
        "def f(x):\n    if torch.jit.is_scripting():\n        pass\n    return x.cuda()",
        "backends = ['nccl', 'gloo']",
        'env = {"CUDA_VISIBLE_DEVICES": "0"}',
        'os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")',
        "if is_xpu_available():\n    device = 'xpu'\nelse:\n    device = 'cuda'",
        "if x.is_cuda:\n    device = 'cuda'\nelif tpu:\n    device = 'xla'",
        "if is_hpu_available():\n    backend = 'hccl'\nelse:\n    backend = 'nccl'\n    init_process_group(backend)",
        "if is_torch_xla_available():\n    n = torch.cuda.device_count()",
        "s = torch.amp.GradScaler(d) if new else torch.cuda.amp.GradScaler()",
        "if is_xpu_available():\n    d = 'xpu'\nelse:\n    d = f'cuda:{torch.cuda.current_device()}'",
        "try:\n    s = torch.amp.GradScaler(d)\nexcept TypeError:\n    s = torch.cuda.amp.GradScaler()",
    ],
)
def test_what_is_unsure_is_reported_only(code: str) -> None:
    text = f"import os\nimport torch\n{code}\n"
    assert port(text) == text
    assert code == "self.is_cuda = True" or codes(text)


def test_a_file_without_cuda_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    import anyaccel.port.engine as engine

    monkeypatch.setattr(engine, "Tree", None)
    assert port_text("import torch\nx = 1  # cuda\n'''call x.cuda()'''\n").findings == ()


@pytest.mark.parametrize("text", ["def f(:\n  torch.cuda.x\n", "import torch\n\tx = torch.cuda.x\n"])
def test_what_is_no_python_is_told_with_its_place(text: str) -> None:
    with pytest.raises(NotPythonError, match=r"^\d+:\d+: "):
        port_text(text)
