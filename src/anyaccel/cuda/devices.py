# SPDX-License-Identifier: Apache-2.0
"""Devices named "cuda" become the accelerator's where torch takes them: in what makes, moves, loads and casts tensors.

A torch.device("cuda") stays what it is until something uses it, so that a program's own questions about it
(`device.type == "cuda"`, isinstance, TorchScript's constants) have the answers that they have on a GPU.

Copies stay copies. On a GPU `.cuda()` and `.cpu()` copy, and programs keep the result: a snapshot of weights, a buffer
that is filled again. Where the CPU is the accelerator the same calls would return the tensor itself. Only leaves that
require gradients stay themselves: those are on the GPU already, and a copy would not be a leaf any more.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._device

from anyaccel.cuda.callers import asked_by_torch
from anyaccel.cuda.report import CHANGED, MATCHED, note

if TYPE_CHECKING:
    from anyaccel.accelerator.base import Accelerator

_NEW = ("new_tensor", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")

_SHARING = ("as_tensor", "asarray")  # they copy between devices, and share memory on one

_accelerator: Accelerator
_on_host = False  # whether the CPU is the accelerator
mixed_precision = False  # whether autocast is used on a CPU, too


def is_cuda(device: Any) -> bool:
    """Whether a value names a device of CUDA: a text, a torch.device, or the index of a device."""
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def index_of(device: Any) -> int | None:
    """The index in a device argument of torch.cuda's functions; None for the current device."""
    if device is None or isinstance(device, int):
        return device if device is None or device >= 0 else None
    return torch.device(device).index


def here(device: Any) -> Any:
    """The accelerator's device in the place of one of CUDA; every other value as it is."""
    if not is_cuda(device):
        return device
    return _accelerator.device(None if _on_host else index_of(device))


def install(accelerator: Accelerator) -> None:
    """Redirect torch's functions, methods and classes that take a device."""
    global _accelerator, _on_host
    _accelerator, _on_host = accelerator, accelerator.device().type == "cpu"
    _make_factories()
    _make_methods()
    _make_contexts()
    torch.serialization.register_package(0, lambda _storage: None, _restored)  # before torch's own, which is 20


def _make_factories() -> None:
    """Functions that make tensors: torch's own list of those that heed a default device, and others."""
    known = set(map(id, torch.utils._device._device_constructors()))  # torch keeps its list: of the originals
    places = [(torch, name) for name in dir(torch) if id(getattr(torch, name)) in known]
    places += [(torch.fft, name) for name in ("fftfreq", "rfftfreq")]
    places += [(torch.nested, name) for name in ("nested_tensor", "as_nested_tensor")]
    places += [(torch, name) for name in _LIKE]
    for place, name in places:
        original = getattr(place, name)
        made = _factory(original, f"{place.__name__}.{name}")
        setattr(place, name, made)
        operator = torch.jit._builtins._find_builtin(original)  # type: ignore[no-untyped-call]
        if operator is not None:  # TorchScript knows functions by identity
            torch.jit._builtins._register_builtin(made, operator)


