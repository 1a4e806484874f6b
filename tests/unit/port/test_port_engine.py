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


def codes(text: str) -> list[str]:
    return [each.code for each in port_text(text).findings]


NAME = "get_accelerator().device_name()"
ON = f'{NAME} != "cpu"'


@pytest.mark.parametrize(
    ("imports", "call", "kept"),
    [
        ("import torch", "torch.cuda.synchronize()", "import torch"),
        ("import torch as th", "th.cuda.synchronize()", "import torch as th"),
        ("import torch.cuda", "torch.cuda.synchronize()", "import torch.cuda"),
        ("import torch.cuda as tc", "tc.synchronize()", ""),
        ("import torch\nimport torch.cuda", "torch.cuda.synchronize()", "import torch"),
        ("from torch import cuda", "cuda.synchronize()", ""),
        ("from torch import nn, cuda", "cuda.synchronize()", "from torch import nn"),
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
    assert [line for line in ported.splitlines()[:-1] if line and "anyaccel" not in line] == kept.split("\n") * bool(
        kept
    )


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
    text = 'import os\n\ndevice = "cuda"\n\nimport torch\n'
    assert port(text) == f"import os\n\nfrom anyaccel import get_accelerator\n\ndevice = {NAME}\n\nimport torch\n"


def test_torch_is_imported_where_only_its_parts_were() -> None:
    ported = port("from torch.cuda.amp import autocast\n\nwith autocast():\n    pass\n")
    assert ported == (
        "import torch\nfrom anyaccel import get_accelerator\n\n"
        f"with torch.amp.autocast({NAME}, enabled={ON}):\n    pass\n"
    )


def test_torch_is_imported_for_all_where_one_function_has_it() -> None:
    function = "def f():\n    import torch\n    return torch\n"
    text = f"from torch.cuda.amp import autocast\n{function}with autocast():\n    pass\n"
    assert port(text).startswith("import torch\nfrom anyaccel import get_accelerator\n")


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


def test_a_comment_inside_a_choice_is_not_lost() -> None:
    text = 'import torch\nd = (\n    "cuda"  # why\n    if torch.cuda.is_available()\n    else "cpu"\n)\n'
    assert "# why" in port(text)
    assert "torch.cuda" not in port(text)


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
        ("d = torch.cuda.current_device()\nprint(d + 1)", "current_device()"),
        (
            "d = torch.cuda.current_device()\nx.to(d)\nif d == 0: f()",
            "current_device()\nx.to(get_accelerator().device_name(d))",
        ),
        ("FSDP(m, device_id=torch.cuda.current_device())", "current_device_name()"),
        (
            "init_process_group(device_id=torch.cuda.current_device())",
            "device_id=get_accelerator().current_device() if",
        ),
        ("f(torch.cuda.current_device())", "current_device()"),
        ("x.to(torch.cuda.current_device())", "current_device_name()"),
        ("torch.load(p, map_location=torch.cuda.current_device())", "current_device_name()"),
        ("x.cuda(torch.cuda.current_device())", "x.to(get_accelerator().current_device_name())"),
        ("n = f'cuda:{torch.cuda.current_device()}'", "device_name(get_accelerator().current_device())"),
        ("torch.cuda.memory_allocated(torch.cuda.current_device())", "current_device()"),
    ],
)
def test_an_index_and_a_device_are_told_apart(before: str, after: str) -> None:
    ported = port(f"import torch\n{before}\n")
    assert after in ported
    assert "torch.cuda" not in ported


