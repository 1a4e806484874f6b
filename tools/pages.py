#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what is made of the code in pages, pictures and tables: a module of tools/generators for each.

python tools/pages.py                  all of them; backends takes 20 s
python tools/pages.py commands vendors
python tools/pages.py --check          writes nothing; exit code 1 when something is out of date
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import generators

NAMES = sorted(file.stem for file in Path(generators.__file__).parent.glob("[!_]*.py"))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to write: {', '.join(NAMES)}; default: all")
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    outdated = 0
    for name in options.names or NAMES:
        for path, text in importlib.import_module(f"generators.{name}").files().items():
            if text == path.read_text(encoding="utf-8"):
                continue
            shown = path.relative_to(generators.ROOT)
            print(f"{shown} is out of date: python tools/pages.py {name}" if options.check else f"{shown} is written")
            outdated += 1
            if not options.check:
                path.write_text(text, encoding="utf-8")
    return int(options.check and outdated > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
