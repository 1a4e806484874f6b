# SPDX-License-Identifier: Apache-2.0
"""Writes the table of methods × backends in docs/backends.md, from what the contract tests see the backends call."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anyaccel.vendors import VENDORS
from generators import DOCS, ROOT, fill

PAGE = DOCS / "backends.md"

# A vendor's own way to its devices is the last one that detection tries.
COLUMNS = {name: list(vendor.backends)[-1] for name, vendor in VENDORS.items()}
# The same backend over other software, told by what is different.
VARIANTS = {
    "cuda.rocm": ("cuda", "`cuda` on ROCm"),
    "xpu.ipex": ("xpu.native", "`xpu` with intel_extension_for_pytorch"),
    "hpu.eager": ("hpu", "`hpu` in eager mode (`PT_HPU_LAZY_MODE=0`)"),
}
# Names of methods, with blanks between them.
GROUPS: dict[str, str] = {
    "Devices": (
        "device_name device current_device_name current_device set_device device_guard device_count "
        "is_available synchronize"
    ),
    "How it works": ("is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure"),
    "Random numbers": (
        "random manual_seed manual_seed_all initial_seed get_rng_state set_rng_state get_rng_state_all "
        "set_rng_state_all default_generator"
    ),
    "Streams and events": "Stream stream current_stream default_stream Event",
    "Memory of a device": (
        "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached "
        "memory_stats reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached total_memory "
        "available_memory mem_get_info memory_summary device_properties device_capability empty_cache"
    ),
    "Data types": "is_bf16_supported is_fp16_supported is_fp64_supported supported_dtypes",
    "Profiling, later calls, communication, Triton": (
        "range_push range_pop lazy_call communication_backend_name is_triton_supported prefer_triton_grouped_mm"
    ),
    "Graphs": "create_graph capture_to_graph replay_graph is_current_stream_capturing",
    "Tensors": ("BFloat16Tensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor on_accelerator"),
    "Host memory": (
        "pin_memory is_pinned unpin_memory pin_empty pin_empty_like pin_memory_alignment register_host_memory "
        "unregister_host_memory"
    ),
    "Ops, environment and compilation": (
        "op_builder_dir create_op_builder get_op_builder build_extension runtime_versions export_envs "
        "visible_devices_envs set_visible_devices_envs get_compile_backend set_compile_backend"
    ),
}


def cell(outcome: Any) -> str:
    """What a backend does for one method."""
    if outcome.result == "absent":
        return "absent"
    if outcome.result != "right":
        return "**wrong**"
    return " ".join(f"`{name}`" for name in outcome.calls) or ("own" if outcome.own else "default")


def tables(outcomes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The lines of the generated part."""
    for title, methods in GROUPS.items():
        yield from ("", f"## {title}", "")
        yield f"| method | {' | '.join(COLUMNS)} |"
        yield "| --- |" + " --- |" * len(COLUMNS)
        for method in methods.split():
            yield f"| `{method}` | {' | '.join(cell(outcomes[name][method]) for name in COLUMNS.values())} |"
    yield from ("", "## The same backend over other software", "")
    for name, (base, title) in VARIANTS.items():
        changes = [
            f"`{method}`: {cell(outcomes[name][method])}"
            for methods in GROUPS.values()
            for method in methods.split()
            if cell(outcomes[name][method]) != cell(outcomes[base][method])
        ]
        yield f"- {title}: {'; '.join(changes) or 'the same calls'}."
    yield ""


def page(outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the generated part as it must be."""
    return fill(PAGE.read_text(), "backends", tables(outcomes))


def files() -> dict[Path, str]:
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "accelerator"))
    from vendors import run_all

    return {PAGE: page(run_all())}
