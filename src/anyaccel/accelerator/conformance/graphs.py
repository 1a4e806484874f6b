# SPDX-License-Identifier: Apache-2.0
"""Graphs: captured once, replayed with new input.

On a synchronous device without graphs the work runs while it is "captured" and a replay does nothing.
"""

from __future__ import annotations

import contextlib

import torch

from anyaccel.accelerator.base import HOST, Accelerator
from anyaccel.accelerator.conformance.checking import check, expect, expect_equal, expect_none, expect_type
from anyaccel.accelerator.spec import Capability


def _doubled(source: torch.Tensor, target: torch.Tensor) -> None:
    torch.mul(source, 2.0, out=target)


@check("graphs", "create_graph", "capture_to_graph", "replay_graph")
def check_a_replay_sees_new_input(accelerator: Accelerator) -> None:
    """And nothing runs again before the replay."""
    device = accelerator.current_device_name()
    source, target = torch.full((1000,), 3.0, device=device), torch.zeros(1000, device=device)
    _doubled(source, target)  # kernels must not be loaded within a capture
    target.zero_()
    accelerator.synchronize()
    graph = accelerator.create_graph()
    expect(graph is not None, "create_graph() to return a graph", graph)
    with accelerator.capture_to_graph(graph):
        _doubled(source, target)
    accelerator.synchronize()
    replays = accelerator.has(Capability.GRAPHS)
    captured = _same_value(target)
    expect_equal("after the capture, the result", captured, 0.0 if replays else 6.0)
    source.fill_(5.0)
    expect_none("replay_graph()", accelerator.replay_graph, graph)
    accelerator.synchronize()
    expect_equal("after replay_graph(), the result", _same_value(target), 10.0 if replays else 6.0)
    with contextlib.suppress(AttributeError):  # not every vendor's graph can be emptied
        graph.reset()


@check("graphs", "is_current_stream_capturing")
def check_is_current_stream_capturing_tells(accelerator: Accelerator) -> None:
    """True within a capture only; always false where nothing is captured."""
    expect_equal("outside a capture, is_current_stream_capturing()", accelerator.is_current_stream_capturing(), False)
    expect_type("is_current_stream_capturing()", accelerator.is_current_stream_capturing(), bool)
    if not accelerator.has(Capability.GRAPHS):
        return
    tensor = torch.zeros(8, device=accelerator.current_device_name())
    tensor.add_(1.0)
    accelerator.synchronize()
    graph = accelerator.create_graph()
    with accelerator.capture_to_graph(graph):
        tensor.add_(1.0)  # an empty capture makes some runtimes warn
        inside = accelerator.is_current_stream_capturing()
    expect_equal("within a capture, is_current_stream_capturing()", inside, True)
    expect_equal("after a capture, is_current_stream_capturing()", accelerator.is_current_stream_capturing(), False)


def _same_value(tensor: torch.Tensor) -> float:
    """The value that all elements have; nan when they differ."""
    values = set(tensor.to(HOST).tolist())
    return float(values.pop()) if len(values) == 1 else float("nan")
