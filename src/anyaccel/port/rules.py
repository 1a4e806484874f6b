# SPDX-License-Identifier: Apache-2.0
"""Every rule as data: code, what it is about, why, and what it does to an example.

docs/porting-rules.md is written from this table, and each example is a test.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        code: ACC1 torch.cuda, ACC2 device names, ACC3 tensors, ACC4 processes, ACC5 what is only reported.
        title: what it is about.
        why: the reason, and what is left alone.
        examples: pairs of before and after; the imports are not shown. Equal ones are reported and left.
    """

    code: str
    title: str
    why: str
    examples: tuple[tuple[str, str], ...]

    @property
    def fixes(self) -> bool:
        """Whether it makes changes at all."""
        return any(before != after for before, after in self.examples)


def _left(code: str) -> tuple[str, str]:
    return code, code


_ON_ACCELERATOR = "if get_accelerator().on_accelerator(x):\n    y = y.to(get_accelerator().device_name())"

_NO_CPU = 'get_accelerator().device_name() != "cpu"'

RULES: tuple[Rule, ...] = (
    Rule(
        "ACC101",
        "a function of torch.cuda that every accelerator has",
        "The accelerator's method has the same meaning. Other keywords follow: `device=` becomes `device_index=`. "
        'A guard that is_available() is becomes `device_name() != "cpu"`, so that a machine without a GPU takes the '
        "branches that it took; is_available() only where the CPU may go along: moving data, waiting, seeding again "
        "with the number that torch was just seeded with, and where code says that it needs a GPU. It stays where it "
        "guards something that still needs CUDA, and where its value is printed, returned or passed on.",
        (
            ("torch.cuda.synchronize(device=1)", "get_accelerator().synchronize(device_index=1)"),
            ("peak = torch.cuda.max_memory_allocated()", "peak = get_accelerator().max_memory_allocated()"),
            (
                "if torch.cuda.is_available():\n    torch.cuda.empty_cache()",
                "if get_accelerator().is_available():\n    get_accelerator().empty_cache()",
            ),
            (
                "if not torch.cuda.is_available():\n    workers = 1",
                'if get_accelerator().device_name() == "cpu":\n    workers = 1',
            ),
            _left("if torch.cuda.is_available():\n    torch.cuda.set_per_process_memory_fraction(0.5)"),
        ),
    ),
    Rule(
        "ACC102",
        "torch.cuda.current_device()",
        "An index in CUDA code, and used as a device too. Elsewhere the two differ, so the use decides: "
        "`current_device_name()` where a device is wanted, `current_device()` where an index is.",
        (
            (
                "x = torch.empty(2, device=torch.cuda.current_device())",
                "x = torch.empty(2, device=get_accelerator().current_device_name())",
            ),
            ("rank = torch.cuda.current_device()", "rank = get_accelerator().current_device()"),
            _left("run(torch.cuda.current_device())"),
        ),
    ),
    Rule(
        "ACC103",
        "torch.cuda.default_generators",
        "The list is empty until CUDA starts; `default_generator(i)` starts the device.",
        (("g = torch.cuda.default_generators[i]", "g = get_accelerator().default_generator(i)"),),
    ),
    Rule(
        "ACC104",
        "torch.cuda.amp",
        "torch.amp does the same for every device. `autocast` has other parameters there, so they get names. CUDA's "
        "mixed precision is off, with a warning, where there is no CUDA; on a CPU torch.amp's would be on, in "
        "bfloat16, so `enabled=` says that it stays off, unless the code says so itself. Take the condition away where "
        'a CPU is to have it. The same goes for `torch.autocast("cuda")`.',
        (
            (
                "with torch.cuda.amp.autocast(use_amp):\n    pass",
                f"with torch.amp.autocast(get_accelerator().device_name(), enabled=use_amp and {_NO_CPU}):\n    pass",
            ),
            (
                "scaler = torch.cuda.amp.GradScaler()",
                f"scaler = torch.amp.GradScaler(get_accelerator().device_name(), enabled={_NO_CPU})",
            ),
            (
                "use_amp = fast and torch.cuda.is_available()\n"
                "with torch.cuda.amp.autocast(enabled=use_amp):\n    pass",
                f"use_amp = fast and {_NO_CPU}\n"
                "with torch.amp.autocast(get_accelerator().device_name(), enabled=use_amp):\n    pass",
            ),
            (
                "@torch.cuda.amp.custom_bwd\ndef backward(ctx, g):\n    return g",
                "@torch.amp.custom_bwd(device_type=get_accelerator().device_name())\n"
                "def backward(ctx, g):\n    return g",
            ),
        ),
    ),
    Rule(
        "ACC105",
        "torch.cuda.nvtx",
        "Ranges go to the vendor's profiler, or to torch.profiler. The depth that NVTX returns is not there.",
        (
            ("torch.cuda.nvtx.range_push('step')", "get_accelerator().range_push('step')"),
            ("torch.cuda.nvtx.range_pop()", "get_accelerator().range_pop()"),
            _left("depth = torch.cuda.nvtx.range_push('step')"),
        ),
    ),
    Rule(
        "ACC106",
        "torch.cuda.FloatTensor and the like",
        "The accelerator makes such tensors and knows them in isinstance(), which on a CPU is true where it was false: "
        "so it is replaced where `is_cuda` is. As a type, in `tensor.type()` or as a default, they have none.",
        (
            ("x = torch.cuda.FloatTensor(2, 3)", "x = get_accelerator().FloatTensor(2, 3)"),
            (
                "if isinstance(x, torch.cuda.HalfTensor):\n    y = y.cuda()",
                "if isinstance(x, get_accelerator().HalfTensor):\n    y = y.to(get_accelerator().device_name())",
            ),
            _left("if isinstance(x, torch.cuda.HalfTensor):\n    y = fast(x)"),
            _left("torch.set_default_tensor_type(torch.cuda.FloatTensor)"),
            _left("x.type('torch.cuda.FloatTensor')"),
        ),
    ),
    Rule(
        "ACC107",
        "CUDA graphs",
        "On a device without graphs the captured work runs at once and a replay does nothing, so they are replaced "
        'only in a file that asks `get_accelerator().has("graphs")`: write the way without a graph first.',
        (
            (
                'if not get_accelerator().has("graphs"):\n    y = model(x)\nelse:\n'
                "    g = torch.cuda.CUDAGraph()\n    with torch.cuda.graph(g, stream=s):\n        y = model(x)",
                'if not get_accelerator().has("graphs"):\n    y = model(x)\nelse:\n'
                "    g = get_accelerator().create_graph()\n"
                "    with get_accelerator().capture_to_graph(g, stream=s):\n        y = model(x)",
            ),
            _left("g = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g, stream=s):\n    y = model(x)"),
        ),
    ),
    Rule(
        "ACC108",
        "torch.cuda.Stream and Event",
        "The accelerator has both classes; those of a synchronous device have nothing to wait for. Only calls and "
        "isinstance() are replaced.",
        (
            ("e = torch.cuda.Event(enable_timing=True)", "e = get_accelerator().Event(enable_timing=True)"),
            ("s = torch.cuda.Stream()", "s = get_accelerator().Stream()"),
            _left("class Mine(torch.cuda.Stream):\n    pass"),
        ),
    ),
    Rule(
        "ACC109",
        "the size of the device's memory",
        "`total_memory()` and `available_memory()` are what the properties and mem_get_info() say.",
        (
            (
                "n = torch.cuda.get_device_properties(0).total_memory",
                "n = get_accelerator().total_memory(0)",
            ),
            ("free = torch.cuda.mem_get_info()[0]", "free = get_accelerator().available_memory()"),
            (
                "free, total = torch.cuda.mem_get_info()",
                "free, total = get_accelerator().available_memory(), get_accelerator().total_memory()",
            ),
        ),
    ),
    Rule(
        "ACC110",
        "torch.cuda.OutOfMemoryError",
        "torch has the same class under a name of no device.",
        (
            (
                "try:\n    step()\nexcept torch.cuda.OutOfMemoryError:\n    pass",
                "try:\n    step()\nexcept torch.OutOfMemoryError:\n    pass",
            ),
        ),
    ),
    Rule(
        "ACC111",
        "a device picked by hand",
        "The accelerator was chosen already, the CPU where there is no other, so one call replaces the choice.",
        (
            ('d = "cuda" if torch.cuda.is_available() else "cpu"', "d = get_accelerator().device_name()"),
            (
                'd = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")',
                "d = torch.device(get_accelerator().device_name(0))",
            ),
        ),
    ),
    Rule(
        "ACC201",
        "the name of a CUDA device where a device is wanted",
        "As an argument or variable that is called a device, in `.to()`, `torch.device()` and functions of torch that "
        "take one. A default or an attribute of a class is left: it would choose when its module is imported.",
        (
            ('x = torch.ones(2, device="cuda")', "x = torch.ones(2, device=get_accelerator().device_name())"),
            ('x = x.to("cuda:1")', "x = x.to(get_accelerator().device_name(1))"),
            ('x = x.to(f"cuda:{i}")', "x = x.to(get_accelerator().device_name(i))"),
            ('d = torch.device("cuda", i)', "d = torch.device(get_accelerator().device_name(i))"),
            _left('def load(path, device="cuda"):\n    pass'),
        ),
    ),
    Rule(
        "ACC202",
        "the name of a CUDA device where its meaning is unclear",
        "Keys, texts and arguments of functions that nobody knows are left, and comparisons where the CPU has a way of "
        "its own: look at each.",
        (
            (
                'if x.device.type == "cuda":\n    torch.cuda.synchronize()',
                "if x.device.type == get_accelerator().device_name():\n    get_accelerator().synchronize()",
            ),
            _left('if x.device.type == "cuda":\n    fast(x)'),
            _left('speed = {"cuda": 1.0}'),
            _left('run("cuda")'),
        ),
    ),
    Rule(
        "ACC203",
        "a whole number where a device is wanted",
        "torch takes it for the index of a device of the accelerator that it was built for; a CPU has none.",
        (
            (
                "torch.cuda.set_device(local_rank)\nmodel = model.to(local_rank)",
                "get_accelerator().set_device(local_rank)\nmodel = model.to(local_rank)",
            ),
            (
                "torch.cuda.synchronize()\nx = torch.zeros(2, device=torch.device(0))",
                "get_accelerator().synchronize()\nx = torch.zeros(2, device=torch.device(0))",
            ),
        ),
    ),
    Rule(
        "ACC301",
        ".cuda()",
        "`.to()` takes the name of a device; `non_blocking` and `memory_format` stay. An argument that may be an index "
        "or a device is left, and so are classes with a cuda() of their own.",
        (
            ("x = x.cuda()", "x = x.to(get_accelerator().device_name())"),
            (
                "x = x.cuda(rank, non_blocking=True)",
                "x = x.to(get_accelerator().device_name(rank), non_blocking=True)",
            ),
            ("y = y.cuda(x.device)", "y = y.to(x.device)"),
            (
                "torch.load(p, map_location=lambda storage, _: storage.cuda(0))",
                "torch.load(p, map_location=get_accelerator().device_name(0))",
            ),
            _left("x = x.cuda(where)"),
        ),
    ),
    Rule(
        "ACC302",
        ".is_cuda",
        "Asks whether the tensor is on the accelerator. On a CPU that is true, so it is replaced where the CPU may go "
        "along: where data is moved, and in an assertion. Options and attributes of other objects are left.",
        (
            ("if x.is_cuda:\n    y = y.cuda()", _ON_ACCELERATOR),
            _left("assert not x.is_cuda"),
            _left("if not x.is_cuda:\n    y = on_the_cpu(x)"),
        ),
    ),
    Rule(
        "ACC303",
        ".pin_memory()",
        "Pinning is the accelerator's affair; where it has no use for it the tensor comes back. `DataLoader("
        "pin_memory=True)` stays: torch ignores it where there is nothing to pin for.",
        (("x = x.pin_memory()", "x = get_accelerator().pin_memory(x)"),),
    ),
    Rule(
        "ACC401",
        "'nccl' as the backend of a process group",
        "The accelerator names the backend that moves its tensors, where it is given to what starts a group; a default "
        "is left, since an accelerator without collectives would raise.",
        (
            (
                'torch.distributed.init_process_group("nccl")',
                "torch.distributed.init_process_group(get_accelerator().communication_backend_name())",
            ),
            _left('if backend == "nccl":\n    pass'),
        ),
    ),
    Rule(
        "ACC402",
        "CUDA_VISIBLE_DEVICES",
        "Each vendor has its own variables, a CPU has none. Reads are left, since each vendor writes them in its own "
        "way, and so is a process's own variable: an accelerator would be chosen before it is written.",
        (
            (
                'env["CUDA_VISIBLE_DEVICES"] = "0,1"',
                "get_accelerator().set_visible_devices_envs(env, [0, 1])",
            ),
            _left('os.environ["CUDA_VISIBLE_DEVICES"] = ""'),
            _left('ids = os.environ.get("CUDA_VISIBLE_DEVICES", "")'),
            (
                'if "CUDA_VISIBLE_DEVICES" in os.environ:\n    pass',
                "if any(name in os.environ for name in get_accelerator().visible_devices_envs()):\n    pass",
            ),
        ),
    ),
    Rule(
        "ACC403",
        "device_ids of DistributedDataParallel",
        "A CPU has none, and DistributedDataParallel refuses them there.",
        (
            (
                "model = DDP(model, device_ids=[rank])",
                'model = DDP(model, device_ids=[rank] if get_accelerator().device_name() != "cpu" else None)',
            ),
        ),
    ),
    Rule(
        "ACC501",
        "a part of torch.cuda without counterpart",
        "The message says what to use instead, where there is something.",
        (
            _left("name = torch.cuda.get_device_name(0)"),
            _left("with torch.cuda.device(1):\n    pass"),
        ),
    ),
    Rule(
        "ACC502",
        "CUDA sources in an extension",
        "They need a port of their own; an op builder compiles what each device has.",
        (_left("e = torch.utils.cpp_extension.CUDAExtension('e', ['e.cu'])"),),
    ),
    Rule("ACC503", "Triton kernels", "They run where is_triton_supported() says so.", (_left("import triton"),)),
    Rule(
        "ACC504",
        "torch.backends.cuda",
        "Settings of CUDA, without effect on other devices.",
        (_left("torch.backends.cuda.matmul.allow_tf32 = True"),),
    ),
    Rule("ACC505", "torch.version.cuda", "None in a torch without CUDA.", (_left("v = torch.version.cuda"),)),
    Rule(
        "ACC506",
        "NVIDIA's management tools",
        "The accelerator counts devices and tells their memory.",
        (_left("subprocess.run(['nvidia-smi'])"), _left("import pynvml")),
    ),
    Rule(
        "ACC507",
        "packages that need CUDA",
        "The message says what replaces the package; most can be guarded.",
        (_left("import bitsandbytes"), _left("from flash_attn import flash_attn_func")),
    ),
    Rule(
        "ACC508",
        "ProfilerActivity.CUDA",
        "`torch.profiler.supported_activities()` has those of the machine.",
        (_left("a = torch.profiler.ProfilerActivity.CUDA"),),
    ),
)
BY_CODE = {rule.code: rule for rule in RULES}
