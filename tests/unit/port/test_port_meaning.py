# SPDX-License-Identifier: Apache-2.0
"""What a value is used for decides: guards keep the branch for no GPU, names stay where they ask, defaults stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyaccel.port import files
from anyaccel.port.engine import port_text
from anyaccel.port.mentions import mentions
from anyaccel.port.project import Project, join, outline

THERE = 'get_accelerator().device_name() != "cpu"'
NOT_THERE = 'get_accelerator().device_name() == "cpu"'
NAME = "get_accelerator().device_name()"


def port(text: str, project: Project | None = None, partial: bool = False) -> str:
    ported = port_text(text, project=project, partial=partial)
    assert port_text(ported.text, project=project, partial=partial).text == ported.text
    return ported.text


def messages(text: str) -> str:
    return "\n".join(each.message for each in port_text(text).findings if not each.fixable)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # A test that asks where a module went: gpytorch's test_kernel_dtype_device.
        (
            "if torch.cuda.is_available():\n    kernel.to(device='cuda')\n    assert kernel.device != CPU",
            f"if {THERE}:\n    kernel.to(device={NAME})\n    assert kernel.device != CPU",
        ),
        # The way of a machine without a GPU: transformer_lens.
        ("if not torch.cuda.is_available():\n    backend = 'sdpa'", f"if {NOT_THERE}:\n    backend = 'sdpa'"),
        ("if not torch.cuda.is_available():\n    pytest.skip('no GPU')", f"if {NOT_THERE}:\n    pytest.skip('no GPU')"),
        (
            "@skipif(not torch.cuda.is_available())\ndef test_x():\n    x.cuda()",
            f"@skipif({NOT_THERE})\ndef test_x():\n    x.to({NAME})",
        ),
        ("n = 4 if torch.cuda.is_available() else 0", f"n = 4 if {THERE} else 0"),
        ("DataLoader(d, pin_memory=torch.cuda.is_available())", f"DataLoader(d, pin_memory={THERE})"),
        ("if a or torch.cuda.is_available():\n    x.cuda()", f"if a or {THERE}:\n    x.to({NAME})"),
        ("x = (not torch.cuda.is_available()) and y", None),  # what x means is not known
        (
            "args.cuda = args.cuda and torch.cuda.is_available()\nif args.cuda:\n    model.cuda()",
            f"args.cuda = args.cuda and {THERE}\nif args.cuda:\n    model.to({NAME})",
        ),
        # What a CPU may do as well keeps its question.
        (
            "if torch.cuda.is_available():\n    x, y = x.cuda(), y.cuda()\n    torch.cuda.synchronize()",
            f"if get_accelerator().is_available():\n    x, y = x.to({NAME}), y.to({NAME})\n"
            "    get_accelerator().synchronize()",
        ),
        (
            "def f():\n    if not torch.cuda.is_available():\n        raise RuntimeError('needs a GPU')\n    x.cuda()",
            "def f():\n    if not get_accelerator().is_available():\n        raise RuntimeError('needs a GPU')\n"
            f"    x.to({NAME})",
        ),
        ("x = x.cuda() if torch.cuda.is_available() else x",
         f"x = x.to({NAME}) if get_accelerator().is_available() else x"),
        ("if x.is_cuda:\n    x = x.cpu()", "if get_accelerator().on_accelerator(x):\n    x = x.cpu()"),
        # What stays about CUDA keeps all that it guards.
        ("if torch.cuda.is_available():\n    print(torch.cuda.get_device_name())\n    model.cuda()", None),
        ("if is_cuda_available():\n    torch.cuda.empty_cache()\nelif is_musa_available():\n    pass", None),
        ("if device.type == 'cuda' and torch.cuda.current_device() != device.index:\n    f()", None),
        ("if hasattr(obj, 'cuda'):\n    obj = obj.cuda()", None),
        ("def f():\n    if torch.cuda.is_available():\n        return torch.device('cuda')\n    return g('mps')", None),
        ("for i in range(torch.cuda.device_count()):\n    free.append(torch.cuda.mem_get_info(i)[0])", None),
        ("if backend == 'nccl' and torch.cuda.is_available():\n    x.cuda()", None),
        ("with torch.cuda.device(d):\n    torch.cuda.empty_cache()", None),
        ("def f():\n    s = torch.cuda.Stream()\n    run(s.cuda_stream)\n    x.cuda()", None),
        ("if trt_imported and torch.cuda.is_available():\n    x.cuda()", None),
        ("@torch.autocast('cuda', enabled=False)\ndef f(): pass", None),
        ("env = os.environ\nenv['CUDA_VISIBLE_DEVICES'] = '1'", None),
        ("used = torch.cuda.memory_allocated()\nassert used == expected", None),
        ("@skipIf(torch.cuda.device_count() < 2, 'few')\ndef test_x():\n    x.to('cuda:1')", None),
        ("if torch.cuda.is_available():\n    x.cuda()\n    self.assertTrue(x.is_cuda)", None),
        # A CPU has one generator.
        ("torch.manual_seed(s)\ntorch.cuda.manual_seed(s)", "torch.manual_seed(s)\nget_accelerator().manual_seed(s)"),
        ("torch.manual_seed(s)\ntorch.cuda.manual_seed(s + rank)", None),
        # Mixed precision for CUDA is off without CUDA.
        (
            "with torch.autocast('cuda', dtype, on):\n    pass",
            f"with torch.autocast({NAME}, dtype, on and {THERE}):\n    pass",
        ),
        (
            "s = torch.cuda.amp.GradScaler(\n    2.0,\n    enabled=a or b,\n)",
            f"s = torch.amp.GradScaler(\n    {NAME},\n    2.0,\n    enabled=(a or b) and {THERE},\n)",
        ),
        (
            "with torch.autocast(device_type='cuda', enabled=False):\n    pass",
            f"with torch.autocast(device_type={NAME}, enabled=False):\n    pass",
        ),
        (
            "with torch.cuda.amp.autocast(enabled=amp and self.device.type != 'cpu'):\n    pass",
            f"with torch.amp.autocast({NAME}, enabled=amp and self.device.type != 'cpu'):\n    pass",
        ),
        (
            "s = torch.cuda.amp.GradScaler() if torch.cuda.is_available() else None",
            f"s = torch.amp.GradScaler({NAME}) if {THERE} else None",
        ),
        ("with torch.autocast('cuda', **options):\n    pass", None),
        (
            "on = fast or torch.cuda.is_available()\nwith torch.autocast('cuda', enabled=on):\n    pass",
            f"on = fast or {THERE}\nwith torch.autocast({NAME}, enabled=on and {THERE}):\n    pass",
        ),
        # The value of a choice that stays is a part of it.
        ("y = torch.zeros(2, device='cuda' if torch.cuda.is_available() else None)", None),
        # What is left by an early return that stays.
        (
            "def f(x):\n    if not torch.cuda.is_available() or not y:\n        return x\n"
            "    log(torch.cuda.get_device_name())\n    return x.cuda()",
            None,
        ),
        (
            "def f(x):\n    try:\n        import torch\n    except ImportError:\n        return x\n"
            "    if not torch.cuda.is_available() or not y:\n        return x\n    return x.cuda()",
            "def f(x):\n    try:\n        import torch\n    except ImportError:\n        return x\n"
            f"    if {NOT_THERE} or not y:\n        return x\n    return x.to({NAME})",
        ),
        # Questions about CUDA itself that no accelerator has.
        ("if torch.cuda.is_initialized():\n    log(torch.cuda.max_memory_reserved())", None),
        ("is_cuda = kind == 'cuda'\nif is_cuda:\n    d = torch.device(kind, index=torch.cuda.current_device())", None),
        ("if dist.get_backend() == dist.Backend.NCCL:\n    torch.cuda.synchronize()", None),
        # A number of devices under a name: it stays with what it counts, unless a rank is divided by it.
        ("def f():\n    n = torch.cuda.device_count()\n    return [torch.device(f'cuda:{i}') for i in range(n)]", None),
        (
            "def f(rank):\n    n = torch.cuda.device_count()\n    torch.cuda.set_device(rank % n)",
            "def f(rank):\n    n = get_accelerator().device_count()\n    get_accelerator().set_device(rank % n)",
        ),
        # A device that the file names, compared with a name.
        (
            "class A:\n    def f(self):\n        self.last_device = 'cuda:' + str(n)\n"
            "    def g(self):\n        return 'cuda:' + str(k) != self.last_device",
            "class A:\n    def f(self):\n        self.last_device = get_accelerator().device_name(n)\n"
            "    def g(self):\n        return get_accelerator().device_name(k) != self.last_device",
        ),
        ("def g(x, last_device):\n    return 'cuda:' + str(k) != last_device", None),
        # device_ids that are given on a condition.
        (
            "m = DDP(m, device_ids=[i] if n == 1 else None, output_device=(i if n == 1 or y else None))",
            f"m = DDP(m, device_ids=[i] if n == 1 and {THERE} else None, "
            f"output_device=(i if (n == 1 or y) and {THERE} else None))",
        ),
        # Where a tensor is, asked for another reason than to move it.
        ("assert not x.is_cuda", None),
        ("def f(x):\n    assert x.is_cuda\n    kernel(x)", None),
        ("if x.is_cuda and y:\n    warn('slow')", None),  # torch_geometric's warning
        ("limit = 4 if x.is_cuda else 1", None),
        ("if not x.is_cuda:\n    raise ValueError(x)\nkernel(x)", None),
        # Comparisons.
        (
            "if device == 'cuda':\n    torch.cuda.synchronize()",
            f"if device == {NAME}:\n    get_accelerator().synchronize()",
        ),
        ("seed(s, using=self.device.type == torch.device('cuda').type)", None),
        ("if device.type != 'cuda':\n    raise ValueError(device)", None),
        (  # nanoGPT's device_type
            "device_type = 'cuda' if 'cuda' in device else 'cpu'",
            f"device_type = {NAME} if {NAME} in device else 'cpu'",
        ),
        (  # stable_baselines3's get_device
            "def f(device):\n    if device == 'auto':\n        device = 'cuda'\n    device = torch.device(device)\n"
            "    if device.type == torch.device('cuda').type and not torch.cuda.is_available():\n"
            "        return torch.device('cpu')\n    return device",
            f"def f(device):\n    if device == 'auto':\n        device = {NAME}\n    device = torch.device(device)\n"
            "    if device.type == torch.device('cuda').type and not torch.cuda.is_available():\n"
            "        return torch.device('cpu')\n    return device",
        ),
        ("word = 'device' if new else 'cuda'", None),  # torch_geometric's name of a column
        ("told = 'available' if torch.cuda.is_available() else 'not available'", None),
        # Code that runs at import.
        ("def f(x, device='cuda'): pass", None),
        ("def f(x, device='cuda' if torch.cuda.is_available() else 'cpu'): pass", None),
        ("def f(x, *, device=torch.device('cuda:0')): pass", None),
        ("def f():\n    def g(x, device='cuda'): pass\n    return g", None),
        ("f = lambda x, device='cuda': x.to(device)", None),
        ("f = lambda x, *, device=torch.device('cuda'): x.to(device)", None),
        ("class A:\n    f = lambda self, device='cuda': device", None),
        ("run(lambda x, device='cuda': x.to(device))", None),
        ("def f():\n    return lambda x, device='cuda': x.to(device)",
         f"def f():\n    return lambda x, device={NAME}: x.to(device)"),
        ("class A:\n    class B:\n        device = torch.device('cuda')", None),
        ("def f():\n    class A:\n        device = torch.device('cuda')\n    return A", None),
        ("class A:\n    device: str = 'cuda'", None),
        ("class A:\n    count = torch.cuda.memory_allocated()", None),
        ("class A:\n    device: str = field(default_factory=lambda: pick(device='cuda'))",
         f"class A:\n    device: str = field(default_factory=lambda: pick(device={NAME}))"),
        ("def f():\n    return cfg.get('env', dict(backend='nccl'))", None),
        ("def f():\n    parser.add_argument('--backend', default='nccl')", None),
        (
            "def f():\n    backend = 'nccl'\n    dist.init_process_group(backend)",
            "def f():\n    backend = get_accelerator().communication_backend_name()\n"
            "    dist.init_process_group(backend)",
        ),
        # Variables of the process itself.
        ("os.environ['CUDA_VISIBLE_DEVICES'] = ''\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'",
         f"os.environ['CUDA_VISIBLE_DEVICES'] = ''\ndevice = {NAME}"),
        ("env['CUDA_VISIBLE_DEVICES'] = '0'\nold = os.environ.get('CUDA_VISIBLE_DEVICES')", None),
        # Numbers of devices.
        ("n = torch.cuda.device_count()\nif n == 0:\n    f()", None),
        ("if torch.cuda.device_count() > 1:\n    model = DataParallel(model)", None),
        ("torch.cuda.set_device(rank % torch.cuda.device_count())",
         "get_accelerator().set_device(rank % get_accelerator().device_count())"),
        ("mp.spawn(f, nprocs=torch.cuda.device_count())", None),  # 0 without CUDA: none was started
        ("n = torch.cuda.device_count() if torch.cuda.is_available() else 1",
         f"n = get_accelerator().device_count() if {THERE} else 1"),
        # Wrappers of several processes.
        ("m = torch.nn.parallel.DistributedDataParallel(m.cuda(i), device_ids=[i], output_device=i)",
         "m = torch.nn.parallel.DistributedDataParallel(m.to(get_accelerator().device_name(i)), "
         f"device_ids=[i] if {THERE} else None, output_device=i if {THERE} else None)"),
        ("m = FSDP(m, device_id=torch.cuda.current_device())",
         "m = FSDP(m, device_id=torch.device(get_accelerator().current_device_name()))"),
        # A storage takes its device by keyword only.
        ("torch.load(p, map_location=lambda s, l: s.cuda(0))",
         "torch.load(p, map_location=get_accelerator().device_name(0))"),
        ("torch.load(p, lambda s, l: s.cuda())", f"torch.load(p, {NAME})"),
        ("torch.load(p, map_location=lambda s, l: s.cuda(args.gpu_or_none))", None),
        # Emulated bfloat16 counts for torch.
        ("ok = torch.cuda.is_bf16_supported()", None),
        ("ok = torch.cuda.is_bf16_supported(including_emulation=False)",
         f"ok = {THERE} and get_accelerator().is_bf16_supported()"),
        ("k = 1 if torch.cuda.is_bf16_supported(including_emulation=False) else 2",
         f"k = 1 if ({THERE} and get_accelerator().is_bf16_supported()) else 2"),
    ],
)  # fmt: skip
def test_the_use_decides(before: str, after: str | None) -> None:
    text = f"import os\nimport torch\n{before}\n"
    assert port(text, partial=True).replace("from anyaccel import get_accelerator\n", "") == (
        text if after is None else f"import os\nimport torch\n{after}\n"
    )
    assert after is not None or messages(text)


@pytest.mark.parametrize(
    ("code", "readings"),
    [
        ("def f():\n    return torch.cuda.is_available()", ["leave it where CUDA itself is meant", THERE]),
        ("if x.is_cuda:\n    a()\nelse:\n    b()", ["on_accelerator(x)", 'x.device.type != "cpu"']),
        ("if device == 'cuda':\n    a()", ["CUDA itself (leave it)", NAME]),
        ("n = torch.cuda.device_count()", ["it is 0", "get_accelerator().device_count()"]),
    ],
)
def test_doubts_are_told_with_both_readings(code: str, readings: list[str]) -> None:
    told = messages(f"import torch\n{code}\n")
    assert all(reading in told for reading in readings), told


@pytest.mark.parametrize(
    "code",
    [
        "from torch.profiler import ProfilerActivity\na = [ProfilerActivity.CUDA]",
        "import torch\ntorch.distributed.init_process_group('cuda:nccl,cpu:gloo')",
        "import torch\nb = 'cpu:gloo,cuda:nccl'",
    ],
)
def test_nothing_is_passed_over_without_a_word(code: str) -> None:
    assert port(f"{code}\n") == f"{code}\n"
    assert messages(f"{code}\n")


def test_torch_that_comes_with_a_star() -> None:
    text = "from .imports import *\n\nx = y.cuda()\ntorch.cuda.synchronize()\n"
    ported = port(text)
    assert f"x = y.to({NAME})\nget_accelerator().synchronize()\n" in ported
    assert "import torch\n" not in ported


OWN = """
import torch
class Batch:
    def cuda(self):
        self.x = self.x.cuda()
        return self