@pytest.mark.parametrize(
    "code",
    [
        '"""cuda"""',
        "x = 'cuda is great'",
        "if hasattr(x, 'cuda'):\n    pass",
        'd = {"cuda": 1}',
        'device: Literal["cuda", "cpu"] = None',
        'path = f"model_{kind}_cuda"',
        "logging.info('cuda')",
        "raise ValueError('nccl')",
        'if get_accelerator().device_name() == "cuda":\n    pass',
        "self.is_cuda = True",
        "if args.is_cuda:\n    pass",
        "def f(s: Optional[torch.cuda.Stream]): pass",
        "torch.backends.cudnn.benchmark = True",
        "from numba import njit",
    ],
)
def test_what_names_no_device_is_left(code: str) -> None:
    text = f"import logging\nimport torch\n{code}\n"
    assert port(text) == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('parser.add_argument("--device", default="cuda")', f"default={NAME})"),
        ('def f(device="cuda:1"): pass', "def f(device=get_accelerator().device_name(1)): pass"),
        ('device = kwargs.get("a", 1) or "cuda"', f"or {NAME}"),
        ('x.to("cuda:" + str(i))', "x.to(get_accelerator().device_name(i))"),
        ('x.to(f"cuda:{i:d}")', "x.to(get_accelerator().device_name(i))"),
        ('x.to("cuda:%d" % i)', "x.to(get_accelerator().device_name(i))"),
        ('x.to("cuda:%d" % (i,))', "x.to(get_accelerator().device_name(i))"),
        ('x.to("cuda:{}".format(i + 1))', "x.to(get_accelerator().device_name(i + 1))"),
        ('with torch.autocast("cuda"):\n    pass', f"torch.autocast({NAME}, enabled={ON})"),
        ('torch.device(type="cuda", index=2)', "torch.device(get_accelerator().device_name(2))"),
        ('torch.device("cuda:1")', "torch.device(get_accelerator().device_name(1))"),
        ('d = {"device": "cuda"}', f'{{"device": {NAME}}}'),
        ('d = "cuda" if flag else "cpu"', f'd = {NAME} if flag else "cpu"'),
        ("if 'cuda' in str(device):\n    pass", f"if {NAME} in str(device):"),
        ("if device.startswith('cuda'):\n    pass", f"if device.startswith({NAME}):"),
        ("def f():\n    return'cuda'", f"return {NAME}"),
        (
            'd = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")',
            f"d = torch.device({NAME})\n",
        ),
        ("n = f'{torch.device(\"cuda\")}'", f"n = f'{{torch.device({NAME})}}'"),
        ("model.cuda(args.gpu)", "model.to(get_accelerator().device_name(args.gpu))"),
        ("x.cuda(i, True)", "x.to(get_accelerator().device_name(i), non_blocking=True)"),
        ("x.cuda(device=d, non_blocking=True)", "x.to(device=get_accelerator().device_name(d), non_blocking=True)"),
        ("x.cuda('cuda:1')", "x.to(get_accelerator().device_name(1))"),
        ("x.cuda(torch.device('cuda'))", f"x.to(torch.device({NAME}))"),
        ("device = rank % 4\nx.to(device)", "x.to(get_accelerator().device_name(device))"),
        ("with torch.cuda.device(i):\n    pass", "with get_accelerator().device_guard(i):"),
        (
            "from torch.cuda import amp\nwith amp.autocast(False, torch.float16): pass",
            f"with torch.amp.autocast({NAME}, enabled=False, dtype=torch.float16): pass",
        ),
        ("torch.cuda.memory.mem_get_info(device=0)", "get_accelerator().mem_get_info(device_index=0)"),
        (
            "s = torch.cuda.amp.GradScaler(2.0, enabled=a or b)",
            f"s = torch.amp.GradScaler({NAME}, init_scale=2.0, enabled=(a or b) and {ON})",
        ),
        ("@torch.amp.autocast('cuda', enabled=True)\ndef f(): pass", f"@torch.amp.autocast({NAME}, enabled={ON})"),
        (
            "with torch.autocast(enabled=a, device_type='cuda'): pass",
            f"with torch.autocast(enabled=a and {ON}, device_type={NAME}): pass",
        ),
        (
            "with torch.amp.autocast('cuda', torch.float16, b): pass",
            f"with torch.amp.autocast({NAME}, torch.float16, b and {ON}): pass",
        ),
        (
            "with torch.autocast('cuda', torch.float16): pass",
            f"with torch.autocast({NAME}, torch.float16, enabled={ON}): pass",
        ),
        ("with torch.autocast('cuda', enabled=False): pass", f"with torch.autocast({NAME}, enabled=False): pass"),
        ('n = f"{torch.ones(1, pin_memory=True)}"', f"pin_memory={NAME} != 'cpu')}}\""),
        ("ok = isinstance(s, (A, torch.cuda.amp.GradScaler))", "ok = isinstance(s, (A, torch.amp.GradScaler))"),
        ("if torch.cuda.is_available():\n    test_it_cuda()", "if get_accelerator().is_available():"),
        ("ok = torch.cuda.is_bf16_supported()", "ok = get_accelerator().is_bf16_supported(including_emulation=True)"),
        ("pin = x.pin_memory().is_pinned()", "pin = get_accelerator().is_pinned(get_accelerator().pin_memory(x))"),
        (
            "init_process_group('nccl', device_id=d)",
            'device_id=d if get_accelerator().device_name() != "cpu" else None)',
        ),
        ('d = ["cpu", "cuda"][torch.cuda.is_available()]', f'["cpu", {NAME}][get_accelerator().is_available()]'),
        ("x.untyped_storage().cuda()", f"x.untyped_storage().to(device={NAME})"),
        ("torch.FloatStorage(3).cuda(0)", "torch.FloatStorage(3).to(device=get_accelerator().device_name(0))"),
        ('x.storage().cuda("cuda:1")', "x.storage().to(device=get_accelerator().device_name(1))"),
        ('torch.distributed.init_process_group("NCCL")', "group(get_accelerator().communication_backend_name())"),
    ],
)
def test_every_spelling_is_ported(before: str, after: str) -> None:
    ported = port(f"import torch\n{before}\n")
    assert after in ported
    assert "'cuda" not in ported


