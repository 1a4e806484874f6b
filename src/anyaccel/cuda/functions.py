# SPDX-License-Identifier: Apache-2.0
"""torch.cuda's functions and classes, answered by the accelerator.

What it does not have is one error that names it, never a figure that nobody has measured.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from anyaccel.cuda.callers import for_users
from anyaccel.cuda.devices import index_of
from anyaccel.cuda.report import ABSENT, MATCHED, note
from anyaccel.cuda_names import CLASSES, FUNCTIONS, TYPED_TENSORS, Method
from anyaccel.errors import CapabilityError

if TYPE_CHECKING:
    from anyaccel.accelerator.base import Accelerator

# Answers that do not change while a program runs: the compiler takes them as constants.
_CONSTANT = {"is_available", "device_count", "current_device", "is_bf16_supported", "is_initialized"}
_SUBMODULES = ("memory", "random", "streams", "graphs")
# What changes no result: torch's own ways to start CUDA, which packages call, and limits.
_NOTHING = ("init", "_lazy_init", "ipc_collect", "set_sync_debug_mode", "set_per_process_memory_fraction")
# The first NCCL that adds bfloat16, as every backend here does: programs ask for it before they compute in it.
_NCCL = (2, 10, 3)


def install(accelerator: Accelerator) -> None:
    """Replace what torch.cuda offers."""
    found: dict[str, Any] = {name: _forward(accelerator, method) for name, method in FUNCTIONS.items()}
    answers = _Answers(accelerator)
    found |= {name: getattr(answers, name) for name, kind in vars(_Answers).items() if isinstance(kind, FunctionType)}
    del found["__init__"]
    found |= dict.fromkeys(_NOTHING, lambda *args, **kwargs: None)
    missing = [
        name
        for name in torch.cuda.__all__
        if name not in found and isinstance(getattr(torch.cuda, name, None), FunctionType)
    ]
    for name, answer in found.items():
        _replace(name, _counted(name, answer))
    for name in missing:
        _replace(name, _absent(accelerator, name))
    classes = {name: getattr(accelerator, name) for name in CLASSES}
    if accelerator.device().type == "cpu":
        classes |= {name: getattr(torch, name) for name in (*TYPED_TENSORS, "BoolTensor", "CharTensor", "ShortTensor")}
    classes |= {"device": _device_context(answers), "device_of": _device_of(accelerator)}
    for name, kind in classes.items():
        for place in _places(name):
            setattr(place, name, kind)
    generators = [accelerator.default_generator(index) for index in range(accelerator.device_count())]
    cuda: Any = torch.cuda
    cuda.default_generators = tuple(generators)
    for name, function in list(vars(cuda.nccl).items()):
        if isinstance(function, FunctionType) and not name.startswith("_"):
            answer = (lambda: _NCCL) if name == "version" else _absent(accelerator, f"nccl.{name}")
            setattr(cuda.nccl, name, for_users(function, answer))
    _graphs(accelerator)
    _ranges(accelerator)
    if accelerator.device().type == "cpu":
        _on_host()


def _on_host() -> None:
    """What a CPU has under torch's own names, or not at all."""
    sparse: Any = torch.cuda.sparse
    for name in ("FloatTensor", "DoubleTensor", "HalfTensor", "IntTensor", "LongTensor", "ShortTensor", "ByteTensor"):
        setattr(sparse, name, getattr(torch.sparse, name))
    # What CUDA graphs may record computes the same on any device.
    for module in [module for name, module in sys.modules.items() if name.startswith("torch.optim.")]:
        if hasattr(module, "_get_capturable_supported_devices"):
            module._get_capturable_supported_devices = _capturable_devices  # type: ignore[attr-defined]
    # Programs that allow only a GPU's kernels of attention would have none: the one that computes every case stays.
    inner: Any = torch._C
    allow = inner._set_sdp_use_math
    inner._set_sdp_use_math = lambda enabled: allow(True)


def _capturable_devices(supports_xla: bool = True) -> list[str]:
    """As torch's, with the CPU; a function that TorchScript can compile, as torch.distributed.optim has it do."""
    devices = ["cuda", "xpu", "hpu", "cpu"]
    if supports_xla:
        devices.append("xla")
    return devices


def _places(name: str) -> Iterator[ModuleType]:
    """torch.cuda and those of its submodules that have the same thing under the same name."""
    yield torch.cuda
    original = getattr(torch.cuda, name, None)
    for each in _SUBMODULES:
        module = getattr(torch.cuda, each)
        if original is not None and getattr(module, name, None) is original:
            yield module


