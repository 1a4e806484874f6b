# SPDX-License-Identifier: Apache-2.0
"""Files that work together are ported together: where something of CUDA stays in one, the others wait for it."""

import json
from pathlib import Path

import pytest

from anyaccel.port import run
from anyaccel.port.config import Config
from anyaccel.port.links import groups, imports

PLACES = "import torch\nfrom b import g\n\n\ndef f(model):\n    g(model.cuda())\n"
STAYS = "import torch\n\n\ndef g(x):\n    if x.is_cuda:\n        return fast(x)\n    return x\n"
FREE = "def g(x):\n    return x\n"
ALONE = (
    "import torch\nimport b\n\n\ndef f():\n    torch.manual_seed(1)\n    torch.cuda.manual_seed_all(1)\n"
    "    torch.cuda.empty_cache()\n"
)


def write(folder: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return [str(folder / name) for name in files]


def port(folder: Path, files: dict[str, str], partial: bool = False) -> dict[str, run.Outcome]:
    """What a run says; a second one changes nothing and says the same of what is left."""
    paths = write(folder, files)
    found = list(run.look_at_all([(path, Config(partial=partial)) for path in paths]))
    for each in found:
        if each.after is not None:
            Path(each.path).write_bytes(each.after)
    again = list(run.look_at_all([(path, Config(partial=partial)) for path in paths]))
    assert [each.after for each in again] == [None] * len(files)
    left = [sorted(one.code for one in each.findings if not one.fixable) for each in found]
    assert left == [sorted(one.code for one in each.findings) for each in again]
    return {Path(each.path).name: each for each in found}


def book_of(*cells: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": each} for each in cells]})


@pytest.mark.parametrize(("other", "ported"), [(STAYS, False), (FREE, True)])
def test_what_is_placed_waits_for_what_stays_in_a_file_that_it_meets(tmp_path: Path, other: str, ported: bool) -> None:
    a = port(tmp_path, {"a.py": PLACES, "b.py": other})["a.py"]
    assert (a.after is not None) == ported
    if not ported:
        assert "it waits for `x.is_cuda` in b.py line 5, which stays" in a.findings[0].message
        assert "--partial" in a.findings[0].message


def test_files_that_import_nothing_of_one_another_do_not_wait(tmp_path: Path) -> None:
    script = PLACES.replace("from b import g\n", "")
    assert port(tmp_path, {"a.py": script, "b.py": STAYS})["a.py"].after is not None


def test_files_of_one_package_wait_for_each_other(tmp_path: Path) -> None:
    files = {"p/__init__.py": "", "p/a.py": PLACES.replace("from b import g\n", ""), "p/b.py": STAYS}
    assert port(tmp_path, files)["a.py"].after is None


def test_partial_fixes_what_waits(tmp_path: Path) -> None:
    assert port(tmp_path, {"a.py": PLACES, "b.py": STAYS}, partial=True)["a.py"].after is not None


def test_a_comment_that_settles_the_question_lets_the_others_go(tmp_path: Path) -> None:
    settled = STAYS.replace("is_cuda:", "is_cuda:  # ignore-cuda")
    assert port(tmp_path, {"a.py": PLACES, "b.py": settled})["a.py"].after is not None


def test_what_stays_in_a_test_holds_only_that_test(tmp_path: Path) -> None:
    files = {"a.py": PLACES, "b.py": FREE, "test_b.py": STAYS.replace("import torch", "import torch\nimport a")}
    assert port(tmp_path, files)["a.py"].after is not None


def test_what_means_the_same_beside_anything_does_not_wait(tmp_path: Path) -> None:
    after = port(tmp_path, {"a.py": ALONE, "b.py": STAYS})["a.py"].after
    assert after is not None and b"torch.cuda" not in after


@pytest.mark.parametrize(
    "body",
    [
        "    if args.use_cuda:\n        torch.cuda.empty_cache()\n",
        "    if 'CUDA out of memory' not in text:\n        raise\n    torch.cuda.empty_cache()\n",
        "    if torch.cuda.is_available():\n        torch.cuda.empty_cache()\n        args.use_gpu = True\n",
        "    event = torch.cuda.Event()\n    event.ipc_handle()\n    lib(event, torch.cuda.cudart())\n"
        "    torch.cuda.synchronize()\n",
        "    with torch.cuda.graph(g):\n        torch.cuda.empty_cache()\n",
    ],
)
def test_what_a_condition_of_cuda_reaches_waits_all_the_same(tmp_path: Path, body: str) -> None:
    text = f"import torch\nimport b\n\n\ndef f(args, text, g):\n{body}"
    assert port(tmp_path, {"a.py": text, "b.py": STAYS})["a.py"].after is None


@pytest.mark.parametrize(
    "body",
    [
        "    if torch.cuda.is_available():\n        torch.cuda.empty_cache()\n",
        "    if torch.cuda.is_available() and step:\n        torch.cuda.manual_seed_all(1)\n",
        "    try:\n        step()\n    except torch.cuda.OutOfMemoryError:\n        torch.cuda.empty_cache()\n",
        "    torch.cuda.synchronize()\n    start = time()\n",
    ],
)
def test_guards_of_such_calls_go_with_them(tmp_path: Path, body: str) -> None:
    text = f"import torch\nimport b\n\n\ndef f(step):\n{body}"
    after = port(tmp_path, {"a.py": text, "b.py": STAYS})["a.py"].after
    assert after is not None and b"torch.cuda" not in after


@pytest.mark.parametrize(
    ("line", "ported"),
    [
        ("PATTERN = re.compile(r'^(cuda(:[0-9]+)?|cpu)$')", False),
        ("run('nvidia-smi|grep')", False),
        ("x = x.double()", False),
        ("torch.set_default_dtype(torch.float64)", False),
        ("y = y.type(x[0].type())", False),
        ("raise ValueError('no cuda here')", True),
        ("add('--no-cuda')", True),
        ("load('x.cuda_kernel')", True),
        ("kind = torch.double if wide else torch.float", True),
    ],
)
def test_names_of_cuda_within_texts_and_float64_hold_devices_back(tmp_path: Path, line: str, ported: bool) -> None:
    files = {"a.py": PLACES, "b.py": f"def g(x):\n    {line}\n    return x\n"}
    assert (port(tmp_path, files)["a.py"].after is not None) == ported


@pytest.mark.parametrize(("line", "ported"), [("return net(noise(device=device))", False), ("net.to(device)", True)])
def test_a_default_for_a_device_waits_where_nothing_is_put_on_it(tmp_path: Path, line: str, ported: bool) -> None:
    text = (
        "import torch\n\n\ndef score(net, device=None):\n    if device is None:\n"
        f'        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n    {line}\n'
    )
    assert (port(tmp_path, {"a.py": text})["a.py"].after is not None) == ported


def test_links_between_files_are_those_of_names() -> None:
    files = {
        "p/__init__.py": "from .one import A\nfrom .two import B\nfrom .stars import *\n",
        "p/one.py": "import torch\nfrom . import three\n",
        "p/two.py": "class B:\n    pass\n",
        "p/three.py": "",
        "p/stars.py": "C = 1\n",
        "uses_a.py": "from p import (\n    A,  # the first\n)\n",
        "uses_b.py": "import p.two as two, os\n",
        "late.py": "import_module('.four', 'p')\nload = importlib.import_module('p.stars')\n",
        "alone.py": "from torch import nn\n",
    }
    found = {frozenset(each) for each in groups({path: imports(text) for path, text in files.items()})}
    assert frozenset({"p/one.py", "p/three.py", "uses_a.py"}) in found
    assert frozenset({"p/two.py", "uses_b.py"}) in found
    assert frozenset({"p/stars.py", "late.py"}) in found
    assert frozenset({"alone.py"}) in found and frozenset({"p/__init__.py"}) in found
    whole = groups({path: imports(text) for path, text in files.items()}, lambda path: path.split("/")[0])
    assert any({"p/one.py", "p/two.py", "uses_a.py", "uses_b.py"} <= set(each) for each in whole)


def test_an_assertion_that_stays_holds_what_it_leads_to(tmp_path: Path) -> None:
    text = (
        "import torch\nimport torch.multiprocessing as mp\n\n\ndef main():\n    assert torch.cuda.is_available()\n"
        "    n = torch.cuda.device_count()\n    mp.spawn(run, nprocs=n, args=(n,))\n\n\n"
        "def run(rank, n):\n    torch.cuda.set_device(rank)\n    net().cuda(rank)\n"
    )
    assert port(tmp_path, {"a.py": text})["a.py"].after is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("torch.cuda.empty_cache()", "torch.cuda.reset_peak_memory_stats()"),
        ("torch.cuda.synchronize()", "return self.total()"),
    ],
)
def test_what_comes_before_figures_of_memory_waits_with_them(tmp_path: Path, first: str, second: str) -> None:
    text = (
        "import torch\nimport b\n\n\nclass A:\n    def total(self):\n        return torch.cuda.memory_allocated()\n\n"
        f"    def f(self):\n        {first}\n        {second}\n"
    )
    assert port(tmp_path, {"a.py": text, "b.py": STAYS})["a.py"].after is None


