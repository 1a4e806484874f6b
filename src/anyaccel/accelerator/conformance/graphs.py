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


@check("graphs", "create_graph", "capture_to_graph", "replay_graph")
def check_a_tiny_model_decodes_by_replays(accelerator: Accelerator) -> None:
    """A step of a decoder with a static key/value cache, replayed token by token, gives what it gives on the host.

    It has what steps of real models have: products, a norm, attention over a cache that is written in place, and the
    chosen token, which the next step reads where it lies.
    """
    expected = _decoded(_tiny_decoder(HOST), None)
    found = _decoded(_tiny_decoder(accelerator.device(accelerator.current_device())), accelerator)
    expect_equal("tokens of a tiny decoder", found, expected)


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


_VOCABULARY, _WIDTH, _CONTEXT, _STEPS = 61, 32, 16, 12


def _tiny_decoder(device: torch.device) -> dict[str, torch.Tensor]:
    """Weights, cache, and what a step reads and writes: token, position, position of all keys."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"embed": (_VOCABULARY, _WIDTH), "qkv": (3 * _WIDTH, _WIDTH), "o": (_WIDTH, _WIDTH)}
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state["cache"] = torch.zeros(_CONTEXT, 2 * _WIDTH)
    state["token"], state["position"] = torch.tensor([3]), torch.tensor([0])
    state["places"] = torch.arange(_CONTEXT)
    return {name: value.to(device) for name, value in state.items()}


def _step(state: dict[str, torch.Tensor]) -> None:
    h = state["embed"].index_select(0, state["token"])
    x = torch.nn.functional.layer_norm(h, (_WIDTH,))
    q, kv = torch.split(torch.nn.functional.linear(x, state["qkv"]), [_WIDTH, 2 * _WIDTH], -1)
    state["cache"].index_copy_(0, state["position"], kv)
    k, v = (part[None] for part in _halves(state["cache"]))
    seen = (state["places"] <= state["position"]).view(1, 1, 1, -1)
    y = torch.nn.functional.scaled_dot_product_attention(q.view(1, 2, 1, -1), k, v, attn_mask=seen)
    h = torch.addmm(h, y.reshape(1, _WIDTH), state["o"].t())
    logits = torch.nn.functional.linear(torch.nn.functional.layer_norm(h, (_WIDTH,)), state["embed"])
    state["token"].copy_(logits.argmax(-1))
    state["position"].add_(1)


def _halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, [2 heads, places, values of a head] each."""
    k, v = cache.view(_CONTEXT, 2, 2, -1).unbind(1)
    return k.transpose(0, 1), v.transpose(0, 1)


def _decoded(state: dict[str, torch.Tensor], accelerator: Accelerator | None) -> list[int]:
    """Tokens of several steps; by replays of one captured step where the accelerator has graphs."""
    graph = None
    if accelerator is not None and accelerator.has(Capability.GRAPHS):
        _step(state)  # kernels must not be loaded within a capture
        state["token"].fill_(3)
        state["position"].zero_()
        accelerator.synchronize()
        graph = accelerator.create_graph()
        with accelerator.capture_to_graph(graph):
            _step(state)
    tokens = []
    for _ in range(_STEPS):
        if graph is None or accelerator is None:
            _step(state)
        else:
            accelerator.replay_graph(graph)
        tokens += state["token"].tolist()
    with contextlib.suppress(AttributeError):
        graph.reset()  # type: ignore[union-attr]
    return tokens


def _same_value(tensor: torch.Tensor) -> float:
    """The value that all elements have; nan when they differ."""
    values = set(tensor.to(HOST).tolist())
    return float(values.pop()) if len(values) == 1 else float("nan")