class Model(torch.nn.Module):
    def cuda(self, device=None):
        self.placed = torch.device('cuda')
        return super().cuda(device)
class Both:
    def cuda(self): return self.to('cuda')
    def to(self, device): return self
class Derived(Batch): pass
"""


def test_classes_with_a_cuda_of_their_own() -> None:
    project = join([outline(OWN), outline("from .data import use_gpu, other\n")])
    assert project.own_cuda == {"Batch", "Model", "Derived"}
    assert port(OWN) == OWN  # its own methods say CUDA to their callers
    left = "from .data import Derived\nd = Derived()\nd.cuda()\n"
    assert port(left, project) == left
    assert "d.cuda()" not in port(left)
    assert "batch.cuda()" in port("def step(batch):\n    batch.cuda()\n", project)
    assert "x.cuda()" not in port("import torch\nx = torch.ones(1)\nx.cuda()\n", project)
    shared = "import torch\nuse_gpu = torch.cuda.is_available()\nif use_gpu:\n    model.cuda()\n"
    assert "use_gpu = torch.cuda.is_available()" in port(shared, project)
    assert "use_gpu = get_accelerator().is_available()" in port(shared)


def test_methods_belong_to_the_class_that_they_are_indented_in() -> None:
    text = 'class Data:\n    """As in\n        class Mine(Data): pass\n    """\n    def pin_memory(self): pass\n'
    assert join([outline(text)]).own_pinning == {"Data", "Mine"}  # nerfstudio
    nested = "class A:\n    def f(self):\n        def cuda(): pass\ndef g():\n    def cuda(): pass\n"
    assert join([outline(nested)]).own_cuda == frozenset()
    flag = "class A:\n    @property\n    def cuda(self): return False\n"  # gpytorch
    assert join([outline(flag)]).own_cuda == frozenset()


def test_own_pinning_is_left() -> None:
    project = join(
        [outline("class Data:\n    def pin_memory(self):\n        return self\nclass RayBundle(Data): pass\n")]
    )
    assert "data.pin_memory()" in port("data = data.pin_memory()\n", project)
    assert "ray_bundle.pin_memory()" in port("x = ray_bundle.pin_memory()\n", project)  # nerfstudio


def test_packages_called_dist_and_build_are_looked_into(tmp_path: Path) -> None:
    for name in ("pkg/dist", "dist", "pkg/build"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.py").write_text("")
    (tmp_path / "pkg" / "__init__.py").write_text("")
    found = list(files.find([str(tmp_path)]))
    names = {str(Path(each).relative_to(tmp_path)) for each in found if isinstance(each, str)}
    assert names == {"pkg/__init__.py", "pkg/dist/a.py", "pkg/build/a.py"}
    [left] = [each for each in found if isinstance(each, files.Skipped)]
    assert left == files.Skipped(
        str(tmp_path / "dist"), "by its name the output of a build; name it to look into it", failed=False
    )


def test_the_blank_line_before_imports_stays_when_their_first_goes() -> None:
    text = "import os\n\nfrom torch.cuda import synchronize\nimport zlib\n\nsynchronize()\n"
    assert port(text).startswith("import os\n\n")


def test_lines_that_merely_name_cuda_are_mentioned() -> None:
    text = '"""About CUDA."""\nuse_cuda = 1  # cuda\nprint("no CUDA")\nx.cuda()\n"""cuda"""\nf(cuda=use_cuda)\ny = 1\n'
    told = {each.line for each in port_text(text).findings}
    assert told == {4}
    assert mentions(text, told) == (2, 3, 6)
    assert mentions("def f():\n    global use_cuda\n    match x:\n        case [*cuda]: pass\n", ()) == (2, 4)
    assert mentions("def f(:\n  cuda", ()) == ()
    assert mentions("def f(x):\n    # type: (Tensor) -> torch.cuda.FloatTensor\n    '# type: a'\n    # a cuda", ()) == (
        2,
    )
    assert mentions("from a import cuda_b as c\nclass Cuda: pass\nx = f'{y} cuda'\n", ()) == (1, 2, 3)


KEYS = "keys = [torch.device('cuda:13'), torch.device('cuda:0')]"
LISTED = f"def test_sort():\n    {KEYS}\n    assert sort(keys)[0].index == 0"  # captum
SET = "class TestWarning:\n    def test_warns(self):\n        model.device = torch.device('cuda')\n        model.warn()"
OPTION = "def test_option():\n    config = Config(device='cuda:1')\n    assert config.device == 'cuda:1'"
MOCKED = """def test_mocked():
    with mock.patch('torch.cuda.is_available', return_value=True):
        device = 'cuda'
        assert str(move(torch.zeros(1, device=device)).device) == 'cuda'"""


@pytest.mark.parametrize("text", [LISTED, SET, OPTION, OPTION.replace(":1", ""), MOCKED])
def test_devices_that_a_test_only_speaks_of_stay(text: str) -> None:
    text = f"import torch\n{text}\n"
    assert port(text) == text
    assert "it may pass without a GPU" in messages(text)


@pytest.mark.parametrize(
    "text",
    [
        SET.replace("        model.warn()", "        model.step(x.cuda())"),  # it needs a GPU anyway
        SET.replace("        model.warn()", "        model.step(torch.zeros(1, device=model.device))")
        + "\n        device = 'cuda'\n        model.to(device)",
        SET.replace(
            "    def", "    def setup_method(self):\n        skip_unless(torch.cuda.is_available())\n\n    def"
        ),
        "@requires_gpu\n" + LISTED,
        "pytestmark = pytest.mark.gpu\n\n\n" + LISTED,
        "if not torch.cuda.is_available():\n    pytest.skip('no GPU', allow_module_level=True)\n\n\n" + LISTED,
        LISTED.replace("test_sort", "sort_all"),  # no test: where it runs is not known
        OPTION.replace("    config", "    if not HAS_CUDA:\n        return\n    config"),
    ],
)
def test_devices_that_code_for_a_gpu_uses_are_ported(text: str) -> None:
    assert "get_accelerator().device_name(" in port(f"import torch\n{text}\n")
    assert "it may pass without a GPU" not in messages(f"import torch\n{text}\n")


AVAILABLE = "torch.cuda.is_available()"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f'f"{{1 if {AVAILABLE} else 2}}"', "f\"{1 if get_accelerator().device_name() != 'cpu' else 2}\""),
        (f"f'{{1 if {AVAILABLE} else 2}}'", f"f'{{1 if {THERE} else 2}}'"),
        (f'f"{{1:{{3 if {AVAILABLE} else 2}}}}"', "f\"{1:{3 if get_accelerator().device_name() != 'cpu' else 2}}\""),
        (f'f"""{{d["k"] if {AVAILABLE} else 2}}"""', f'f"""{{d["k"] if {THERE} else 2}}"""'),
        (f"f\"{{d['k'] if {AVAILABLE} else 2}}\"", "f\"{d['k'] if get_accelerator().device_name() != 'cpu' else 2}\""),
    ],
)
def test_a_fix_in_an_f_string_has_other_quotes(before: str, after: str) -> None:
    assert port(f"import torch\n{before}\n").splitlines()[-1] == after


def test_only_the_place_without_free_quotes_is_left() -> None:
    place = f"print(f\"{{f'{{1 if {AVAILABLE} else 2}}'}}\")"
    assert port(f"import torch\n{place}\nx.cuda()\n", partial=True).splitlines()[-2:] == [place, f"x.to({NAME})"]
    assert "leave no quotes" in messages(f"import torch\n{place}\n")
    assert 'f"{x.cuda()=}"' in port('import torch\nf"{x.cuda()=}"\n')  # its text has the code


# What a CPU computes is the same before and after: there torch has one generator, and no CUDA region has an effect.
_SAME_ON_A_CPU = {
    "draws between two seeds": """