@pytest.mark.parametrize(
    "code",
    [
        "if x.is_cuda:\n    y = fast_cuda(x)\nelse:\n    y = slow(x)",
        "if torch.cuda.is_available():\n    import triton",
        "y = scan_cuda(x) if x.device.type == 'cuda' else scan(x)",
        "if not torch.cuda.is_available():\n    pass\nelse:\n    g = torch.cuda.CUDAGraph()",
    ],
)
def test_a_guard_of_what_only_cuda_has_stays(code: str) -> None:
    text = f"import torch\n{code}\n"
    assert port(text) == text
    assert "guards what only CUDA has" in "".join(each.message for each in port_text(text).findings)


@pytest.mark.parametrize(
    "code",
    [
        "x.cuda(*args)",
        "move = model.cuda",
        "x.record_stream(s) if a else None",
        "@torch.jit.script\ndef f(x):\n    return x.cuda()",
        "print(f'{x.is_cuda=}')",
        "from torch.cuda import *",
        "torch.cuda.synchronize = None",
        "used = torch.cuda.utilization()",
    ],
)
def test_what_has_no_fix_is_reported_and_holds_nothing_back(code: str) -> None:
    text = f"import torch\n{code}\ntorch.cuda.empty_cache()\n"
    ported = port(text)
    assert f"{code}\n" in ported
    assert "get_accelerator().empty_cache()" in ported
    assert len(codes(text)) > 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('run = {"cuda": a, "cpu": b}[kind]', f'run = {{{NAME}: a, "cpu": b}}[kind]'),
        ('assert impl in ["ref", "cuda"]', f'assert impl in ["ref", {NAME}]'),
        ('def f(impl="cuda"): pass', f"def f(impl={NAME}): pass"),
        ('for d in ["cpu", "cuda"]: pass', f'for d in ["cpu", {NAME}]: pass'),
        ('for each in ["to", "cuda"]: pass', f'for each in ["to", {NAME}]: pass'),
        ("class A:\n    def cuda(\n        self\n    ): pass\nA().cuda()", f"A().to({NAME})"),
        ('if name == "NCCL": pass', "if name == get_accelerator().communication_backend_name(): pass"),
        (
            'x = {"cuda:0": 1, f"cuda:{i}": 2}',
            "x = {get_accelerator().device_name(0): 1, get_accelerator().device_name(i): 2}",
        ),
        ("class A:\n    def cuda(self): pass\nA().cuda()", f"A().to({NAME})"),
        (
            'add_argument("--backend", choices=["nccl", "gloo"])',
            "choices=[get_accelerator().communication_backend_name()",
        ),
    ],
)
def test_what_needs_a_reader_is_unsafe(before: str, after: str) -> None:
    text = f"import torch\n{before}\n"
    assert port(text) == text
    unsafe = port_text(text, unsafe=True)
    assert after in unsafe.text
    assert port_text(unsafe.text, unsafe=True).text == unsafe.text