def _counted(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        note(f"torch.cuda.{name}", MATCHED)
        return answer(*args, **kwargs)

    return call


def _replace(name: str, answer: Callable[..., Any]) -> None:
    original = getattr(torch.cuda, name, None)
    if original is None:
        return

    replaced = for_users(original, answer)
    if name in _CONSTANT:
        replaced._dynamo_marked_constant = True  # type: ignore[attr-defined]
    for place in list(_places(name)):
        setattr(place, name, replaced)


def _forward(accelerator: Accelerator, method: Method) -> Callable[..., Any]:
    """A function with the names of torch.cuda's parameters on the accelerator's method."""
    names = dict(method.parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        values = {names.get(key, key): value for key, value in given.items()}
        if "device_index" in values:
            values["device_index"] = index_of(values["device_index"])
        return getattr(accelerator, method.name)(**values)

    return call


def _absent(accelerator: Accelerator, name: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        note(f"torch.cuda.{name}", ABSENT)
        raise CapabilityError(
            accelerator.device_name(), f"torch.cuda.{name}", "only CUDA has it; guard the call where it is not needed"
        )

    return refuse


def _absent_class(accelerator: Accelerator, name: str) -> type:
    """A class that annotations may name, and that has no objects."""
    refuse = _absent(accelerator, name)
    return type(name, (), {"__new__": lambda cls, *args, **kwargs: refuse(), "__module__": "torch.cuda"})


class _Answers:
    """Functions of torch.cuda that the accelerator has under another name, or that are made of several of its own."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.chosen: int | None = None

    def set_device(self, device: Any) -> None:
        index = index_of(device)
        if index is not None:
            self.chosen = index
            self.accelerator.set_device(index)

    def current_device(self) -> int:
        if self.chosen is not None and self.accelerator.device().type == "cpu":
            return self.chosen  # a process has one CPU, whatever index it has chosen for it
        return self.accelerator.current_device()

    def is_initialized(self) -> bool:
        return True

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return self.accelerator.is_bf16_supported(including_emulation)

    def get_device_name(self, device: Any = None) -> str:
        return self.accelerator.device_properties(index_of(device)).name

    def seed(self) -> None:
        self.accelerator.manual_seed(torch.seed())

    def seed_all(self) -> None:
        self.accelerator.manual_seed_all(torch.seed())

    def set_stream(self, stream: Any) -> None:
        if stream is not None:
            self.accelerator.stream(stream).__enter__()

    def get_sync_debug_mode(self) -> int:
        return 0

    def get_arch_list(self) -> list[str]:
        return []

    def _is_in_bad_fork(self) -> bool:
        return False


def _device_context(answers: _Answers) -> type:
    class device:
        """Makes a device the current one within the block, as torch.cuda.device does."""

        def __init__(self, device: Any) -> None:
            self.idx = index_of(device)
            self.prev_idx: int | None = None

        def __enter__(self) -> None:
            if self.idx is not None:
                self.prev_idx = answers.current_device()
                answers.set_device(self.idx)

        def __exit__(self, *_error: object) -> None:
            if self.prev_idx is not None:
                answers.set_device(self.prev_idx)

    return device


def _device_of(accelerator: Accelerator) -> Callable[..., Any]:
    def device_of(obj: Any) -> Any:
        return torch.cuda.device(obj.device.index if accelerator.on_accelerator(obj) else None)

    return device_of


def _graphs(accelerator: Accelerator) -> None:
    """CUDA graphs: the accelerator's; where it has none an error, as a replay that does nothing gives wrong results."""
    if not accelerator.has("graphs"):
        for name in ("CUDAGraph", "graph"):
            for place in list(_places(name)):
                setattr(place, name, _absent_class(accelerator, name))
        return
    for name, made in (("CUDAGraph", accelerator.create_graph), ("graph", _captured(accelerator))):
        for place in list(_places(name)):
            setattr(place, name, made)


def _captured(accelerator: Accelerator) -> Callable[..., Any]:
    def graph(cuda_graph: Any, pool: Any = None, stream: Any = None, **_mode: Any) -> Any:
        return accelerator.capture_to_graph(cuda_graph, pool=pool, stream=stream)

    return graph


def _ranges(accelerator: Accelerator) -> None:
    """NVTX: ranges of torch's profiler."""
    nvtx: Any = torch.cuda.nvtx

    @contextlib.contextmanager
    def marked(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        accelerator.range_push(msg.format(*args, **kwargs))
        try:
            yield
        finally:
            accelerator.range_pop()

    nvtx.range_push = functools.wraps(nvtx.range_push)(lambda msg: accelerator.range_push(msg))
    nvtx.range_pop = functools.wraps(nvtx.range_pop)(lambda: accelerator.range_pop())
    nvtx.range = marked
    profiler: Any = torch.cuda.profiler  # which range an external tool records
    profiler.start = functools.wraps(profiler.start)(lambda: None)
    profiler.stop = functools.wraps(profiler.stop)(lambda: None)
    nvtx.mark = functools.wraps(nvtx.mark)(lambda msg: None)