@pytest.mark.parametrize(
    ("text", "ported"),
    [
        ("import numpy as np\nA = np.ones(3, dtype=np.float64)\n\n\ndef g(x):\n    return torch.from_numpy(A)", False),
        ("import numpy as np\nA = np.ones(3, dtype=np.float32)\n\n\ndef g(x):\n    return torch.from_numpy(A)", True),
    ],
)
def test_arrays_of_float64_that_go_to_a_device_hold_devices_back(tmp_path: Path, text: str, ported: bool) -> None:
    files = {"a.py": PLACES, "b.py": f"import torch\n{text}.to(device=x.device)\n"}
    assert (port(tmp_path, files)["a.py"].after is not None) == ported


@pytest.mark.parametrize(
    ("line", "ported"),
    [
        ("from b import g", False),
        ("!python tools/b.py --fast", False),
        ("%run b.py", False),
        ("%%bash\npython tools/b.py", False),
        ("%load_ext b", False),
        ("%load_ext autoreload", True),
        ("g = 1", True),
    ],
)
def test_a_notebook_waits_for_the_modules_that_it_uses(tmp_path: Path, line: str, ported: bool) -> None:
    files = {"a.ipynb": book_of(line, "import torch\nx = torch.ones(1).cuda()"), "tools/b.py": STAYS}
    if "tools" not in line:
        files["b.py"] = files.pop("tools/b.py")
    assert (port(tmp_path, files)["a.ipynb"].after is not None) == ported