torch.manual_seed(0)
a = torch.rand(2)
torch.cuda.manual_seed_all(0)
print(a, torch.rand(2))
""",
    "a seed in a loop": """
torch.manual_seed(1)
for _ in range(2):
    torch.cuda.manual_seed(1)
    print(torch.rand(1))
""",
    "a seed that grows": """
seed = 3
torch.manual_seed(seed)
seed += 1
torch.cuda.manual_seed(seed)
print(torch.rand(1))
""",
    "a seed that is called for": """
seeds = iter([1, 2])
torch.manual_seed(next(seeds))
torch.cuda.manual_seed(next(seeds))
print(torch.rand(1))
""",
    "a seed below a condition": """
def f(seed, x):
    if x:
        torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)

f(5, 0)
print(torch.initial_seed() == 5)
""",
    "a function between two seeds": """
def seed_more():
    return torch.rand(1)

torch.manual_seed(1)
seed_more()
torch.cuda.manual_seed(1)
print(torch.rand(1))
""",
    "a guard that changes the dtype": """
x = torch.ones(2)
if torch.cuda.is_available():
    x = x.to("cuda", torch.float64)
print(x.dtype)
""",
    "a guard that copies": """
x = torch.ones(2)
y = x
if y.is_cuda:
    y = y.clone().cuda()
y += 1
print(x)
""",
    "a CPU's autocast around CUDA's": """
a = torch.ones(2, 2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    with torch.autocast("cuda", enabled=False):
        print((a @ a).dtype)
""",
}


@pytest.mark.parametrize("name", _SAME_ON_A_CPU)
@pytest.mark.parametrize("partial", [False, True])
def test_a_program_prints_the_same_on_a_cpu(name: str, partial: bool, capsys: pytest.CaptureFixture[str]) -> None:
    before = "import torch\n" + _SAME_ON_A_CPU[name]
    exec(compile(before, "before", "exec"), {"__name__": "before"})
    expected = capsys.readouterr().out
    after = port_text(before, partial=partial).text
    exec(compile(after, "after", "exec"), {"__name__": "after"})
    assert capsys.readouterr().out == expected, after
