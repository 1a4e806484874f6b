# SPDX-License-Identifier: Apache-2.0
"""A graph as devices have them, on the CPU: operators are noted with their tensors, and run on those when replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anyaccel.accelerator import synchronous

_WAITS = ("_local_scalar_dense", "nonzero", "lift_fresh")  # what reads values on the host, or comes from there


class RecordingAccelerator:
    """An accelerator with graphs, which hold 1000 bytes each."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []

    def has(self, _capability: object) -> bool:
        return True

    Event = synchronous.Event

    def synchronize(self) -> None:
        pass

    def memory_reserved(self) -> int:
        return 1000 * sum(bool(graph.calls) for graph in self.graphs)

    def create_graph(self) -> RecordedGraph:
        self.graphs.append(RecordedGraph())
        return self.graphs[-1]

    def capture_to_graph(self, graph: RecordedGraph, pool: object = None) -> contextlib.AbstractContextManager[None]:
        return graph.capture()

    def replay_graph(self, graph: RecordedGraph) -> None:
        graph.replay()


def recording_accelerator(monkeypatch: Any) -> RecordingAccelerator:
    """Have runtime="device" take its steps through recorded graphs."""
    from anyaccel.inference.device import capture, executor, graphs

    made = RecordingAccelerator()
    for module in (capture, executor, graphs):
        monkeypatch.setattr(module, "get_accelerator", lambda: made)
    return made


class RecordedGraph:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def reset(self) -> None:
        self.calls.clear()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """What runs within has no effect on tensors that were there before."""
        recorder = _Recorder(self)
        with recorder:
            yield
        for storage, before in recorder.written.values():
            storage.copy_(before)

    def replay(self) -> None:
        for op, args, kwargs, out in self.calls:
            again = op(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph
        self.written: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op.overloadpacket.__name__
        assert name not in _WAITS, f"{name} in a graph"
        for number, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                target = kwargs[argument.name] if argument.name in kwargs else args[number]
                storage = target.untyped_storage()
                self.written.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = op(*args, **kwargs)
        self.graph.calls.append((op, args, kwargs, out))
        return out
