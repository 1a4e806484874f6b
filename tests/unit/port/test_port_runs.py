# SPDX-License-Identifier: Apache-2.0
"""Programs run before and after the port on a machine without a GPU: the same way is taken, the same is printed."""

from __future__ import annotations

import contextlib
import io
import warnings

import pytest
import torch

from anyaccel.port.engine import port_text

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what is done without a GPU is compared")


def run(text: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        exec(compile(text, "program", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def check(program: str, changed: bool | None = None) -> None:
    program = f"import contextlib\nimport torch\n{program}\n"
    ported = port_text(program).text
    assert run(ported) == run(program) != ""
    assert changed is None or (ported != program) == changed
    assert port_text(ported).text == ported


CAUGHT = "(AssertionError, RuntimeError)"
CATCHING = {
    "handler": "def f():\n    try:\n        STATEMENT\n        return 1\n    except Exception:\n        return 0",
    "tuple": f"def f():\n    try:\n        STATEMENT\n    except {CAUGHT}:\n        return 0\n    return 1",
    "named": f"NO_GPU = {CAUGHT}\ndef f():\n    try:\n        STATEMENT\n        return 1\n    except NO_GPU: pass",
    "else": "def f():\n    try:\n        STATEMENT\n    except:\n        pass\n    else:\n        return 1",
    "star": f"def f():\n    w = 1\n    try:\n        STATEMENT\n    except* {CAUGHT}:\n        w = 0\n    return w",
    "finally": "def f():\n    w = 0\n    try:\n        STATEMENT\n        w = 1\n    finally:\n        return w",
    "suppress": f"def f():\n    with contextlib.suppress(*{CAUGHT}):\n        STATEMENT\n        return 1",
    "called": "def probe():\n    STATEMENT\ndef f():\n    try:\n        probe()\n        return 1\n"
    "    except Exception:\n        return 0",
    "message": "def f():\n    try:\n        STATEMENT\n        return 1\n    except Exception as e:\n"
    "        if 'memory' not in str(e):\n            return 0\n        raise",
    "outer": f"def f():\n    try:\n        try:\n            STATEMENT\n        except OSError:\n            pass\n"
    f"    except {CAUGHT}:\n        return 0\n    return 1",
}
STATEMENTS = [
    "torch.zeros(1, device='cuda')",
    "x = torch.ones(1).cuda()",
    "torch.cuda.get_device_properties(0).total_memory",
    "torch.cuda.mem_get_info()[0]",
]


@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("way", CATCHING)
def test_a_failure_that_chooses_the_device_still_does(way: str, statement: str) -> None:
    check(f"{CATCHING[way].replace('STATEMENT', statement)}\nprint(f())", changed=False)


@pytest.mark.parametrize(
    "program",
    [
        # The name of the device comes from elsewhere.
        "device = 'cuda'\ntry:\n    torch.zeros(1, device=device)\n    print(1)\nexcept Exception:\n    print(0)",
        "class A:\n    def __init__(self):\n        self.device = torch.device('cuda')\n    def f(self):\n"
        "        try:\n            torch.ones(1).to(self.device)\n            return 1\n"
        "        except Exception:\n            pass\nprint(A().f())",
        "import pytest\nwith pytest.raises((AssertionError, RuntimeError)):\n    torch.ones(1).cuda()\nprint(1)",
        "import unittest\nt = unittest.TestCase()\n"
        "t.assertRaises(AssertionError, lambda: torch.ones(1).cuda())\nprint(1)",
    ],
)
def test_failures_that_are_expected_stay(program: str) -> None:
    check(program, changed=False)


@pytest.mark.parametrize(
    "program",
    [
        "def f(x):\n    try:\n        if torch.cuda.is_available():\n            x = x.cuda()\n        return 'in'\n"
        "    except Exception:\n        return 'out'\nprint(f(torch.ones(1)))",
        "def f(x):\n    try:\n        assert torch.cuda.is_available()\n        x.cuda()\n        return 1\n"
        "    except Exception:\n        return 0\nprint(f(torch.ones(1)))",
        "def f(x):\n    try:\n        if not torch.cuda.is_available():\n            raise ValueError(x)\n"
        "        x.cuda()\n        return 1\n    except ValueError:\n        return 0\nprint(f(torch.ones(1)))",
        "try:\n    d = torch.device('cuda')\nexcept RuntimeError:\n    pass\nprint('made')",
    ],
)
def test_what_cannot_fail_without_a_gpu_is_ported_where_failures_are_caught(program: str) -> None:
    check(program, changed=True)


@pytest.mark.parametrize(
    "handler",
    ["except KeyboardInterrupt:\n    pass", "except Exception as e:\n    print(e)\n    raise",
     "except RuntimeError as e:\n    if 'out of memory' in str(e):\n        x = None\n    else:\n        raise e",
     "except torch.cuda.OutOfMemoryError:\n    x = None"],
)  # fmt: skip
def test_handlers_of_other_errors_and_those_that_raise_again_do_not_matter(handler: str) -> None:
    text = f"import torch\ntry:\n    x = x.cuda()\n{handler}\n"
    assert "    x = x.to(get_accelerator().device_name())\n" in port_text(text).text


def test_both_readings_are_told() -> None:
    found = port_text(f"import torch\n{CATCHING['handler'].replace('STATEMENT', STATEMENTS[1])}\n").findings
    assert "CUDA itself is tried (leave it), or any accelerator" in found[0].message


@pytest.mark.parametrize(
    "program",
    [
        "if isinstance(x, torch.cuda.FloatTensor):\n    print('GPU')\nelse:\n    print('CPU')",
        "print(isinstance(x, torch.cuda.FloatTensor))",
        "print(isinstance(x, (torch.cuda.HalfTensor, torch.cuda.FloatTensor)))",
        "kind = 'fast' if not isinstance(x, torch.cuda.FloatTensor) else 'slow'\nprint(kind)",
    ],
)
def test_a_tensor_on_the_cpu_is_no_tensor_of_cuda(program: str) -> None:
    check(f"x = torch.ones(1)\n{program}", changed=False)


@pytest.mark.parametrize("seed", ["torch.cuda.manual_seed_all(s + 7)", "torch.cuda.manual_seed(3)"])
def test_another_seed_elsewhere_in_the_file_stays_what_counts(seed: str) -> None:
    check(f"def f(s):\n    {seed}\ntorch.manual_seed(3)\nf(3)\nprint(torch.rand(1))", changed=False)
