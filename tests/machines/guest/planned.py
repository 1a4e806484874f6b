# SPDX-License-Identifier: Apache-2.0
"""`anyaccel run` with these words, behind a line of JSON: its plan for them, or its refusal to make one.

    planned.py [OPTION...] SCRIPT [ARGUMENT...]

One process does both: where all is emulated, half of the time of a short job is that of its imports.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from anyaccel.cli import main as anyaccel


def main() -> int:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = anyaccel(["run", "--dry-run", "--json", *sys.argv[1:]])
    plan = json.loads(out.getvalue()) if status == 0 else {}
    print(json.dumps({"plan": plan, "planning": status, "said": err.getvalue()}), flush=True)
    return anyaccel(["run", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
