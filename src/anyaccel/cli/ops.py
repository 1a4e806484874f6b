# SPDX-License-Identifier: Apache-2.0
"""`anyaccel ops`: list the native ops of this machine's accelerator, build them, and clean their cache."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from anyaccel.cli._parser import Parser
from anyaccel.cli._screen import waiting
from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.terminal import did_you_mean, table, table_width

if TYPE_CHECKING:
    from anyaccel.ops.builder import OpBuilder


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "ops",
        "List, build or clean up the native ops of the accelerator in use.\n\n"
        "  list   each op: prebuilt with the package, cached (built here before), jit (would be built on first use),\n"
        "         or unavailable, and why\n"
        "  build  build those that are not prebuilt, so that the first use does not wait\n"
        "  clean  remove everything that was built from the user's cache",
        "  anyaccel ops\n  anyaccel ops build CPUAdamBuilder\n  anyaccel ops list --json | jq '.ops[].status'\n"
        "  anyaccel ops clean",
    )
    parser.add_argument("action", nargs="?", choices=("list", "build", "clean"), default="list", help="default: list")
    parser.add_argument("names", nargs="*", metavar="OP", help="op or builder class; default: all")
    parser.add_argument("--jit", action="store_true", help="also build ops that are prebuilt, to compare or to debug")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the compilers' commands")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns 1 when an op cannot be built."""
    options = build_parser().parse_intermixed_args(argv)  # names may follow flags
    if options.action == "clean":
        if options.names:
            raise UsageError("anyaccel ops clean removes everything that was built; it takes no names")
        return _clean(options.json)

    from anyaccel.accelerator import get_accelerator
    from anyaccel.accelerator.isolated import run_isolated
    from anyaccel.accelerator.select import silence_detection
    from anyaccel.ops import builders_in

    silence_detection()
    with waiting("looking for accelerators"):
        run_isolated(_import_torch, "importing torch")
        accelerator = get_accelerator()
    builders = _select(builders_in(accelerator.op_builder_dir()), options.names)
    if options.action == "list":
        return _list(accelerator._name, builders, options.json)
    return _build(builders, options)


def _import_torch() -> None:
    """Import torch; this runs in another process, since importing a damaged installation may kill it."""
    from anyaccel.accelerator.autoload import import_torch

    with contextlib.suppress(AnyAccelError):  # get_accelerator raises it again, and the command reports that one
        import_torch()


def _select(builders: dict[str, type[OpBuilder]], names: list[str]) -> dict[str, OpBuilder]:
    known = {name: kind() for name, kind in builders.items()}
    by_any_name = {**{builder.name: name for name, builder in known.items()}, **{name: name for name in known}}
    unknown = [name for name in names if name not in by_any_name]
    if unknown:
        ops = ", ".join(sorted(builder.name for builder in known.values()))
        raise UsageError(f"no op is called {unknown[0]!r}{did_you_mean(unknown[0], by_any_name)}; there are {ops}")
    wanted = {by_any_name[name] for name in names} or set(known)
    return {name: builder for name, builder in known.items() if name in wanted}


def _list(accelerator: str, builders: dict[str, OpBuilder], as_json: bool) -> int:
    rows: list[dict[str, Any]] = []
    for name, builder in builders.items():
        status = builder.status()
        rows.append(
            {
                "op": builder.name,
                "builder": name,
                "status": status.kind,
                "detail": status.detail,
                "build_s": status.seconds,
                "variant": "" if status.kind == "unavailable" else builder.variant(),
            }
        )
    if as_json:
        print(json.dumps({"accelerator": accelerator, "kernels": _isa(), "ops": rows}, indent=2))
        return 0
    print(f"ops of {accelerator}; kernels use {_isa()}")
    cells = [("op", "builder", "status", "build", "detail")]
    for row in rows:
        seconds = "" if row["build_s"] is None else f"{row['build_s']:.1f} s"
        cells.append((row["op"], row["builder"], row["status"], seconds, row["detail"]))
    print(table(cells, table_width(sys.stdout)))
    return 0


def _isa() -> str:
    from anyaccel import _native

    return _native.isa()


def _build(builders: dict[str, OpBuilder], options: Any) -> int:
    results = []
    for name, builder in builders.items():
        before = builder.status()
        result: dict[str, Any] = {"op": builder.name, "builder": name, "status": before.kind, "detail": before.detail}
        seconds = ""
        if before.kind == "jit" or (options.jit and before.kind == "prebuilt"):
            _say(options, f"{builder.name}: building ...")
            started = time.perf_counter()
            try:
                with contextlib.nullcontext() if options.verbose else waiting(f"compiling {builder.name}"):
                    builder.jit_load(verbose=options.verbose)
                result |= {"status": "built", "detail": "", "build_s": round(time.perf_counter() - started, 3)}
                seconds = f" in {result['build_s']:.1f} s"
            except AnyAccelError as error:
                result |= {"status": "failed", "detail": str(error)}
        _say(options, ": ".join(filter(None, [builder.name, f"{result['status']}{seconds}", result["detail"]])))
        results.append(result)
    if options.json:
        print(json.dumps({"ops": results}, indent=2))
    failures = ("failed", "unavailable") if options.names else ("failed",)
    return int(any(row["status"] in failures for row in results))


def _say(options: Any, text: str) -> None:
    print(text, file=sys.stderr if options.json else sys.stdout, flush=True)


def _clean(as_json: bool) -> int:
    from anyaccel import env
    from anyaccel.ops import jit

    cache = env.cache_dir().absolute() / "ops"
    libraries, size = jit.clean(cache)
    if as_json:
        print(json.dumps({"cache": str(cache), "libraries": libraries, "bytes": size}))
    else:
        print(f"{cache}: removed {libraries} librar{'y' if libraries == 1 else 'ies'}, {size / 2**20:.1f} MiB")
    return 0
