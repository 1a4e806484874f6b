# SPDX-License-Identifier: Apache-2.0
"""Asks this machine for what a plan depends on, and makes the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.launch.devices import count_devices, device_nodes, find_devices
from anyaccel.launch.options import BindingOptions, LaunchOptions
from anyaccel.launch.plan import LaunchPlan, Place, build_plan
from anyaccel.topology import Machine


def plan_here(
    options: LaunchOptions,
    machine: Machine,
    *,
    master_port: int,
    environ: Mapping[str, str],
    extra_env: Mapping[str, str] | None = None,
    place: Place | None = None,
    device_ids: Sequence[int] | None = None,
    all_device_ids: Sequence[int] | None = None,
    root: str = "",
) -> LaunchPlan:
    """`build_plan` with the devices, their NUMA nodes and the allocator that this machine has.

    Args:
        all_device_ids: those of all workers of this machine, where another name of it has some; see `Place`.
        root: folder with `sys/`, `proc/` and `dev/` of a recorded machine; "" for this one.

    Raises:
        UsageError: what is asked for cannot be had on this machine.
    """
    counted = bool(options.num_accelerators) or device_ids is not None
    return build_plan(
        options,
        machine,
        devices=1 if counted else count_devices(machine, environ, root),
        master_port=master_port,
        environ=environ,
        extra_env=extra_env,
        place=place or Place(),
        device_ids=device_ids,
        device_nodes=nodes_of_devices(options, machine, environ, root, all_device_ids or device_ids),
        device_variable="" if device_ids is None else find_devices(machine, environ, root).variable,
        allocator=allocator_path(options, environ),
    )


def nodes_of_devices(
    options: BindingOptions,
    machine: Machine,
    environ: Mapping[str, str],
    root: str = "",
    device_ids: Sequence[int] | None = None,
) -> tuple[int | None, ...]:
    """NUMA node of each visible device where the plan depends on it, else ()."""
    if not options.bind_cores or options.core_list is not None or len(machine.nodes_with_cores()) < 2:
        return ()
    return device_nodes(machine, environ, root, device_ids)


def allocator_path(options: BindingOptions, environ: Mapping[str, str]) -> str:
    """The library to preload; "" for none.

    Raises:
        UsageError: it is not installed.
    """
    if options.malloc == "default":
        return ""
    from anyaccel.launch.allocators import find_allocator  # few launches need it

    return find_allocator(options.malloc, environ)