def _factory(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    shares = _on_host and original.__name__ in _SHARING

    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and is_cuda(device):
            note(f"{name}(device=)", MATCHED)
            kwargs["device"] = here(device)
        if _on_host and kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # there is no device that would copy from it
        result = original(*args, **kwargs)
        return result.clone() if shares and is_cuda(device) and kwargs.get("copy") is not False else result

    make.__name__ = make.__qualname__ = name.rpartition(".")[2]
    make.__module__, make.__doc__ = name.rpartition(".")[0], original.__doc__
    return make


def _make_methods() -> None:
    tensor: Any = torch.Tensor
    to, cpu, type_, get_device = tensor.to, tensor.cpu, tensor.type, tensor.get_device

    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = args[0] if args else kwargs.get("device")
        to_gpu = is_cuda(device)
        if to_gpu:
            note("Tensor.to", MATCHED)
            device = here(device)
        elif not _on_host or (device != "cpu" and not (isinstance(device, torch.device) and device.type == "cpu")):
            return to(self, *args, **kwargs)
        if args:
            args = (device, *args[1:])
        else:
            kwargs["device"] = device
        if _on_host and len(args) < 4 and self.device.type == "cpu" and not (to_gpu and _is_trained(self)):
            kwargs["copy"] = True
        return to(self, *args, **kwargs)

    def to_cuda(
        self: Any, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
    ) -> Any:
        note("Tensor.cuda", MATCHED)
        where = here("cuda" if device is None else device)
        copy = _on_host and self.device.type == "cpu" and not _is_trained(self)
        return to(self, where, non_blocking=non_blocking, copy=copy, memory_format=memory_format)

    def to_cpu(self: Any, memory_format: Any = torch.preserve_format) -> Any:
        if self.device.type == "cpu":
            return to(self, "cpu", copy=True, memory_format=memory_format)
        return cpu(self, memory_format=memory_format)

    def typed(self: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        return type_(self, _type_here(dtype), non_blocking, **kwargs)

    tensor.to, tensor.cuda, tensor.type = (
        functools.wraps(to)(moved),
        functools.wraps(tensor.cuda)(to_cuda),
        functools.wraps(type_)(typed),
    )
    if _on_host:
        tensor.cpu = functools.wraps(cpu)(to_cpu)
        tensor.record_stream = functools.wraps(tensor.record_stream)(lambda self, stream: None)
        tensor.get_device = functools.wraps(get_device)(
            lambda self: _accelerator.current_device() if self.device.type == "cpu" else get_device(self)
        )
    from torch._subclasses.functional_tensor import FunctionalTensor  # compiled graphs keep calls of methods

    FunctionalTensor.cuda = to_cuda  # type: ignore[method-assign]
    for name in _NEW:
        setattr(tensor, name, _method(getattr(tensor, name), name))
    truth = tensor.is_cuda.__get__
    tensor.is_cuda = property(
        lambda self: truth(self) if asked_by_torch() else _accelerator.on_accelerator(self), doc="As Tensor.is_cuda."
    )
    torch.nn.utils.rnn.PackedSequence.is_cuda = property(  # type: ignore[method-assign, assignment]
        lambda self: _accelerator.on_accelerator(self.data)
    )
    tensor.pin_memory = functools.wraps(tensor.pin_memory)(lambda self, device=None: _accelerator.pin_memory(self))
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        _make_storage(storage)
    parse: Any = torch._C._nn._parse_to  # of nn.Module.to, PackedSequence.to and others
    torch._C._nn._parse_to = functools.wraps(parse)(
        lambda *args, **kwargs: parse(*map(_of_index, args), **{k: _of_index(v) for k, v in kwargs.items()})
    )
    set_default = torch.set_default_tensor_type
    torch.set_default_tensor_type = functools.wraps(set_default)(lambda t: set_default(_type_here(t)))


def _is_trained(tensor: Any) -> bool:
    """Whether a copy would hide a leaf from its gradients; Module.cuda, which replaces the data, records none."""
    return bool(tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled())


def _of_index(value: Any) -> Any:
    """An index of a device as a device, which torch's own parser takes without a GPU."""
    return torch.device("cuda", value) if isinstance(value, int) and not isinstance(value, bool) else value


def _method(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and is_cuda(device):
            note(f"Tensor.{name}(device=)", MATCHED)
            kwargs["device"] = here(device)
        return original(self, *args, **kwargs)

    return make


def _type_here(name: Any) -> Any:
    """ "torch.cuda.FloatTensor" without CUDA; on another accelerator than the CPU its own module."""
    if isinstance(name, str) and name.startswith("torch.cuda."):
        module = "torch" if _on_host else f"torch.{_accelerator.device().type}"
        return f"{module}.{name.rpartition('.')[2]}"
    return name


def _make_storage(kind: Any) -> None:
    cuda = kind.cuda

    @functools.wraps(cuda)
    def to_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        note(f"{kind.__name__}.cuda", MATCHED)
        if _on_host:
            return self.clone()
        where = here("cuda" if device is None else device)
        return (self.untyped() if hasattr(self, "untyped") else self).to(device=where, non_blocking=non_blocking)

    kind.cuda = to_cuda


def _restored(storage: Any, location: str) -> Any:
    """A storage of a checkpoint that was saved on CUDA, or that is to be loaded there; None for any other."""
    if not is_cuda(location):
        return None
    note("torch.load", MATCHED)
    where = here(location)
    restore: Any = torch.serialization.default_restore_location
    return storage if where.type == "cpu" else restore(storage, str(where))


def _make_contexts() -> None:
    """The default device, random generators, mixed precision and TorchScript's files."""
    context: Any = torch.utils._device.DeviceContext  # of set_default_device and `with torch.device(...)`
    begin = context.__init__
    context.__init__ = functools.wraps(begin)(lambda self, device: begin(self, here(device)))
    torch.Generator = _generator(torch.Generator)  # type: ignore[misc]
    synchronize = torch.accelerator.synchronize  # compiled graphs call it for torch.cuda's
    torch.accelerator.synchronize = functools.wraps(synchronize)(
        lambda device=None, /: _accelerator.synchronize() if is_cuda(device) else synchronize(device)
    )
    files: Any = torch.jit._serialization
    checked = files.validate_map_location
    files.validate_map_location = functools.wraps(checked)(lambda location=None: checked(here(location)))
    torch.random.fork_rng = _forked(torch.random.fork_rng)
    autocast: Any = torch.amp.autocast_mode.autocast
    scaler: Any = torch.amp.grad_scaler.GradScaler
    autocast.__init__ = _precision(autocast.__init__, "autocast")
    scaler.__init__ = _precision(scaler.__init__, "GradScaler")


def _forked(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fork_rng(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        if is_cuda(values["device_type"]) or values["device_type"] is None:
            values["device_type"] = _accelerator.device().type
            if _on_host:
                values["devices"] = []  # the CPU's state is kept in any case
        return original(*given.args, **given.kwargs)

    return fork_rng


def _generator(original: Any) -> Any:
    class OfDevice(type):
        def __call__(cls, device: Any = "cpu") -> Any:
            return original(here(device))

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

    return OfDevice(original.__name__, (), {"__doc__": original.__doc__, "__module__": "torch"})


def _precision(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Of autocast and GradScaler: for the accelerator; on a CPU off unless asked for, as float16 has no kernels there.

    Losses need no scaling in bfloat16, which has the range of float32.
    """
    signature = inspect.signature(original)
    device = "device_type" if name == "autocast" else "device"

    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        if not is_cuda(values[device]):
            return original(self, *args, **kwargs)
        values[device] = _accelerator.device().type
        if not _on_host:
            note(name, MATCHED)
        elif mixed_precision and name == "autocast":
            values["dtype"] = torch.bfloat16
            note(name, CHANGED, "in bfloat16")
        else:
            values["enabled"] = False
            note(name, CHANGED, "off on a CPU; as-cuda option amp: in bfloat16")
        return original(*given.args, **given.kwargs)

    return begin
