# SPDX-License-Identifier: Apache-2.0
"""What of torch.cuda becomes what of the accelerator: for programs that run unchanged, and for the porting tool.

Imports no torch; a test checks it against the interface and torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """Where a function of torch.cuda goes.

    Attributes:
        name: of the method of the accelerator.
        parameters: of the torch.cuda function, each with its name in the method; the order is the same in both.
    """

    name: str
    parameters: tuple[tuple[str, str], ...] = ()


def _same(names: str, *parameters: tuple[str, str]) -> dict[str, Method]:
    return {name: Method(name, parameters) for name in names.split()}


DEVICE = ("device", "device_index")

# Function of torch.cuda -> method of the accelerator.
FUNCTIONS: dict[str, Method] = {
    **_same("is_available device_count empty_cache initial_seed is_current_stream_capturing"),
    **_same("manual_seed manual_seed_all", ("seed", "seed")),
    **_same("set_device synchronize current_stream default_stream get_rng_state", DEVICE),
    **_same("set_rng_state", ("new_state", "new_state"), DEVICE),
    **_same("memory_allocated max_memory_allocated reset_max_memory_allocated memory_stats", DEVICE),
    **_same("memory_reserved max_memory_reserved memory_cached max_memory_cached", DEVICE),
    **_same("reset_max_memory_cached reset_peak_memory_stats", DEVICE),
    **_same("stream", ("stream", "stream")),
    **_same("mem_get_info", DEVICE),
    **_same("get_rng_state_all"),
    **_same("memory_summary", DEVICE, ("abbreviated", "abbreviated")),
    **_same("set_rng_state_all", ("new_states", "new_states")),
    **_same("is_bf16_supported", ("including_emulation", "including_emulation")),
    "get_device_properties": Method("device_properties", (DEVICE,)),
    "get_device_capability": Method("device_capability", (DEVICE,)),
    "_lazy_call": Method("lazy_call", (("callable", "callback"),)),
}
# Context managers.
CONTEXTS = {"device": Method("device_guard", (DEVICE,))}
# Classes that the accelerator has under the same name; their arguments are the vendor's.
CLASSES = ("Stream", "Event")
TYPED_TENSORS = ("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor")
GRAPH_FUNCTIONS = {
    "CUDAGraph": Method("create_graph"),
    "graph": Method("capture_to_graph", (("cuda_graph", "graph"), ("pool", "pool"), ("stream", "stream"))),
}
NVTX = {"range_push": Method("range_push", (("msg", "msg"),)), "range_pop": Method("range_pop")}
