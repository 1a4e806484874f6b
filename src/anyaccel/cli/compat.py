# SPDX-License-Identifier: Apache-2.0
"""`anyaccel compat`: the DeepSpeed alias of this environment."""

from __future__ import annotations

import json
import sys

from anyaccel.cli._parser import Parser

_EXAMPLES = """\
  anyaccel compat install        # `import deepspeed`, `deepspeed` and `ds_report` are anyaccel's from now on
  anyaccel compat status
  anyaccel compat remove
  anyaccel run --as-deepspeed script.py      # for one job, nothing is installed
"""


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "compat",
        "Make scripts that import deepspeed run on anyaccel.\n\n"
        "  install  a .pth file and the scripts deepspeed and ds_report, in the environment of this Python; refuses\n"
        "           where DeepSpeed itself is installed, and overwrites no file of others\n"
        "  remove   take them away again\n"
        "  status   what is there, and what `import deepspeed` would load\n\n"
        "docs/deepspeed-names.md lists which names are covered.",
        _EXAMPLES,
    )
    parser.add_argument("action", choices=("install", "remove", "status"), help="see above")
    parser.add_argument("--json", action="store_true", help="with status: print one JSON object instead of text")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; `status` returns 1 where `import deepspeed` does not import the alias."""
    options = build_parser().parse_args(argv)
    from anyaccel import compat

    if options.action == "install":
        for path in (written := compat.install()):
            print(f"wrote {path}")
        print("import deepspeed is anyaccel's now" if written else "nothing to do: the alias is installed")
        return 0
    if options.action == "remove":
        removed, left = compat.remove()
        for path in removed:
            print(f"removed {path}")
        for path in left:
            print(f"left as it is: {path}, which was changed after it had been installed", file=sys.stderr)
        if not (removed or left):
            print("nothing to do: the alias is not installed")
        return 0
    return _status(options.json)


def _status(as_json: bool) -> int:
    from anyaccel import compat

    state = compat.status()
    if as_json:
        print(json.dumps({**vars(state)}, indent=2))
    else:
        print(f"alias: {'installed' if state.installed else 'incomplete' if state.files else 'not installed'}")
        for path, condition in state.files.items():
            print(f"  {condition}: {path}")
        whose = "anyaccel" if state.is_alias else "not anyaccel"
        print(f"import deepspeed: {f'{state.imported} ({whose})' if state.imported else 'there is none'}")
    return 0 if state.installed and state.is_alias else 1