@pytest.mark.parametrize(("written", "ported"), [("x = torch.ones(1).cuda()", False), ("x = 1", True)])
def test_a_notebook_waits_for_a_file_that_one_of_its_cells_writes(tmp_path: Path, written: str, ported: bool) -> None:
    cells = ["%%writefile b.py\nimport torch\n" + written, "import torch\nx = torch.ones(1).cuda()"]
    assert (port(tmp_path, {"a.ipynb": book_of(*cells)})["a.ipynb"].after is not None) == ported


@pytest.mark.parametrize(("other", "ported"), [("print x.cuda()\n", False), ("print x\n", True)])
def test_a_package_waits_for_a_file_that_cannot_be_parsed(tmp_path: Path, other: str, ported: bool) -> None:
    found = port(tmp_path, {"p/__init__.py": "", "p/a.py": "import torch\nx = torch.ones(1).cuda()\n", "p/b.py": other})
    assert (found["a.py"].after is not None) == ported
    assert bool(found["b.py"].error) != ported


def test_modules_of_lua_are_not_moved_by_to(tmp_path: Path) -> None:
    code = "import torch\nfrom torch.utils.serialization import load_lua\n\nmodel = load_lua('a.t7')\nmodel.cuda()\n"
    assert port(tmp_path, {"a.py": code}, partial=True)["a.py"].after is None


@pytest.mark.parametrize("name", ["ext", "other"])
def test_what_imports_an_extension_for_cuda_waits_for_it(tmp_path: Path, name: str) -> None:
    setup = f'from torch.utils.cpp_extension import CUDAExtension\n\nsetup(ext_modules=[CUDAExtension("{name}", [])])\n'
    files = {"a.py": PLACES, "b.py": "import ext\n\n\ndef g(x):\n    return ext.g(x)\n", "setup.py": setup}
    assert (port(tmp_path, files)["a.py"].after is None) == (name == "ext")


def test_an_index_that_is_formatted_as_a_number_names_a_device(tmp_path: Path) -> None:
    text = 'import torch\n\n\ndef f(net, rank):\n    net.to(torch.device("cuda:{:d}".format(rank)))\n'
    after = port(tmp_path, {"a.py": text}, partial=True)["a.py"].after
    assert after is not None and b"get_accelerator().device_name(rank)" in after
