# SPDX-License-Identifier: Apache-2.0
"""Reads from this machine what a plan depends on, and makes the plan."""

from __future__ import annotations

import _socket  # what socket.py is made of, without its enums and selectors
import os
from collections.abc import Mapping, Sequence

from anyaccel.errors import UsageError
from anyaccel.launch.counts import shorten
from anyaccel.launch.plan.ancestors import without_outer_openmp
from anyaccel.launch.plan.devices import count_devices, device_nodes, find_devices
from anyaccel.launch.plan.options import BindingOptions, LaunchOptions
from anyaccel.launch.plan.plan import Equipment, HostPlace, LaunchPlan, build_plan
from anyaccel.topology import Machine, read_machine


def make_plan(
    options: LaunchOptions,
    machine: Machine | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    extra_env: Mapping[str, str] | None = None,
    place: HostPlace | None = None,
    root: str = "",
) -> LaunchPlan:
    """The plan for `options` on this machine. Starts nothing.

    Args:
        machine: what to plan for; read from this machine when left out.
        environ: the environment that the workers will inherit; when left out, `os.environ` without what an outer
            `anyaccel run` has set for its own ranks.
        extra_env: more variables for every worker. Those of the plan itself win.
        place: where the ranks of this machine stand in the whole job; when left out, they are all.
        root: folder with `sys/`, `proc/` and `dev/` of a recorded machine; "" for this one.

    Raises:
        UsageError: what is asked for cannot be had on this machine.
    """
    machine = machine or read_machine()
    environ = without_outer_openmp(os.environ) if environ is None else environ
    if options.master_addr is not None:
        check_address(options.master_addr)
    # In a job on several hosts, the launcher has chosen the port.
    port = free_port(options.master_port) if place is None else options.master_port or 0
    place = place or HostPlace()
    counted = bool(options.num_accelerators) or place.devices is not None
    equipment = Equipment(
        devices=1 if counted else count_devices(machine, environ, root),
        device_nodes=nodes_of_devices(options, machine, environ, root, place.all_devices or place.devices),
        device_variable="" if place.devices is None else find_devices(machine, environ, root).variable,
        allocator=allocator_path(options, environ),
    )
    return build_plan(options, machine, equipment, master_port=port, environ=environ, extra_env=extra_env, place=place)


def free_port(wanted: int | None = None) -> int:
    """A TCP port that nobody listens on: `wanted`, or one that the kernel picks.

    The port is bound on all addresses, as rank 0 will do it, but never listened on.

    Raises:
        UsageError: `wanted` is in use, or not allowed.
    """
    probe = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    try:
        # Closed connections of an earlier job, in TIME_WAIT, must not make the port count as used.
        probe.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        probe.bind(("", wanted or 0))
        port: int = probe.getsockname()[1]
    except OSError as error:
        raise UsageError(
            f"--master_port {wanted} cannot be used: {error.strerror}; choose another, or leave it out"
        ) from None
    finally:
        probe.close()
    return port


def check_address(address: str) -> None:
    """Raise UsageError if `address` does not resolve: workers would wait for rank 0 for minutes."""
    try:
        _socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"--master_addr {shorten(address)} does not resolve on {os.uname().nodename}: {why}; "
            "give the address of rank 0's host, or a name of it that every host knows"
        ) from None


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
    from anyaccel.launch.plan.allocators import find_allocator  # few launches need it

    return find_allocator(options.malloc, environ)