def test_a_rule_that_is_not_wanted_is_neither_applied_nor_reported() -> None:
    text = "import torch\ntorch.cuda.empty_cache()\nx.cuda()\n"
    ported = port_text(text, lambda code: code == "ACC101")
    assert "x.cuda()" in ported.text
    assert [each.code for each in ported.findings] == ["ACC101"]


@pytest.mark.parametrize("text", ["def f(:\n  torch.cuda.x\n", "import torch\n\tx = torch.cuda.x\n"])
def test_what_is_no_python_is_reported_with_its_place(text: str) -> None:
    with pytest.raises(NotPythonError, match=r"^\d+:\d+: "):
        port_text(text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('print("on", "cuda" if torch.cuda.is_available() else "cpu")', f'print("on", {NAME})'),
        ("x = f\"{'cuda' if torch.cuda.is_available() else 'cpu'}:{i}\"", f'x = f"{{{NAME}}}:{{i}}"'),
        ('d = f"cuda:{(i)}" if torch.cuda.is_available() else "cpu"', "d = get_accelerator().device_name((i))"),
        ('d = {"cuda" if torch.cuda.is_available() else "cpu": 1}', f"d = {{{NAME}: 1}}"),
    ],
)
def test_a_choice_of_devices_is_ported_as_one(before: str, after: str) -> None:
    """Its name goes with its guard, in a text for people too, and whichever other rules are wanted."""
    before, after = f"import torch\n{before}\n", f"import torch\nfrom anyaccel import get_accelerator\n{after}\n"
    assert port(before) == after
    assert port_text(before, wanted=lambda code: code == "ACC111").text == after
    without = port_text(before, wanted=lambda code: code != "ACC111").text
    assert "torch.cuda" not in without


def test_patterns_are_left_and_hold_nothing_back() -> None:
    text = (
        'match x.device.type:\n    case "cuda" | "cuda:0" if y.is_cuda:\n        x.cuda()\n'
        "    case torch.cuda.Stream():\n        pass\n"
    )
    ported = port(f"import torch\n{text}")
    assert 'case "cuda" | "cuda:0" if get_accelerator().on_accelerator(y):\n        x.to(' in ported
    assert "case torch.cuda.Stream():" in ported
    assert codes(f"import torch\n{text}") == ["ACC201", "ACC201", "ACC303", "ACC301", "ACC106"]


def test_the_import_comes_before_a_use_in_the_line_of_other_imports() -> None:
    assert port("import torch; x = torch.zeros(2).cuda()\n").endswith(
        f"from anyaccel import get_accelerator\n\nimport torch; x = torch.zeros(2).to({NAME})\n"
    )


def test_an_import_with_a_comment_stays() -> None:
    text = "import torch\nfrom torch.cuda import synchronize  # why\nsynchronize()\n"
    assert "from torch.cuda import synchronize  # why\n" in port(text)


def test_types_of_texts_are_no_keys() -> None:
    text = 'import typing\nDevice = typing.Literal["cuda", "cpu"]\n'
    assert port_text(text, unsafe=True).text == text
