# SPDX-License-Identifier: Apache-2.0
"""What goes to other processes and to other software: variables, versions, compilers, profilers."""

from __future__ import annotations

import importlib

import torch

from anyaccel.accelerator.base import Accelerator
from anyaccel.accelerator.conformance.checking import (
    UncheckedError,
    check,
    expect,
    expect_equal,
    expect_error,
    expect_none,
    expect_strings,
    expect_type,
)
from anyaccel.errors import UsageError


@check("environment", "export_envs")
def check_export_envs_are_prefixes(accelerator: Accelerator) -> None:
    """Without the sign and the value that a mistaken backend might give."""
    prefixes = accelerator.export_envs()
    expect_strings("export_envs()", prefixes)
    expect(not any("=" in prefix for prefix in prefixes), "export_envs() without '='", prefixes)


@check("environment", "visible_devices_envs", "set_visible_devices_envs")
def check_visible_devices_are_written_for_a_child(accelerator: Accelerator) -> None:
    """Each variable and nothing else, into the mapping that is given."""
    names = accelerator.visible_devices_envs()
    expect_strings("visible_devices_envs()", names)
    for devices, text in (([0], "0"), ([1, 0], "1,0"), (["2"], "2")):
        child: dict[str, str] = {"KEPT": "yes"}
        expect_none("set_visible_devices_envs()", accelerator.set_visible_devices_envs, child, devices)
        expected = {"KEPT": "yes", **dict.fromkeys(names, text)}
        expect_equal(f"set_visible_devices_envs(env, {devices}) to make it", child, expected)


@check("environment", "runtime_versions")
def check_runtime_versions_are_text_by_name(accelerator: Accelerator) -> None:
    """For reports; may be empty."""
    versions = accelerator.runtime_versions()
    expect_type("runtime_versions()", versions, dict)
    fine = all(isinstance(item, str) and item for pair in versions.items() for item in pair)
    expect(fine, "runtime_versions() of names and texts", versions)


@check("compilation", "get_compile_backend", "set_compile_backend")
def check_the_compile_backend_is_known_to_torch(accelerator: Accelerator) -> None:
    """Another one can be chosen, one that torch does not know cannot."""
    before = accelerator.get_compile_backend()
    expect_type("get_compile_backend()", before, str)
    try:
        expect_none("set_compile_backend('eager')", accelerator.set_compile_backend, "eager")
        expect_equal("get_compile_backend() after that", accelerator.get_compile_backend(), "eager")
        unknown = "no_such_backend"
        expect_error(
            f"set_compile_backend({unknown!r})", lambda: accelerator.set_compile_backend(unknown), UsageError, unknown
        )
        expect_equal("after an unknown backend, get_compile_backend()", accelerator.get_compile_backend(), "eager")
    finally:
        accelerator.set_compile_backend(before)
    expect_equal("when it is set back, get_compile_backend()", accelerator.get_compile_backend(), before)


@check("compilation", "build_extension")
def check_build_extension_is_a_setuptools_command(accelerator: Accelerator) -> None:
    """A class for `cmdclass` of a setup.py."""
    try:
        build_ext = importlib.import_module("setuptools.command.build_ext").build_ext
    except ImportError as error:
        raise UncheckedError(f"setuptools, which build_extension() is for, cannot be imported: {error}") from error
    command = accelerator.build_extension()
    fits = isinstance(command, type) and issubclass(command, build_ext)
    expect(fits, "build_extension() a subclass of setuptools' build_ext", command)


@check("profiling", "range_push", "range_pop")
def check_ranges_nest(accelerator: Accelerator) -> None:
    """Two ranges around work, with and without a domain."""
    for push, pop in (((), ()), (("domain", "category"), ("domain",))):
        expect_none("range_push()", accelerator.range_push, "outer", *push)
        accelerator.range_push("inner", *push)
        torch.ones(4, device=accelerator.current_device_name()).sum()
        accelerator.range_pop(*pop)
        expect_none("range_pop()", accelerator.range_pop, *pop)


@check("profiling", "lazy_call")
def check_lazy_call_calls_once(accelerator: Accelerator) -> None:
    """At once, since the device is initialised by now."""
    torch.ones(1, device=accelerator.current_device_name())
    calls: list[int] = []
    accelerator.lazy_call(lambda: calls.append(1))
    expect_equal("lazy_call() on an initialised device to call this many times:", len(calls), 1)
